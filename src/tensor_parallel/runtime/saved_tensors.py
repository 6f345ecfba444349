"""The caller's saved-tensor hooks (activation checkpointing, offloading), applied in the caller's thread.

Entered in the ranks' threads they would be called by all at once, in an order that changes from run to run, which
checkpointing by the caller cannot match with its recomputation. So the ranks keep what autograd saves in slots, and the
caller packs the slots after the run, rank by rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Hook = Callable[[Any], Any]


class _Slot:
    """One saved tensor: itself during the run, what the caller's hook made of it afterwards."""

    __slots__ = ("__weakref__", "packed", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = -1 if tensor.is_inference() else tensor._version
        self.packed: Any = None

    def pack(self, hook: Hook) -> None:
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            return
        if not tensor.is_inference() and tensor._version != self.version:
            raise RuntimeError(
                f"a {tuple(tensor.shape)} tensor that autograd saved was changed in place later in the same forward; "
                "under saved-tensor hooks of the caller a split model cannot keep its earlier value: change "
                "it out of place"
            )
        self.packed = hook(tensor)


class SavedTensors:
    """What the ranks of one run saved, for the caller's hooks."""

    def __init__(self, pack: Hook, unpack: Hook, world_size: int) -> None:
        self._pack, self._unpack = pack, unpack
        self._slots: list[list[weakref.ref[_Slot]]] = [[] for _ in range(world_size)]

    @classmethod
    def of_caller(cls, world_size: int) -> SavedTensors | None:
        """For the hooks that are active in the calling thread; None where there are none."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return None if hooks is None else cls(*hooks, world_size)

    def around(self, work: Callable[[int], T]) -> Callable[[int], T]:
        """`work` with everything that a rank saves put into slots."""
        unpack = self._unpack

        def restore(slot: _Slot) -> Any:
            return unpack(slot.packed) if slot.tensor is None else slot.tensor

        def saving(rank: int) -> T:
            slots = self._slots[rank]

            def keep(tensor: torch.Tensor) -> _Slot:
                slot = _Slot(tensor)
                slots.append(weakref.ref(slot))
                return slot

            with torch.autograd.graph.saved_tensors_hooks(keep, restore):
                return work(rank)

        return saving

    def hand_over(self) -> None:
        """Pack all slots, in the caller's thread, rank by rank; those whose graph is gone already are left out.

        Raises:
            RuntimeError: a saved tensor was changed in place before the run ended.
        """
        slots, self._slots = self._slots, []
        for of_rank in slots:
            for ref in of_rank:
                slot = ref()
                if slot is not None:
                    slot.pack(self._pack)
