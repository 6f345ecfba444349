"""The proof that a split model is the model: outputs, gradients, optimiser steps, saved state, generated tokens.

Tolerances, relative to the largest value of each tensor, so that a right split is never called wrong nor a wrong one
noise:

float64: 1e-9; for gradients the larger of that and 30 times the reference's own rounding of sums, which is the
    difference between its gradient and the sum of its gradients for two halves of the loss. It is far below 1e-9 but in
    models that compute their norms in float32 whatever their dtype: where a part of a gradient meets such a norm before
    it is summed with the other ranks' parts, it is rounded there by itself.
coarser: the larger of 1e-4 and 30 times the reference's own noise, the difference between it and its float64 copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tensor_parallel.errors import VerificationError
from tensor_parallel.shard import up_to_date
from tensor_parallel.verify.checks import Check, Verification, compare_tensors, describe, largest
from tensor_parallel.verify.runs import Run, forward_backward, fresh_run, plain_gradients, undisturbed, whole_gradients
from tensor_parallel.verify.steps import Optimizer, compare_steps, saved_state, usual_optimizer
from tensor_parallel.verify.tokens import compare_tokens
from tensor_parallel.verify.values import Inputs, difference, is_real, mapped, tensors_in
from tensor_parallel.verify.where import first_difference

EXACT = 1e-9
LEAST = 1e-4
NOISE_FACTOR = 30.0
SMALL = 1e-3
"""Gradients below this share of the largest one are measured against it: rounding makes noise of them."""


def compare_runs(split: Run, whole: Run, label: str, tolerances: Mapping[str, float]) -> list[Check]:
    """Outputs and gradients of two runs, in the reference's order."""
    floor = SMALL * largest(whole.gradients.values())
    checks = compare_tensors("output", dict(split.outputs), dict(whole.outputs), tolerances["output"])
    checks += compare_tensors("gradient", split.gradients, whole.gradients, tolerances["gradient"], floor)
    asked, wanted = dict(split.input_gradients), dict(whole.input_gradients)
    checks += compare_tensors("input gradient", asked, wanted, tolerances["gradient"])
    return [Check(c.what, c.name + label, c.difference, c.tolerance, c.note) for c in checks]


def _dtype_of(model: nn.Module, inputs: Sequence[Inputs]) -> torch.dtype:
    """The coarsest floating dtype of the parameters, else of the inputs."""
    tensors = [*model.parameters(), *(t for given in inputs for _, t in tensors_in(given))]
    real = [t.dtype for t in tensors if is_real(t)]
    return max(real, key=lambda dtype: torch.finfo(dtype).eps) if real else torch.float64


def _upcast(value: Any) -> Any:
    return mapped(value, lambda t: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t)


def rounding_of_sums(reference: nn.Module, inputs: Inputs, whole: Run, seed: int) -> float:
    """How far the reference's gradients are from the sum of those for two halves of the loss; leaves some behind."""
    parts = [fresh_run(reference, inputs, seed, lambda: plain_gradients(reference), part).gradients for part in (0, 1)]
    floor = SMALL * largest(whole.gradients.values())
    found = 0.0
    for name, expected in whole.gradients.items():
        first, second = (part[name] for part in parts)
        if expected is not None and first is not None and second is not None:
            found = max(found, difference(first + second, expected, floor))
    return found


def _noise(reference: nn.Module, inputs: Sequence[Inputs], runs: Sequence[Run], seed: int) -> dict[str, float]:
    """The reference's own noise: how far it is from its copy in float64, by kind."""
    double = copy.deepcopy(reference).double()
    found = {"output": 0.0, "gradient": 0.0}
    for given, run in zip(inputs, runs, strict=True):
        for parameter in double.parameters():
            parameter.grad = None
        exact = forward_backward(double, _upcast(given), seed, lambda: plain_gradients(double))
        floor = SMALL * largest(exact.gradients.values())
        real = {path for path, tensor in exact.outputs if is_real(tensor)}
        pairs = [(dict(run.outputs)[path], tensor, 0.0) for path, tensor in exact.outputs if path in real]
        found["output"] = max([found["output"], *(difference(a, b, f) for a, b, f in pairs)])
        grads = [difference(run.gradients[name], grad, floor) for name, grad in exact.gradients.items()]
        found["gradient"] = max([found["gradient"], *grads])
    return {kind: value if value < float("inf") else 0.0 for kind, value in found.items()}


def _as_list(inputs: Inputs | Sequence[Inputs]) -> list[Inputs]:
    """Several inputs come as a list of mappings or tuples; anything else is one."""
    if isinstance(inputs, list) and inputs and all(isinstance(item, (Mapping, tuple)) for item in inputs):
        return inputs
    return [inputs]  # type: ignore[list-item]


def _check_arguments(
    reference: nn.Module, model: nn.Module, cases: Sequence[Inputs], generate: int | None, steps: int, trains: bool
) -> None:
    if reference is model:
        raise ValueError("verify: the reference is the split model itself; give a copy made before the split")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"verify: steps is {steps!r}; give a number of optimiser steps of at least 1")
    if steps > 1 and not trains:
        raise ValueError(f"verify: steps={steps}, but gradients or step is off and no step is taken; leave one out")
    if generate is not None:
        if generate < 1:
            raise ValueError(f"verify: generate is {generate}; give a number of new tokens of at least 1, or None")
        if not hasattr(model, "generate"):
            raise ValueError(f"verify: generate={generate}, but {type(model).__name__} has no generate(); leave it out")
        if not all(isinstance(case, Mapping) for case in cases):
            raise ValueError("verify: generate needs inputs as a mapping by name, such as {'input_ids': ...}")


