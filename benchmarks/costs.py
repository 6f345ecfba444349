"""What is paid whatever a model's size, in microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tensor_parallel as tp
from tensor_parallel.runtime.threads import ThreadTeam


def fixed_costs(ranks: int) -> dict[str, float]:
    """What is paid whatever the model's size, in microseconds; with one thread, since waiting for a second one, where
    something else runs on its core, would be most of what is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {**_team_costs(ranks), **_module_costs(ranks)}
    finally:
        torch.set_num_threads(threads)


def _per_call(call: Callable[[], Any], times: int) -> float:
    """Microseconds of one call: the median of seven runs of `times`."""
    call()
    runs = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(times):
            call()
        runs.append((time.perf_counter() - start) / times)
    return statistics.median(runs) * 1e6


def _team_costs(ranks: int) -> dict[str, float]:
    team = ThreadTeam([torch.device("cpu")] * ranks)
    calls, tensors = 100, [torch.ones(1024) for _ in range(ranks)]

    def reductions(rank: int) -> None:
        for _ in range(calls):
            team.groups[rank].all_reduce(tensors[rank])

    with torch.no_grad():
        try:
            trip = _per_call(lambda: team.run(lambda rank: None), 100)
            reduced = _per_call(lambda: team.run(reductions), 1)
        finally:
            team.close()
    return {"round trip to the ranks, us": trip, "all-reduce of 4 kB, us": (reduced - trip) / calls}


class _Chain(nn.Module):
    """A linear pair and then `empty` modules that do nothing."""

    def __init__(self, empty: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.rest = nn.ModuleList(nn.Identity() for _ in range(empty))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))
        for module in self.rest:
            x = module(x)
        return x


def _module_costs(ranks: int) -> dict[str, float]:
    calls, x = 1000, torch.ones(2, 8)
    chains = {n: tp.tensor_parallel(_Chain(n), ["cpu"] * ranks, example_inputs=(x,)) for n in (0, calls)}
    plain = {n: _Chain(n) for n in (0, calls)}
    with torch.inference_mode():
        per_module = {
            name: (_per_call(lambda many=models[calls]: many(x), 5) - _per_call(lambda none=models[0]: none(x), 50))
            / calls
            for name, models in (("split", chains), ("plain", plain))
        }
        outside = _per_call(lambda: chains[0](x), 100)
    return {
        "empty module in the ranks, us": per_module["split"],
        "empty module unsplit, us": per_module["plain"],
        "whole call of a tiny split MLP, us": outside,
    }
