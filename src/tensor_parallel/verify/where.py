"""Where two models part: the first module, in the order in which they run, whose output differs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tensor_parallel.errors import TensorParallelError
from tensor_parallel.verify.runs import call
from tensor_parallel.verify.values import Inputs, difference, is_real, tensors_in


def first_difference(model: nn.Module, reference: nn.Module, inputs: Inputs, tolerance: float, seed: int) -> str:
    """One line about the first module whose output on the split model differs by more than `tolerance` relative to its
    largest value, or about why that cannot be said."""
    wanted = _outputs(reference, inputs, seed)
    try:
        found = dict(_outputs(model, inputs, seed))
    except TensorParallelError as error:
        return f"the first module that differs could not be found: {error}"
    for key, theirs in wanted:
        mine = found.get(key)
        if mine is None or len(mine) != len(theirs):
            continue
        for a, b in zip(mine, theirs, strict=True):
            if is_real(b) and difference(a, b) > tolerance:
                name, number = key
                nth = f" (call {number})" if number else ""
                return f"the first module whose output differs is {name or 'the model itself'}{nth}"
    return "no module's output differs: it is in the backward, the saved state or the steps"


def _outputs(model: nn.Module, inputs: Inputs, seed: int) -> list[tuple[tuple[str, int], list[torch.Tensor]]]:
    """(module's name, number of its call) and the output's tensors, of every call in one forward, innermost first."""
    found: list[tuple[tuple[str, int], list[torch.Tensor]]] = []
    counts: dict[str, int] = {}

    def keep(name: str, output: Any) -> None:
        number = counts[name] = counts.get(name, -1) + 1
        found.append(((name, number), [tensor.detach().clone() for _, tensor in tensors_in(output)]))

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name, module in model.named_modules()
    ]
    try:
        torch.manual_seed(seed)
        with torch.no_grad():
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found