def _reference_runs(
    reference: nn.Module, cases: Sequence[Inputs], seed: int, tolerance: float | None, gradients: bool
) -> tuple[list[Run], dict[str, float]]:
    """The reference's runs, and the tolerances by kind; leaves the last run's gradients behind."""
    runs = [fresh_run(reference, case, seed, lambda: plain_gradients(reference)) for case in cases]
    tolerances = dict.fromkeys(("output", "gradient"), EXACT if tolerance is None else tolerance)
    if tolerance is not None:
        return runs, tolerances
    if _dtype_of(reference, cases) != torch.float64:
        noise = _noise(reference, cases, runs, seed)
        tolerances = {kind: max(LEAST, NOISE_FACTOR * value) for kind, value in noise.items()}
    elif gradients:
        rounding = [rounding_of_sums(reference, case, run, seed) for case, run in zip(cases, runs, strict=True)]
        tolerances["gradient"] = max(EXACT, NOISE_FACTOR * max(rounding))
        runs[-1] = fresh_run(reference, cases[-1], seed, lambda: plain_gradients(reference))
    return runs, tolerances


def verify(  # noqa: PLR0913
    model: nn.Module,
    reference: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    *,
    generate: int | None = None,
    gradients: bool = True,
    step: bool | Optimizer = True,
    steps: int = 1,
    tolerance: float | None = None,
    seed: int = 0,
    raise_on_failure: bool = False,
) -> Verification:
    """Compare a split model with its unsplit reference, both in eval mode: outputs, gradients, what their `state_dict`
    would save now and after optimiser steps, tokens. Where something differs, the first module whose output does is
    named. Leaves the parameters, gradients, buffers, modes and random states of both as they were.

    Args:
        model: the split model.
        reference: the unsplit model: a copy made before the split, on any device.
        inputs: what the forward takes: a mapping by name, a tuple, one tensor, or a list of mappings or tuples. The
            gradient of a floating input that requires one is compared too.
        generate: new tokens to compare, greedily; None for none.
        gradients: compare the gradient of every parameter.
        step: compare the whole `state_dict`, keys and values, after clipped optimiser steps on copies of the
            parameters. True: by AdamW (lr 1e-3) in float64 and by plain SGD (lr 1e-2) in coarser dtypes, where the
            sign that Adam's first step takes of a gradient near 0 is rounding alone. Or a function that makes the
            optimiser of parameters: `lambda parameters: torch.optim.Adam(parameters, lr=0.01)`.
        steps: how many; each after the first costs a forward and a backward of both models, over the inputs in turn.
        tolerance: relative difference to allow in place of the rule (float64 1e-9; else the larger of 1e-4 and 30 times
            the reference's own difference from its copy in float64, for which that copy is made; see the module).

    Returns:
        A Verification: `.passed`, `.worst` (name, relative difference); prints as a table.

    Raises:
        TensorParallelError: `model` is not split.
        ValueError: arguments that do not go together.
        VerificationError: a difference, where `raise_on_failure`; names the first and the worst.
    """
    shards = up_to_date(model)
    cases = _as_list(inputs)
    _check_arguments(reference, model, cases, generate, steps, gradients and bool(step))
    home = next((parameter.device for parameter in reference.parameters()), torch.device("cpu"))
    cases = [mapped(case, lambda t: t.detach().to(home).requires_grad_(t.requires_grad)) for case in cases]
    labels = [f" (inputs {index})" if len(cases) > 1 else "" for index in range(len(cases))]
    checks: list[Check] = []
    where = ""
    with undisturbed([reference], reference), undisturbed(shards.trees, model), ExitStack() as stack:
        if not gradients:
            stack.enter_context(torch.no_grad())
        theirs, tolerances = _reference_runs(reference, cases, seed, tolerance, gradients)
        mine = [fresh_run(model, case, seed, lambda: whole_gradients(shards)) for case in cases]
        suspects: list[Inputs] = []
        for case, label, a, b in zip(cases, labels, mine, theirs, strict=True):
            compared = compare_runs(a, b, label, tolerances)
            checks += compared
            suspects += [] if all(check.passed for check in compared) else [case]
        checks += compare_tensors("state", saved_state(model), saved_state(reference), tolerances["output"])
        if gradients and step:
            optimizer = step if callable(step) else usual_optimizer(_dtype_of(reference, cases))
            checks += compare_steps(model, reference, cases, optimizer, steps, seed, tolerances["gradient"])
        if generate is not None:
            for case, label in zip(cases, labels, strict=True):
                assert isinstance(case, Mapping)
                checks.append(compare_tokens(model, reference, case, generate, tolerances["output"], label))
        if not all(check.passed for check in checks):
            where = first_difference(model, reference, [*suspects, cases[0]][0], tolerances["output"], seed)
    found = Verification(tuple(checks), where)
    if raise_on_failure and not found.passed:
        raise VerificationError(_failure(found))
    return found


def _failure(found: Verification) -> str:
    return (
        f"the split model differs from its reference in {len(found.failures)} of {len(found.checks)} comparisons; "
        f"first: {describe(found.failures[0])}; worst: {describe(found.worst_check)}; {found.where}\n{found}"
    )
