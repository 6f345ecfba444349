"""Greedily generated tokens of two models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tensor_parallel.verify.checks import Check
from tensor_parallel.verify.values import tokens_of


def compare_tokens(
    model: nn.Module, reference: nn.Module, inputs: Mapping[str, Any], count: int, tolerance: float, label: str
) -> Check:
    """Greedy tokens; where they differ, the reference's margin between its two best at the first difference."""
    given = tokens_of(inputs)
    wanted = {"max_new_tokens": count, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        mine = model.generate(**given, **wanted)  # type: ignore[operator]
        theirs = reference.generate(**given, **wanted)  # type: ignore[operator]
    a, b = mine.sequences.to(theirs.sequences.device), theirs.sequences
    name = f"{len(theirs.logits)} tokens{label}"
    length = min(a.shape[1], b.shape[1])
    differ = (a[:, :length] != b[:, :length]).nonzero()
    if not differ.numel():
        return Check("tokens", name, 0.0 if a.shape == b.shape else float("inf"), tolerance)
    column, row = min((int(c), int(r)) for r, c in differ)
    step = column - (b.shape[1] - len(theirs.logits))
    logits = theirs.logits[step][row].double()
    best = logits.topk(2).values
    margin = float((best[0] - best[1]) / logits.abs().max().clamp_min(1e-300))
    note = f"row {row} differs from new token {step} on: {int(a[row, column])} for {int(b[row, column])}"
    # A token may only differ where the two best are as good as tied; the difference shown is how far from tied.
    return Check("tokens", name, margin, tolerance, f"{note}; margin of the two best {margin:.1e}")
