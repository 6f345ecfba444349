"""Speed of a split model against the unsplit one, alternated in one run, and what the machinery costs by itself.

    python benchmarks/run.py [--small] [--ranks 2] [--repeats 5] [--json results.json]

The model is a Llama of random weights in float32: 207M parameters, or 13M with --small. The unsplit model computes
with every core, the split one divides them among its ranks. A ratio below 1 means that the split model is faster. Only
an idle machine gives numbers worth keeping: what else runs slows the unsplit model's threads and the ranks by different
amounts.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import tensor_parallel as tp
from tensor_parallel.runtime.threads import ThreadTeam

SHAPES = {
    "207M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 32000},
    "13M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 16000},
}  # fmt: skip
Results = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of a split Llama against the unsplit one.")
    parser.add_argument("--small", action="store_true", help="13M parameters and 16 decoded tokens")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    console, shape = Console(highlight=False), "13M" if options.small else "207M"
    environment = {
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "shape": shape,
        "ranks": options.ranks, "repeats": options.repeats,
    }  # fmt: skip
    whole = _llama(shape)
    split, seconds = _split(copy.deepcopy(whole), options.ranks)
    workloads = compare(whole, split, 16 if options.small else 64, options.repeats)
    fixed = {**seconds, **fixed_costs(options.ranks)}
    _show(console, environment, workloads, fixed)
    if options.json:
        text = json.dumps({"environment": environment, "workloads": workloads, "fixed_costs": fixed}, indent=2)
        options.json.write_text(text + "\n")


def compare(whole: nn.Module, split: nn.Module, new_tokens: int, repeats: int) -> Results:
    """Median seconds of each workload, unsplit and split, and their ratio."""
    generator = torch.Generator().manual_seed(0)
    vocabulary: int = whole.config.vocab_size
    ids = torch.randint(vocabulary, (8, 512), generator=generator)
    workloads: dict[str, Callable[[Any], Callable[[], Any]]] = {
        "prefill 1 x 512": lambda model: lambda: _forward(model, ids[:1]),
        f"decode {new_tokens}, batch 1": lambda model: lambda: _decode(model, ids[:1, :16], new_tokens),
        f"decode {new_tokens}, batch 8": lambda model: lambda: _decode(model, ids[:, :16], new_tokens),
        "training step 2 x 256": lambda model: _training_step(model, ids[:2, :256]),
    }
    results = {}
    for name, make in workloads.items():
        unsplit_seconds, split_seconds = _alternate([make(whole), make(split)], repeats)
        results[name] = {
            "unsplit_s": unsplit_seconds, "split_s": split_seconds, "ratio": split_seconds / unsplit_seconds,
        }  # fmt: skip
    return results


def fixed_costs(ranks: int) -> dict[str, float]:
    """What is paid whatever the model's size, in microseconds; with one thread, since waiting for a second one, where
    something else runs on its core, would be most of what is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {**_team_costs(ranks), **_module_costs(ranks)}
    finally:
        torch.set_num_threads(threads)


def _llama(shape: str) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[shape], max_position_embeddings=1024, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).eval()


def _split(model: nn.Module, ranks: int) -> tuple[nn.Module, dict[str, float]]:
    start = time.perf_counter()
    plan = tp.make_plan(model, ranks)
    planned = time.perf_counter()
    split = tp.tensor_parallel(model, ["cpu"] * ranks, plan)
    return split, {"plan, s": planned - start, "split by a plan, s": time.perf_counter() - planned}


def _alternate(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each call, taken in turns after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(repeats + 1):
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if round_:
                mine.append(time.perf_counter() - start)
    return [statistics.median(mine) for mine in times]


def _forward(model: nn.Module, ids: torch.Tensor) -> None:
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)


def _decode(model: Any, ids: torch.Tensor, new_tokens: int) -> None:
    mask = torch.ones_like(ids)
    model.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0
    )


def _training_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


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


def _show(console: Console, environment: dict[str, Any], workloads: Results, fixed: dict[str, float]) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in environment.items()))
    table = Table("workload", "unsplit, ms", "split, ms", "ratio")
    for name, row in workloads.items():
        table.add_row(name, f"{row['unsplit_s'] * 1e3:.1f}", f"{row['split_s'] * 1e3:.1f}", f"{row['ratio']:.2f}")
    console.print(table)
    table = Table("fixed cost", "")
    for name, value in fixed.items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
