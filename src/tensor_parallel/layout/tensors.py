"""Tensor layouts: slices out of a whole tensor, and the whole tensor out of slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tensor_parallel.layout.dims import Cuts, DimLayout, holds_nothing, local_size, runs


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layout of every dim of one tensor."""

    dims: tuple[DimLayout, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f for dim in self.dims for f in dim.factors))


def local_shape(layout: TensorLayout, cuts: Cuts, rank: int) -> tuple[int, ...]:
    """The shape of `rank`'s part."""
    return tuple(local_size(dim, cuts, rank) for dim in layout.dims)


def take(tensor: torch.Tensor, dim: int, dim_layout: DimLayout, cuts: Cuts, rank: int) -> torch.Tensor:
    """`rank`'s part of `tensor` along `dim`: a view where it is one run, else a new tensor. Differentiable."""
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in runs(dim_layout, cuts, rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def take_local(tensor: torch.Tensor, layout: TensorLayout, cuts: Cuts, rank: int) -> torch.Tensor:
    """`rank`'s part of a whole tensor; may be a view of it."""
    for dim, dim_layout in enumerate(layout.dims):
        if dim_layout.factors:
            tensor = take(tensor, dim, dim_layout, cuts, rank)
    return tensor


def regions(
    whole: torch.Tensor, local: torch.Tensor, layout: TensorLayout, cuts: Cuts, rank: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(view of the whole, view of `rank`'s part) of each block that the part is made of: copying one way cuts, the
    other way joins, without a third tensor."""
    return _regions(whole, local, [(d, runs(dl, cuts, rank)) for d, dl in enumerate(layout.dims) if dl.factors])


def _regions(
    whole: torch.Tensor, local: torch.Tensor, todo: Sequence[tuple[int, list[tuple[int, int]]]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not todo:
        yield whole, local
        return
    (dim, pieces), rest = todo[0], todo[1:]
    offset = 0
    for start, stop in pieces:
        yield from _regions(whole.narrow(dim, start, stop - start), local.narrow(dim, offset, stop - start), rest)
        offset += stop - start


def put_local(whole: torch.Tensor, local: torch.Tensor, layout: TensorLayout, cuts: Cuts, rank: int) -> None:
    """Write `rank`'s part into the whole tensor, in place."""
    for block, part in regions(whole, local, layout, cuts, rank):
        block.copy_(part)


def holders(layout: TensorLayout, cuts: Cuts, world_size: int) -> list[list[int]]:
    """Ranks by the piece they hold: ranks of one inner list hold the same piece, the first of them owns it; ranks that
    hold nothing are left out. A tensor that nothing cuts has one piece, held by all."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(world_size):
        if not holds_nothing(layout.factors, cuts, rank):
            found.setdefault(tuple(cuts[f][rank] for f in layout.factors), []).append(rank)
    return list(found.values())


def join(
    parts: Sequence[torch.Tensor], layout: TensorLayout, cuts: Cuts, device: torch.device | None = None
) -> torch.Tensor:
    """The whole tensor, on `device` (None: the first part's), from every rank's part (by rank; those of ranks that hold
    nothing are not read)."""
    whole = parts[0].new_empty(layout.shape, device=device)
    for owner, *_ in holders(layout, cuts, len(parts)):
        put_local(whole, parts[owner].to(whole.device), layout, cuts, owner)
    return whole
