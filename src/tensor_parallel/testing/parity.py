"""A split model against the unsplit one, for tests: stops at the first difference and names it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from tensor_parallel.shard import ModelShards, up_to_date
from tensor_parallel.shard.pieces import held_by
from tensor_parallel.state import full_state_dict
from tensor_parallel.verify.checks import Check, compare_tensors, describe
from tensor_parallel.verify.compare import EXACT, NOISE_FACTOR, compare_runs, rounding_of_sums
from tensor_parallel.verify.runs import Run, forward_backward, plain_gradients, whole_gradients
from tensor_parallel.verify.values import Inputs


def assert_parity(
    reference: nn.Module,
    split: nn.Module,
    inputs: Inputs,
    *,
    steps: int = 0,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    max_norm: float = 1.0,
    tolerance: float = EXACT,
    gradient_tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Assert that `split` is `reference`, both in the modes they are in: outputs, the gradient of every parameter and
    of every floating input that requires one, the gradient norm that stock clipping of `parameters()` sees, copies of
    one tensor equal across ranks, and, after `steps` clipped optimiser steps, every parameter and buffer.

    Leaves gradients behind, and both models trained where `steps` is not 0.

    Args:
        optimizer: makes an optimiser for one of the two models; default: AdamW with weight decay.
        max_norm: clipping of the steps.
        tolerance: relative to the largest value of each tensor.
        gradient_tolerance: the same for gradients and their norms; default: `tolerance`, or 30 times the rounding of
            the reference's own gradients where that is more (norms computed in float32 in a float64 model).

    Raises:
        AssertionError: names the first difference, in the reference's order.
    """
    shards = up_to_date(split)
    if gradient_tolerance is None:
        gradient_tolerance = max(tolerance, _own_rounding(reference, inputs, seed))
    mine, theirs = _runs(split, reference, shards, inputs, seed)
    _stop_at_first(compare_runs(mine, theirs, "", {"output": tolerance, "gradient": gradient_tolerance}))
    _assert_copies_equal(shards)
    _assert_norms_equal(split, reference, float("inf"), gradient_tolerance)
    if steps:
        make = optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
        mine_steps, their_steps = make(split), make(reference)
        for step in range(steps):
            _runs(split, reference, shards, inputs, seed + step)
            _assert_norms_equal(split, reference, max_norm, gradient_tolerance)
            mine_steps.step()
            their_steps.step()
        _assert_copies_equal(shards)
    _assert_states_equal(full_state_dict(split), reference.state_dict(), f"after {steps} steps", tolerance)
    _assert_states_equal(split.state_dict(), reference.state_dict(), f"state_dict() after {steps} steps", tolerance)


def _own_rounding(reference: nn.Module, inputs: Inputs, seed: int) -> float:
    """30 times the rounding of the reference's own gradients, taken on a copy: batch norms would count the calls."""
    twin = copy.deepcopy(reference)
    twin.zero_grad()
    run = forward_backward(twin, inputs, seed, lambda: plain_gradients(twin))
    run.gradients = {name: None if grad is None else grad.clone() for name, grad in run.gradients.items()}
    return NOISE_FACTOR * rounding_of_sums(twin, inputs, run, seed)


def _runs(split: nn.Module, reference: nn.Module, shards: ModelShards, inputs: Inputs, seed: int) -> tuple[Run, Run]:
    for model in (split, reference):
        model.zero_grad(set_to_none=True)
    theirs = forward_backward(reference, inputs, seed, lambda: plain_gradients(reference))
    mine = forward_backward(split, inputs, seed, lambda: whole_gradients(shards))
    return mine, theirs


def _stop_at_first(checks: Sequence[Check]) -> None:
    failed = [check for check in checks if not check.passed]
    if failed:
        more = f"; and {len(failed) - 1} more of {len(checks)}" if len(failed) > 1 else ""
        raise AssertionError(f"{describe(failed[0])}{more}")


def _assert_norms_equal(split: nn.Module, reference: nn.Module, max_norm: float, tolerance: float) -> None:
    mine = torch.nn.utils.clip_grad_norm_(split.parameters(), max_norm)
    theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    _stop_at_first(compare_tensors("gradient norm", {"total": mine}, {"total": theirs}, tolerance))


def _assert_states_equal(
    given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str, tolerance: float
) -> None:
    _stop_at_first(compare_tensors(what, given, expected, tolerance))


def _assert_copies_equal(shards: ModelShards) -> None:
    """Every rank that keeps a copy of a piece, or of a whole buffer, keeps the same values."""
    held = [
        {
            **dict(tree.named_parameters(remove_duplicate=False)),
            **dict(tree.named_buffers(remove_duplicate=False)),
        }
        for tree in shards.trees
    ]
    for key, planned in shards.resolved.plan.tensors.items():
        if planned.rank0_only:
            continue
        for first, *others in held_by(planned, shards.resolved.cuts, len(held)):
            for rank in others:
                mine, copied = held[first].get(key), held[rank].get(key)
                if mine is not None and copied is not None and not torch.equal(copied.cpu(), mine.cpu()):
                    raise AssertionError(f"{key}: rank {rank}'s copy differs from rank {first}'s")
