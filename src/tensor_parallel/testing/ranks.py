"""Ranks without a model: a function run by each rank of a small team of CPU threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from tensor_parallel.comm import Group
from tensor_parallel.runtime import ThreadTeam

T = TypeVar("T")


def run_ranks(work: Callable[[Group], T], world_size: int, deadline: float = 30.0) -> list[T]:
    """What `work(group)` gives on each of `world_size` ranks, threads of this process on the CPU.

    Raises:
        Exception: the first one that a rank raises, itself.
    """
    team = ThreadTeam([torch.device("cpu")] * world_size, deadline=deadline)
    try:
        return team.run(lambda rank: work(team.groups[rank]))
    finally:
        team.close()
