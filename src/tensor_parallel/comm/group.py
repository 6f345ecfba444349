"""What a rank may ask of the others. Threads of one process and processes of torch.distributed differ in which Group is
passed down, in nothing else.

Every collective is out of place and differentiable; its backward is its true adjoint: all_reduce gives every rank the
sum of the gradients that arrived, all_gather hands each rank its slice of that sum (to the rank whose piece was taken,
alone). A gradient that did not arrive counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tensor_parallel.layout import Cuts, Placement

Holders = Sequence[Sequence[int]]
"""Lists of ranks that hold one and the same."""


class Group(Protocol):
    """The ranks that talk, seen from one of them."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor, *, contributes: bool = True) -> torch.Tensor:
        """The sum over the ranks, on this rank's device. A rank that does not contribute counts as zeros, and no
        gradient goes to its tensor."""
        ...

    def gather_first(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """As all_gather, for rank 0 alone: the others have no use for what they get."""
        ...

    def stand_by(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """At rank 0's last gather: rank 0 goes on with its `tensor`. The others wait until rank 0 calls `release`,
        which gives them None, or a collective, which gives them a copy of rank 0's tensor: they are needed again."""
        ...

    def release(self) -> None:
        """Rank 0 is done: ranks that stand by are not needed."""
        ...

    def all_gather(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """The whole of a tensor that lies as `placement` (kind "shard"): each piece is taken from the first rank that
        holds it, unsplit segments from rank 0, nothing from a rank that holds nothing (its tensor is a stand-in)."""
        ...

    def withheld(self, tensor: torch.Tensor) -> torch.Tensor:
        """Zeros in place of a tensor that counts on another rank alone; no gradient goes to it."""
        ...

    def assemble(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of this shape whose flat stretches the ranks hold, one after the other. It may share memory with
        the other ranks', and must not be written into."""
        ...

    def broadcast(self, tensor: torch.Tensor, holders: Holders | None = None) -> torch.Tensor:
        """The tensor of the first rank of this rank's list in `holders` (by default all ranks are one list), of which
        the others of the list have the same values already: nothing is sent. In backward the first gets the sum of the
        list's gradients, the others none. Where a whole tensor meets a split one, this gathers the parts of its
        gradient: what lies before sees one whole gradient, and rounds it as the unsplit model does. A rank in no list
        keeps its own."""
        ...

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank 0's tensors, on every rank: rank 0 keeps its own, the others get copies on their devices that they may
        write into. In backward rank 0's get the sum of all ranks' gradients. What the others bring is not looked at."""
        ...

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s value, on every rank; not differentiable."""
        ...

    def barrier(self) -> None: ...

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """The group of `ranks` (all of this group's ranks call it); None on a rank that is not one of them."""
        ...

    def abort(self, error: BaseException) -> None:
        """Free every rank that waits or will wait in this group: they raise RankError from `error`."""
        ...
