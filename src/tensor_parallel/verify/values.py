"""Tensors inside nested inputs and outputs, by path, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Inputs = Mapping[str, Any] | tuple[Any, ...] | list[Any] | torch.Tensor


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor in nested mappings (transformers' outputs are some), lists, tuples, dataclasses.

    Other objects, such as caches, are passed over.
    """
    if isinstance(value, torch.Tensor):
        yield path or "output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        for name, item in zip(names, value, strict=True):
            yield from tensors_in(item, f"{path}.{name}" if isinstance(name, str) and path else f"{path}[{name}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of mappings, lists and tuples with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return value


def is_real(tensor: torch.Tensor) -> bool:
    """Whether it holds floating or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def difference(given: torch.Tensor | None, expected: torch.Tensor | None, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest value expected (to `floor` where that is smaller).

    Infinite where shapes differ or where one is finite and the other is not; None counts as zeros. Tensors of
    integers or booleans are equal (0) or not (infinite).
    """
    if given is None or expected is None:
        other = given if expected is None else expected
        return 0.0 if other is None or not bool((other != 0).any()) else float("inf")
    if given.shape != expected.shape:
        return float("inf")
    given, expected = given.detach().to(expected.device), expected.detach()
    if not is_real(expected):
        return 0.0 if torch.equal(given, expected) else float("inf")
    if expected.is_complex():
        given, expected = torch.view_as_real(given), torch.view_as_real(expected)
    given, expected = given.double(), expected.double()
    if given.numel() == 0:
        return 0.0
    finite = expected.isfinite()
    beyond = [side[~finite].nan_to_num() for side in (given, expected)]
    if not torch.equal(given.isfinite(), finite) or not torch.equal(*beyond):
        return float("inf")
    # Masks are written with the dtype's lowest number; what lies beyond that is no value to be relative to.
    usual = finite & (expected.abs() < 1e30)
    given, expected = given[usual], expected[usual]
    if given.numel() == 0:
        return 0.0
    return float((given - expected).abs().max() / max(float(expected.abs().max()), floor, 1e-300))


def weighted_sum(value: Any, seed: int, part: int | None = None) -> torch.Tensor | None:
    """A scalar that depends on every element of every output that requires a gradient, with random weights; None where
    there is no such output.

    part: 0 or 1 for one of two scalars of which it is the sum, None for the whole.
    """
    generator = torch.Generator().manual_seed(seed)
    total: torch.Tensor | None = None
    for _, tensor in tensors_in(value):
        if not is_real(tensor) or not tensor.requires_grad or tensor.numel() == 0:
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        weights = torch.randn(real.shape, generator=generator, dtype=torch.float64)
        share = torch.rand(real.shape, generator=generator, dtype=torch.float64)
        if part is not None:
            weights = weights * (share if part == 0 else 1 - share)
        weights = weights.to(real.device, real.dtype)
        usable = torch.where(real.isfinite() & (real.abs() < 1e30), real, torch.zeros_like(real))
        term = (usable * weights).sum() / real.numel() ** 0.5
        total = term if total is None else total + term.to(total.device)
    return total


def tokens_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What `generate` takes of a forward's inputs."""
    return {key: value for key, value in inputs.items() if key not in ("labels", "use_cache", "return_dict")}
