"""One forward and backward of a model, which leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensor_parallel.shard import ModelShards
from tensor_parallel.verify.values import Inputs, mapped, tensors_in, weighted_sum


@dataclass
class Run:
    """What one forward and backward gave."""

    outputs: list[tuple[str, torch.Tensor]]
    gradients: dict[str, torch.Tensor | None]
    input_gradients: list[tuple[str, torch.Tensor | None]]


def call(model: nn.Module, inputs: Inputs) -> Any:
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
    output = call(model, leaves)
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


def fresh_run(
    model: nn.Module, case: Inputs, seed: int, gradients: Callable[[], dict[str, Any]], part: int | None = None
) -> Run:
    """A run from no gradients, whose results later runs do not change."""
    for parameter in model.parameters():
        parameter.grad = None
    run = forward_backward(model, case, seed, gradients, part)
    kept = {name: None if grad is None else grad.detach().clone() for name, grad in run.gradients.items()}
    return Run(run.outputs, kept, run.input_gradients)
