"""What is timed: the same call of the unsplit and of the split model, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Results = dict[str, dict[str, float]]

BOUNDS = {"prefill": 0.95, "decode, batch 1": 0.85, "decode, batch 8": 0.95, "training step": 1.00}
"""The ratio that the 207M model is to stay under; the smaller ones have none."""


def workloads(vocabulary: int, new_tokens: int) -> dict[str, Callable[[Any], None]]:
    """By name; a prompt has 32 tokens, a training step is a forward and a backward of 2 x 256."""
    ids = torch.randint(vocabulary, (8, 512), generator=torch.Generator().manual_seed(0))

    def prefill(model: Any) -> None:
        with torch.inference_mode():
            model(input_ids=ids[:1], use_cache=False)

    def decode(model: Any, batch: int) -> None:
        prompt = ids[:batch, :32]
        mask = torch.ones_like(prompt)
        how = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "pad_token_id": 0}
        model.generate(prompt, attention_mask=mask, **how)

    def train(model: Any) -> None:
        model.zero_grad()
        model(input_ids=ids[:2, :256], labels=ids[:2, :256], use_cache=False).loss.backward()

    return {
        "prefill": prefill,
        "decode, batch 1": lambda model: decode(model, 1),
        "decode, batch 8": lambda model: decode(model, 8),
        "training step": train,
    }


def compare(whole: nn.Module, split: nn.Module, calls: dict[str, Callable[[Any], None]], rounds: int) -> Results:
    """Of each call the median of the ratios split / unsplit over paired rounds, and the median seconds of both.

    A ratio is taken inside one round, so that a slower minute of the machine does not count for one of the two.
    """
    results = {}
    for name, call in calls.items():
        call(whole)
        call(split)
        pairs = [(_seconds(call, whole), _seconds(call, split)) for _ in range(rounds)]
        ratios = sorted(split_s / whole_s for whole_s, split_s in pairs)
        results[name] = {
            "ratio": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
            "unsplit_s": statistics.median(pair[0] for pair in pairs),
            "split_s": statistics.median(pair[1] for pair in pairs),
        }
    return results


def _seconds(call: Callable[[Any], None], model: Any) -> float:
    start = time.perf_counter()
    call(model)
    return time.perf_counter() - start
