"""An optimiser step, taken on copies of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from tensor_parallel.shard import ModelShards
from tensor_parallel.verify.checks import Check, compare_tensors

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def usual_optimizer(dtype: torch.dtype) -> Optimizer:
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
        whole[key] = split.joined([next(queue) for _ in split.pieces])
    return whole, norm


def compare_steps(shards: ModelShards, reference: nn.Module, optimizer: Optimizer, tolerance: float) -> list[Check]:
    mine, my_norm = _split_step(shards, optimizer)
    theirs, norm = _plain_step(reference, optimizer)
    checks = []
    if norm is not None or my_norm is not None:
        checks = compare_tensors("gradient norm", {"total": my_norm}, {"total": norm}, tolerance)
    return checks + compare_tensors("step", mine, theirs, tolerance)
