"""What a hand-written rule does to one tensor of the state: the actions of version 2.0."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import DimLayout, Part, Segment, TensorLayout


class StateAction(ABC):
    """How each rank's part of a tensor is made, and the tensor of all parts."""

    assembled = False
    """Whether ranks compute with the whole, and only keep parts."""

    @abstractmethod
    def __call__(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """`rank`'s part of a whole tensor."""

    @abstractmethod
    def undo(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor of all ranks' parts, by rank. It is used for gradients too."""


@dataclass(frozen=True)
class Split(StateAction):
    """Cut a dim as evenly as possible, the first ranks getting one more: 5 over 3 is 2, 2, 1.

    world_size: how many ranks.  dim: counted from the start, or from the end where negative.
    """

    world_size: int
    dim: int

    def units(self, size: int) -> int:
        """Into how many pieces that move as one a dim of `size` is divided.

        Raises:
            PlanError: it cannot be.
        """
        return size

    def dim_layout(self, size: int, factor: str) -> DimLayout:
        """The cut dim, its pieces being the units of `factor`."""
        return DimLayout((_segment(self.units(size), factor, 1),))

    def layout(self, shape: Sequence[int], factor: str) -> TensorLayout:
        """The layout of a whole tensor of this shape.

        Raises:
            PlanError: there is no such dim, or it cannot be divided so.
        """
        if not -len(shape) <= self.dim < len(shape):
            raise PlanError(f"{self} asks for dim {self.dim} of a tensor of shape {tuple(shape)}")
        dims = [DimLayout.whole(size) for size in shape]
        dims[self.dim] = self.dim_layout(shape[self.dim], factor)
        return TensorLayout(tuple(dims))

    def __call__(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.tensor_split(tensor, self.world_size, self.dim)[rank]

    def undo(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.to(tensors[0].device) for tensor in tensors], self.dim)


@dataclass(frozen=True)
class SplitInChunks(Split):
    """As Split, but pieces of `chunk_size` (heads) stay whole.

    optional: None, as of a layer without bias, stays None.
    """

    chunk_size: int
    optional: bool = False

    def units(self, size: int) -> int:
        return _chunks(self, size, self.chunk_size)

    def dim_layout(self, size: int, factor: str) -> DimLayout:
        return DimLayout((_segment(self.units(size), factor, self.chunk_size),))

    def __call__(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if tensor is None and self.optional:
            return tensor
        self.units(tensor.shape[self.dim])
        dim = self.dim % tensor.dim()
        apart = _unflatten(tensor, dim, -1, self.chunk_size)
        return torch.tensor_split(apart, self.world_size, dim)[rank].flatten(dim, dim + 1)


@dataclass(frozen=True)
class SplitInGroupedChunks(Split):
    """As SplitInChunks, in each of `num_groups` equal groups side by side (packed q, k and v)."""

    num_groups: int
    chunk_size: int

    def units(self, size: int) -> int:
        return _chunks(self, size, self.num_groups * self.chunk_size)

    def dim_layout(self, size: int, factor: str) -> DimLayout:
        return DimLayout((_segment(self.units(size), factor, self.chunk_size),) * self.num_groups)

    def __call__(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        self.units(tensor.shape[self.dim])
        dim = self.dim % tensor.dim()
        apart = _unflatten(tensor, dim, self.num_groups, -1, self.chunk_size)
        return torch.tensor_split(apart, self.world_size, dim + 1)[rank].flatten(dim, dim + 2)

    def undo(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        dim = self.dim % tensors[0].dim()
        apart = [_unflatten(t.to(tensors[0].device), dim, self.num_groups, -1) for t in tensors]
        return torch.cat(apart, dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True)
class Scale(StateAction):
    """A world_size-th of the tensor on each rank: a bias that is added before a sum over the ranks."""

    world_size: int

    def __call__(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor / self.world_size

    def undo(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0] * self.world_size


@dataclass(frozen=True)
class FlatShard(StateAction):
    """A stretch of the flattened tensor for each rank, which computes with the whole (ZeRO-3).

    sizes: of the stretches, by rank.  shape: of the whole.
    """

    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    assembled = True

    def __call__(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.reshape(-1).narrow(0, sum(self.sizes[:rank]), self.sizes[rank])

    def undo(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).reshape(self.shape)


@dataclass(frozen=True)
class LegacyStateAction(StateAction):
    """A plain function, or a pair of functions, that stands in a rule."""

    action: Callable[..., torch.Tensor]
    reverse_action: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None

    def __call__(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        found: torch.Tensor = with_rank(self.action, tensor, rank)
        return found

    def undo(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.reverse_action is None:
            raise PlanError(
                f"{self.action} has no way back to the whole tensor: give a pair (action, undo), or a tp.StateAction"
            )
        return self.reverse_action(tensors)


def with_rank(function: Callable[..., Any], value: Any, rank: int) -> Any:
    """`function(value, rank=rank)`, by position where it calls its second argument otherwise."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin that does not say
        return function(value, rank)
    named = "rank" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return function(value, rank=rank) if named else function(value, rank)


def _unflatten(tensor: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def _segment(units: int, factor: str, chunk: int) -> Segment:
    parts = (Part(units, factor),) if chunk == 1 else (Part(units, factor), Part(chunk))
    return Segment(parts)


def _chunks(action: Split, size: int, chunk: int) -> int:
    if chunk < 1 or size % chunk:
        raise PlanError(f"{action} does not divide a dim of size {size}: it is no multiple of {chunk}")
    return size // chunk
