"""The proof that a split model is the model: outputs, gradients, an optimiser step, generated tokens.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from torch import nn

from tensor_parallel.errors import VerificationError
from tensor_parallel.layout import put_local
from tensor_parallel.plan.table import render
from tensor_parallel.shard import ModelShards, shards_of
from tensor_parallel.verify.values import Inputs, difference, is_real, mapped, tensors_in, tokens_of, weighted_sum

EXACT = 1e-9
LEAST = 1e-4
NOISE_FACTOR = 30.0
SMALL = 1e-3
"""Gradients below this share of the largest one are measured against it: rounding makes noise of them."""

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Check:
    """One thing compared.

    what: "output", "gradient", "input gradient", "gradient norm", "step" or "tokens".
    name: path in the output, name of the parameter, or which input.
    difference: largest difference relative to the largest value expected.
    """

    what: str
    name: str
    difference: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def ratio(self) -> float:
        """How much of the tolerance the difference takes."""
        return self.difference / self.tolerance if self.tolerance else (0.0 if self.difference == 0 else float("inf"))


@dataclass(frozen=True)
class Verification:
    """What `verify` found; true where everything passed."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def worst_check(self) -> Check:
        """The one that takes most of its tolerance."""
        return max(self.checks, key=lambda check: check.ratio)

    @property
    def worst(self) -> tuple[str, float]:
        """Name and relative difference of the worst case."""
        worst = self.worst_check
        return f"{worst.what} {worst.name}", worst.difference

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def __bool__(self) -> bool:
        return self.passed

    def __rich__(self) -> RenderableType:
        verdict = "equal to the reference" if self.passed else f"DIFFERS from the reference in {len(self.failures)}"
        table = Table(title=f"{verdict}: {len(self.checks)} comparisons", title_justify="left")
        for column in ("compared", "how many", "failed", "worst", "difference", "tolerance", "note"):
            table.add_column(column, overflow="fold")
        for what in dict.fromkeys(check.what for check in self.checks):
            group = [check for check in self.checks if check.what == what]
            worst = max(group, key=lambda check: check.ratio)
            failed = sum(not check.passed for check in group)
            numbers = (f"{worst.difference:.1e}", f"{worst.tolerance:.1e}")
            table.add_row(what, str(len(group)), str(failed), worst.name, *numbers, worst.note)
        return table

    def __str__(self) -> str:
        return render(self)


# ------------------------------------------------------------------------------ one run


@dataclass
class Run:
    """What one forward and backward gave."""

    outputs: list[tuple[str, torch.Tensor]]
    gradients: dict[str, torch.Tensor | None]
    input_gradients: list[tuple[str, torch.Tensor | None]]


