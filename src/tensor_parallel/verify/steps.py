"""Optimiser steps of both models, and what they would save after those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from tensor_parallel.verify.checks import Check, compare_tensors
from tensor_parallel.verify.runs import forward_backward
from tensor_parallel.verify.values import Inputs

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def usual_optimizer(dtype: torch.dtype) -> Optimizer:
    """AdamW in float64. Below it plain SGD: Adam's first step is the gradient's sign, which rounding flips near 0."""
    if dtype == torch.float64:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-2)


def saved_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of its `state_dict`."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


@contextmanager
def _on_copies(model: nn.Module) -> Iterator[None]:
    """Within it the parameters' values are copies: the real ones, and graphs that hold them, stay untouched."""
    kept = [(parameter, parameter.data, parameter._version) for parameter in model.parameters()]
    try:
        for parameter, data, _ in kept:
            parameter.data = data.clone()
        yield
    finally:
        for parameter, data, version in kept:
            parameter.data = data
            torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))  # what was written is gone


def _train(
    model: nn.Module, cases: Sequence[Inputs], optimizer: Optimizer, steps: int, seed: int
) -> dict[str, torch.Tensor]:
    """Take clipped steps, the first with the gradients that are there (of the last case); each step's gradient norm."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms: dict[str, torch.Tensor] = {}
    if not any(parameter.grad is not None for parameter in trained):
        return norms
    stepping = optimizer(trained)
    for number in range(steps):
        if number:
            stepping.zero_grad()
            forward_backward(model, cases[(number - 1) % len(cases)], seed, dict)
        norms[f"step {number + 1}"] = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        stepping.step()
    return norms


def compare_steps(
    model: nn.Module,
    reference: nn.Module,
    cases: Sequence[Inputs],
    optimizer: Optimizer,
    steps: int,
    seed: int,
    tolerance: float,
) -> list[Check]:
    """Train both, on copies of their parameters, and compare the norms and all that a `state_dict` then holds."""
    with _on_copies(model), _on_copies(reference):
        mine, theirs = (_train(each, cases, optimizer, steps, seed) for each in (model, reference))
        checks = compare_tensors("gradient norm", mine, theirs, tolerance)
        return checks + compare_tensors("step", saved_state(model), saved_state(reference), tolerance)
