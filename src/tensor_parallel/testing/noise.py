"""Weights that hide nothing: fresh models have biases of 0 and norms of 1, which let half of all faults pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def _persistent_buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers that a checkpoint holds; the others (rotary tables, masks) are computed, not learned."""
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield buffer


def noisy(module: M, seed: int = 0) -> M:
    """`module` itself, with noise on every floating parameter and learned buffer, so that none is constant.

    Positive buffers (variances) stay positive. Draws from a generator of its own: equal seeds give equal weights.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return noise.to(tensor.device, tensor.dtype)

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(draw(parameter), alpha=0.1)
        for buffer in _persistent_buffers(module):
            if not buffer.is_floating_point() or buffer.numel() == 0:
                continue
            if bool((buffer > 0).all()):
                buffer.mul_(1 + 0.5 * torch.tanh(draw(buffer)))
            else:
                buffer.add_(draw(buffer), alpha=0.1)
    return module
