"""Counting collectives: a group that moves nothing, and a record of what a real group does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from tensor_parallel.comm.gather import whole_layouts
from tensor_parallel.comm.group import Holders
from tensor_parallel.comm.threads import Call, ThreadGroup
from tensor_parallel.layout import Cuts, DimLayout, Placement, TensorLayout, holds_nothing, put_local


class RecordingGroup:
    """One rank alone, as if it were rank `rank` of `size`; a Group. `calls` lists every collective with the bytes of
    the whole tensor. What the other ranks would give counts as zeros."""

    def __init__(self, size: int, rank: int = 0) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; a group of {size} has ranks 0 to {size - 1}")
        self._size = size
        self._rank = rank
        self.calls: list[Call] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: torch.Tensor, *, contributes: bool = True) -> torch.Tensor:
        self.calls.append(("all_reduce", tensor.nbytes))
        return tensor.clone() if contributes else torch.zeros_like(tensor)

    def all_gather(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        shape, cut = whole_layouts(placement, cuts, self._rank, tensor.shape)
        whole = tensor.new_zeros(shape)
        if not holds_nothing(placement.cut_by, cuts, self._rank):
            dims = {dim + len(shape): layout for dim, layout in cut}
            layout = TensorLayout(tuple(dims.get(dim, DimLayout.whole(n)) for dim, n in enumerate(shape)))
            put_local(whole, tensor, layout, cuts, self._rank)
        self.calls.append(("all_gather", whole.nbytes))
        return whole

    def gather_first(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """As all_gather."""
        return self.all_gather(tensor, placement, cuts)

    def stand_by(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor: this rank goes on."""
        return tensor

    def release(self) -> None:
        """Nobody waits here."""

    def withheld(self, tensor: torch.Tensor) -> torch.Tensor:
        """Zeros: another rank's tensor counts."""
        return torch.zeros_like(tensor)

    def assemble(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """This rank's stretch, and zeros for those of the others."""
        rest = tensor.new_zeros(prod(shape) - tensor.numel())
        self.calls.append(("assemble", prod(shape) * tensor.element_size()))
        return torch.cat([tensor.reshape(-1), rest]).view(list(shape))

    def broadcast(self, tensor: torch.Tensor, holders: Holders | None = None) -> torch.Tensor:
        """The tensor: nothing is sent forwards."""
        return tensor

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's own tensors: there are no others."""
        self.calls.append(("broadcast_tensors", sum(tensor.nbytes for tensor in tensors)))
        return list(tensors)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """This rank's own value: there is no other."""
        self.calls.append(("broadcast_object", 0))
        return value

    def barrier(self) -> None:
        self.calls.append(("barrier", 0))

    def subgroup(self, ranks: Sequence[int]) -> RecordingGroup | None:
        """A group of that many ranks that writes into the same list."""
        if self._rank not in ranks:
            return None
        made = RecordingGroup(len(ranks), list(ranks).index(self._rank))
        made.calls = self.calls
        return made

    def abort(self, error: BaseException) -> None:
        """Nobody waits here."""


@contextmanager
def recorded(group: ThreadGroup) -> Iterator[list[Call]]:
    """List (op, bytes of the whole tensor) of each all_reduce and all_gather that this rank calls meanwhile.

    with recorded(groups[0]) as calls:
        model(inputs)
    """
    before = group.record
    calls: list[Call] = []
    group.record = calls
    try:
        yield calls
    finally:
        group.record = before
