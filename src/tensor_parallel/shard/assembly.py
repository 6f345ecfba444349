"""Parameters of which each rank keeps a piece and computes with the whole (ZeRO-3): put together when they are read,
let go when the module is through.

Whoever reads `module.weight` in a rank finds no such attribute in the module, so that `__getattr__` is asked, which
meets the other ranks for it: they run the same code and read it too. Autograd keeps what it saves of the assembled
tensor as a reference, and it is put together once more in backward, by whoever runs that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensor_parallel.shard.pieces import SplitTensor
from tensor_parallel.shard.shards import ModelShards, slot_of


def assembled_names(module: nn.Module, shards: ModelShards) -> dict[str, SplitTensor]:
    """The module's parameters that are to be assembled, by name."""
    found = {}
    for name, parameter in module._parameters.items():
        key = shards.key_of.get(id(parameter))
        if key is not None and is_assembled(shards.tensors[key]):
            found[name] = shards.tensors[key]
    return found


def is_assembled(split: SplitTensor) -> bool:
    """Whether ranks compute with the whole of a tensor that they hold in pieces."""
    return split.plan.action is not None and split.plan.action.assembled


def reading(base: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
    """`__getattr__` for a subclass of `base` whose modules have such parameters."""
    plainly: Callable[[nn.Module, str], Any] = base.__getattr__

    def read(module: nn.Module, name: str) -> Any:
        slot = slot_of(module)
        if slot is not None and name in slot.assembled:
            rank = slot.rank_here()
            if rank is not None and rank != slot.rank:
                return getattr(slot.shards.module(rank, slot.name), name)
            if rank is not None:
                return _assembled(module, name)
        return plainly(module, name)

    return read


def _assembled(module: nn.Module, name: str) -> torch.Tensor:
    slot = module.__dict__["_tp_slot"]
    key = name, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    whole: torch.Tensor | None = slot.wholes.get(key)
    if whole is None:
        split: SplitTensor = slot.assembled[name]
        shards: ModelShards = slot.shards
        piece = module._parameters[name]
        whole = shards.team.groups[slot.rank].assemble(piece, split.plan.layout.shape)
        slot.wholes[key] = whole
        run = shards.under_way
        if run is not None:
            run.wholes[slot.rank][whole.untyped_storage().data_ptr()] = weakref.ref(whole), split
            run.slots.append(slot)
    return whole


def letting_go(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward after which the module's assembled parameters are let go."""

    def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(module, *args, **kwargs)
        finally:
            module.__dict__["_tp_slot"].wholes.clear()

    return through


@dataclass(frozen=True, slots=True)
class _Reference:
    """What autograd saved of an assembled tensor: which, and the view of it."""

    split: SplitTensor
    versions: tuple[int, ...]
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        if self.versions != _versions(self.split):
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.split.plan.names[0]}, of which the ranks hold pieces, between a forward and its backward"
            )
        with torch.no_grad():
            whole = self.split.whole().to(self.device)
        return whole.as_strided(self.size, self.stride, self.offset)


def _versions(split: SplitTensor) -> tuple[int, ...]:
    return tuple(piece.tensor._version for piece in split.pieces)


@contextmanager
def saving_references(shards: ModelShards, rank: int) -> Iterator[None]:
    """Around a rank's part of a run: what autograd saves of assembled tensors is a reference; the rest goes to the
    hooks that are there already."""
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    run = shards.under_way
    if run is None or not shards.assembles:
        yield
        return
    wholes = run.wholes[rank]

    def pack(tensor: torch.Tensor) -> Any:
        known = wholes.get(tensor.untyped_storage().data_ptr())
        if known is not None and known[0]() is not None:
            size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return _Reference(known[1], _versions(known[1]), tensor.device, size, stride, offset)
        return tensor if outer is None else _Packed(outer[0](tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Reference):
            return packed.tensor()
        found: torch.Tensor = outer[1](packed.value) if isinstance(packed, _Packed) else packed
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True, slots=True)
class _Packed:
    """What the hooks around these made of a saved tensor."""

    value: Any
