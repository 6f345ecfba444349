"""What a split model asks of the ranks it runs on. The runtime's teams have it; nothing here knows how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tensor_parallel.comm.draws import Layouts
from tensor_parallel.comm.failures import Owner
from tensor_parallel.comm.group import Group
from tensor_parallel.comm.rendezvous import Graphs


class Team(Protocol):
    """N ranks of this process, each with its device and its group."""

    @property
    def world_size(self) -> int: ...

    @property
    def devices(self) -> tuple[torch.device, ...]: ...

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def graphs(self) -> Graphs:
        """What autograd made of its runs."""
        ...

    @property
    def owner(self) -> Owner:
        """What joint nodes made outside of the ranks' threads belong to."""
        ...

    def run(self, work: Callable[[int], Any], *, joint_random: bool | Layouts = False) -> list[Any]:
        """`work(rank)` on every rank at once; the results by rank. joint_random: ranks draw random numbers together."""
        ...

    def as_caller(self, rank: int, work: Callable[[list[Any]], Any], value: Any) -> Any:
        """All ranks call it, each with its `value`. Rank 0 does `work(values)` as if it were the caller (`rank_here()`
        is None, and `run` runs inside the run under way) while the others serve; all get the very result."""
        ...

    def acts_as_caller(self) -> bool:
        """Whether the calling thread is rank 0's, within `as_caller`."""
        ...

    def rank_here(self) -> int | None:
        """The rank of this team that runs in the calling thread; None in any other thread."""
        ...

    def close(self) -> None: ...