def _call(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_() if tensor.requires_grad else tensor


def forward_backward(
    model: nn.Module, inputs: Inputs, seed: int, gradients: Callable[[], dict[str, Any]], part: int | None = None
) -> Run:
    """One forward and the backward of a random weighted sum of its outputs; adds to the gradients in place.

    Args:
        gradients: gives the gradients by name after the backward.
        part: 0 or 1 for one of two halves of that sum.
    """
    leaves = mapped(inputs, _leaf)
    torch.manual_seed(seed)
    output = _call(model, leaves)
    scalar = weighted_sum(output, seed, part)
    if scalar is not None:
        scalar.backward()  # type: ignore[no-untyped-call]
    asked = [(path, leaf.grad) for path, leaf in tensors_in(leaves) if leaf.requires_grad]
    return Run([(path, t.detach()) for path, t in tensors_in(output)], gradients(), asked)


def plain_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of an unsplit model's parameters, by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole_gradients(shards: ModelShards) -> dict[str, torch.Tensor | None]:
    """The whole gradients of a split model's parameters, by the unsplit model's names."""
    return {key: shards.whole_gradient(key) for key, split in shards.tensors.items() if not split.plan.is_buffer}


# ------------------------------------------------------------------------------ leaving things as they were


@contextmanager
def undisturbed(trees: Sequence[nn.Module], model: nn.Module) -> Iterator[None]:
    """Within it `model` (whose modules are those of `trees`) is in eval mode and has no gradients; afterwards modes,
    gradients, buffers and random states are as they were, whatever happened."""
    modules = [module for tree in trees for module in tree.modules()]
    modes = [(module, module.training) for module in modules]
    grads = [(parameter, parameter.grad) for tree in trees for parameter in tree.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for tree in trees for buffer in tree.buffers()]
    cuda = sorted({t.device.index or 0 for tree in trees for t in tree.parameters() if t.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        try:
            model.eval()
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for buffer, saved in buffers:
                    if not torch.equal(buffer, saved):
                        buffer.copy_(saved)


# ------------------------------------------------------------------------------ an optimiser step on copies


def _usual_optimizer(dtype: torch.dtype) -> Optimizer:
    """AdamW in float64. Below it plain SGD: Adam's first step is the gradient's sign, which rounding flips near 0."""
    if dtype == torch.float64:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-2)


def _stepped(
    parameters: Sequence[torch.Tensor], optimizer: Optimizer
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Copies of the parameters after one clipped step, and the norm of all gradients."""
    copies = []
    for parameter in parameters:
        made = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        made.grad = None if parameter.grad is None else parameter.grad.detach().clone()
        copies.append(made)
    trained = [made for made in copies if made.requires_grad]
    if not any(made.grad is not None for made in trained):
        return [made.detach() for made in copies], None
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer(trained).step()
    return [made.detach() for made in copies], norm


def _plain_step(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    parameters = dict(model.named_parameters())
    stepped, norm = _stepped(list(parameters.values()), optimizer)
    return dict(zip(parameters, stepped, strict=True)), norm


def _split_step(shards: ModelShards, optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    parameters = {key: split for key, split in shards.tensors.items() if not split.plan.is_buffer}
    leaves = [piece.tensor for split in parameters.values() for piece in split.pieces]
    stepped, norm = _stepped(leaves, optimizer)
    queue = iter(stepped)
    whole = {}
    for key, split in parameters.items():
        parts = [(piece.ranks[0], next(queue)) for piece in split.pieces]
        joined = parts[0][1].new_empty(split.plan.layout.shape)
        for rank, part in parts:
            put_local(joined, part.to(joined.device), split.plan.layout, shards.resolved.cuts, rank)
        whole[key] = joined
    return whole, norm


# ------------------------------------------------------------------------------ comparing


def compare_tensors(
    what: str,
    given: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    tolerance: float,
    floor: float = 0.0,
) -> list[Check]:
    """One check a name, in the order of `expected`; a name that only one side has is a difference without bound."""
    checks = []
    for name in [*expected, *(n for n in given if n not in expected)]:
        if name not in given or name not in expected:
            note = f"only the {'reference' if name in expected else 'split model'} has it"
            checks.append(Check(what, name, float("inf"), tolerance, note))
            continue
        mine, theirs = given[name], expected[name]
        note = ""
        if mine is not None and theirs is not None and mine.shape != theirs.shape:
            note = f"shape {tuple(mine.shape)}, required {tuple(theirs.shape)}"
        elif (mine is None) != (theirs is None):
            note = "the split model has no gradient" if mine is None else "the reference has no gradient"
        checks.append(Check(what, name, difference(mine, theirs, floor), tolerance, note))
    return checks


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest absolute value of all."""
    sizes = [float(t.abs().max()) for t in tensors if t is not None and t.numel()]
    return max((size for size in sizes if size < float("inf")), default=0.0)


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
    parts = [_fresh_run(reference, inputs, seed, lambda: plain_gradients(reference), part).gradients for part in (0, 1)]
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


def _tokens_check(
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


def _as_list(inputs: Inputs | Sequence[Inputs]) -> list[Inputs]:
    """Several inputs come as a list of mappings or tuples; anything else is one."""
    if isinstance(inputs, list) and inputs and all(isinstance(item, (Mapping, tuple)) for item in inputs):
        return inputs
    return [inputs]  # type: ignore[list-item]


def _check_arguments(reference: nn.Module, model: nn.Module, cases: Sequence[Inputs], generate: int | None) -> None:
    if reference is model:
        raise ValueError("verify: the reference is the split model itself; give a copy made before the split")
    if generate is not None:
        if generate < 1:
            raise ValueError(f"verify: generate is {generate}; give a number of new tokens of at least 1, or None")
        if not hasattr(model, "generate"):
            raise ValueError(f"verify: generate={generate}, but {type(model).__name__} has no generate(); leave it out")
        if not all(isinstance(case, Mapping) for case in cases):
            raise ValueError("verify: generate needs inputs as a mapping by name, such as {'input_ids': ...}")


def verify(
    model: nn.Module,
    reference: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    *,
    generate: int | None = None,
    gradients: bool = True,
    step: bool | Optimizer = True,
    tolerance: float | None = None,
    seed: int = 0,
    raise_on_failure: bool = False,
) -> Verification:
    """Compare a split model with its unsplit reference, both in eval mode. Leaves the parameters, gradients, buffers,
    modes and random states of both as they were.

    Args:
        model: the split model.
        reference: the unsplit model: a copy made before the split, on any device.
        inputs: what the forward takes: a mapping by name, a tuple, one tensor, or a list of mappings or tuples. The
            gradient of a floating input that requires one is compared too.
        generate: new tokens to compare, greedily; None for none.
        gradients: compare the gradient of every parameter.
        step: compare one clipped optimiser step, taken on copies of the parameters: AdamW in float64, SGD in coarser
            dtypes, or with the optimiser that this function makes from parameters.
        tolerance: relative difference to allow in place of the rule (float64 1e-9; else the larger of 1e-4 and 30 times
            the reference's own difference from its copy in float64, for which that copy is made; see the module).

    Returns:
        A Verification: `.passed`, `.worst` (name, relative difference); prints as a table.

    Raises:
        TensorParallelError: `model` is not split.
        ValueError: arguments that do not go together.
        VerificationError: a difference, where `raise_on_failure`; names the first and the worst.
    """
    shards = shards_of(model)
    cases = _as_list(inputs)
    _check_arguments(reference, model, cases, generate)
    home = next((parameter.device for parameter in reference.parameters()), torch.device("cpu"))
    cases = [mapped(case, lambda t: t.detach().to(home).requires_grad_(t.requires_grad)) for case in cases]
    dtype = _dtype_of(reference, cases)
    checks: list[Check] = []
    with undisturbed([reference], reference), undisturbed(shards.trees, model), ExitStack() as stack:
        if not gradients:
            stack.enter_context(torch.no_grad())
        theirs = [_fresh_run(reference, case, seed, lambda: plain_gradients(reference)) for case in cases]
        tolerances = dict.fromkeys(("output", "gradient"), EXACT if tolerance is None else tolerance)
        if tolerance is None and dtype != torch.float64:
            noise = _noise(reference, cases, theirs, seed)
            tolerances = {kind: max(LEAST, NOISE_FACTOR * value) for kind, value in noise.items()}
        elif tolerance is None and gradients:
            rounding = [rounding_of_sums(reference, case, run, seed) for case, run in zip(cases, theirs, strict=True)]
            tolerances["gradient"] = max(EXACT, NOISE_FACTOR * max(rounding))
            theirs[-1] = _fresh_run(reference, cases[-1], seed, lambda: plain_gradients(reference))
        mine = [_fresh_run(model, case, seed, lambda: whole_gradients(shards)) for case in cases]
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            checks += compare_runs(a, b, f" (inputs {index})" if len(cases) > 1 else "", tolerances)
        if gradients and step:
            optimizer = step if callable(step) else _usual_optimizer(dtype)
            checks += _compare_steps(shards, reference, optimizer, tolerances["gradient"])
        if generate is not None:
            for index, case in enumerate(cases):
                label = f" (inputs {index})" if len(cases) > 1 else ""
                assert isinstance(case, Mapping)
                checks.append(_tokens_check(model, reference, case, generate, tolerances["output"], label))
    found = Verification(tuple(checks))
    if raise_on_failure and not found.passed:
        first, worst = found.failures[0], found.worst_check
        raise VerificationError(
            f"the split model differs from its reference in {len(found.failures)} of {len(checks)} comparisons; first: "
            f"{describe(first)}; worst: {describe(worst)}\n{found}"
        )
    return found


def describe(check: Check) -> str:
    """One line about one check."""
    note = f" ({check.note})" if check.note else ""
    return f"{check.what} {check.name}: {check.difference:.2e}, at most {check.tolerance:.1e} allowed{note}"


def _fresh_run(
    model: nn.Module, case: Inputs, seed: int, gradients: Callable[[], dict[str, Any]], part: int | None = None
) -> Run:
    """A run from no gradients, whose results later runs do not change."""
    for parameter in model.parameters():
        parameter.grad = None
    run = forward_backward(model, case, seed, gradients, part)
    kept = {name: None if grad is None else grad.detach().clone() for name, grad in run.gradients.items()}
    return Run(run.outputs, kept, run.input_gradients)


def _compare_steps(shards: ModelShards, reference: nn.Module, optimizer: Optimizer, tolerance: float) -> list[Check]:
    mine, my_norm = _split_step(shards, optimizer)
    theirs, norm = _plain_step(reference, optimizer)
    checks = []
    if norm is not None or my_norm is not None:
        checks = compare_tensors("gradient norm", {"total": my_norm}, {"total": norm}, tolerance)
    return checks + compare_tensors("step", mine, theirs, tolerance)
