"""Which rank gives which piece of a whole tensor: the arithmetic of a gather of uneven, packed and repeated shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from tensor_parallel.errors import CollectiveError
from tensor_parallel.layout import (
    RUNTIME,
    Cuts,
    DimLayout,
    Part,
    Placement,
    Segment,
    compute_range,
    cut_segments,
    holds_nothing,
    local_size,
    runs,
)

Runs = tuple[tuple[int, int, int], ...]
"""(start in the whole dim, start in the rank's dim, length) of each stretch."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block that `rank` gives: the product of its stretches along `dims` (counted from the end)."""

    rank: int
    dims: tuple[tuple[int, Runs], ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """One all-gather, worked out for given local shapes.

    shape: of the whole tensor.  local_shapes: by rank; None for a rank that nothing is taken from.
    pieces: disjoint, together the whole.  devices: by rank.
    joined: (dim, ranks) where the whole is just these ranks' tensors one after the other.
    """

    shape: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...] | None, ...]
    pieces: tuple[Piece, ...]
    devices: tuple[torch.device, ...]
    joined: tuple[int, tuple[int, ...]] | None

    def gather(self, parts: Sequence[torch.Tensor | None], like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The whole on `device`, in `like`'s dtype; zeros for a part that is None."""
        if self.joined is not None:
            dim, ranks = self.joined
            present = [part for rank in ranks if (part := parts[rank]) is not None]
            if len(present) == len(ranks) > 1:
                return torch.cat([part.to(device) for part in present], dim)
        whole = like.new_empty(self.shape, device=device)
        for piece in self.pieces:
            part = parts[piece.rank]
            for target, source in _blocks(piece):
                block = _narrow(whole, target)
                _ = block.zero_() if part is None else block.copy_(_narrow(part, source))
        return whole

    def put(self, whole: torch.Tensor, part: torch.Tensor, rank: int) -> None:
        """Copy what is taken from `rank`'s tensor to its places in `whole`."""
        for piece in self.pieces:
            if piece.rank == rank:
                for target, source in _blocks(piece):
                    _narrow(whole, target).copy_(_narrow(part, source))

    def scatter(self, whole: torch.Tensor, rank: int, *, views: bool = False) -> torch.Tensor:
        """`rank`'s part of `whole`, a new tensor (or a view, where it is one stretch and that is enough); zeros where
        the gather takes nothing from the rank."""
        shape = self.local_shapes[rank]
        if shape is None:
            raise CollectiveError(f"rank {rank} takes no part in this gather and has no part of its gradient")
        if self.joined is not None and views:
            mine = [piece for piece in self.pieces if piece.rank == rank]
            ((target, _),) = _blocks(mine[0])
            return _narrow(whole, target)
        local = whole.new_zeros(shape)
        for piece in self.pieces:
            if piece.rank == rank:
                for target, source in _blocks(piece):
                    _narrow(local, source).copy_(_narrow(whole, target))
        return local

    @property
    def givers(self) -> tuple[bool, ...]:
        """Whether something is taken from a rank, by rank."""
        return tuple(shape is not None for shape in self.local_shapes)


Block = tuple[tuple[int, int, int], ...]
"""(dim, start, length) of each dim that is cut."""


def _blocks(piece: Piece) -> list[tuple[Block, Block]]:
    """(block of the whole, block of the rank's tensor) of every combination of stretches."""
    found = []
    for combination in product(*(stretches for _, stretches in piece.dims)):
        named = [(dim, *run) for (dim, _), run in zip(piece.dims, combination, strict=True)]
        found.append((tuple((d, a, n) for d, a, _, n in named), tuple((d, b, n) for d, _, b, n in named)))
    return found


def _narrow(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    for dim, start, length in block:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def solve(layout: DimLayout, cuts: Cuts, rank: int, size: int) -> DimLayout:
    """The layout with its RUNTIME part worked out from the size of `rank`'s part of the dim.

    Raises:
        CollectiveError: where no whole number of units gives that size.
    """
    fixed, per_unit = 0, 0
    for segment in layout.segments:
        sizes = [_local_units(part, cuts, rank) for part in segment.parts]
        if any(part.size == RUNTIME and part.factor is None for part in segment.parts):
            per_unit += prod(n for n, part in zip(sizes, segment.parts, strict=True) if part.size != RUNTIME)
        else:
            fixed += prod(sizes)
    units, rest = divmod(size - fixed, per_unit) if per_unit else (0, size - fixed)
    if rest or units < 0:
        raise CollectiveError(f"size {size} on rank {rank} is no part of {layout}")

    def solved(part: Part) -> Part:
        if part.size != RUNTIME:
            return part
        return Part(units if part.factor is None else cuts[part.factor][-1][1], part.factor)

    return DimLayout(tuple(Segment(tuple(solved(part) for part in s.parts)) for s in layout.segments))


def _local_units(part: Part, cuts: Cuts, rank: int) -> int:
    if part.factor is None:
        return part.size
    start, stop = compute_range(part.factor, cuts, rank)
    return stop - start


def whole_layouts(
    placement: Placement, cuts: Cuts, rank: int, shape: Sequence[int]
) -> tuple[tuple[int, ...], list[tuple[int, DimLayout]]]:
    """(shape of the whole, [(dim, its layout without RUNTIME)]) from the shape of `rank`'s part."""
    whole = list(shape)
    dims = []
    for dim, layout in placement.dims:
        if dim >= 0 or -dim > len(whole):
            raise CollectiveError(
                f"dim {dim} of a placement must be between {-len(whole)} and -1 for shape {tuple(shape)}"
            )
        solved = solve(layout, cuts, rank, shape[dim])
        whole[dim] = solved.size
        dims.append((dim, solved))
    return tuple(whole), dims


def segment_runs(layout: DimLayout, cuts: Cuts, rank: int) -> list[tuple[Segment, Runs]]:
    """Every segment with `rank`'s stretches of it."""
    found, local = [], 0
    for offset, segment in cut_segments(layout):
        stretches = []
        for start, stop in runs(DimLayout((segment,)), cuts, rank):
            stretches.append((offset + start, local, stop - start))
            local += stop - start
        found.append((segment, tuple(stretches)))
    return found


def plan_gather(
    placement: Placement, cuts: Cuts, shapes: Sequence[tuple[int, ...]], devices: tuple[torch.device, ...]
) -> GatherPlan:
    """Work out who gives what from the shapes of the ranks' tensors.

    Raises:
        CollectiveError: a rank's shape is not the one of its part, or the parts do not make up the whole.
    """
    if placement.kind != "shard":
        raise CollectiveError(f"all_gather needs a placement of kind 'shard', not {placement.kind!r}")
    ranks = range(len(shapes))
    first = next((rank for rank in ranks if not holds_nothing(placement.cut_by, cuts, rank)), 0)
    shape, dims = whole_layouts(placement, cuts, first, shapes[first])
    by_rank = [[segment_runs(layout, cuts, rank) for _, layout in dims] for rank in ranks]
    pieces: list[Piece] = []
    for choice in product(*(range(len(layout.segments)) for _, layout in dims)):
        factors = {f for (_, layout), i in zip(dims, choice, strict=True) for f in layout.segments[i].factors}
        names = sorted(factors)
        owners: dict[tuple[tuple[int, int], ...], int] = {}
        for rank in ranks:
            if not holds_nothing(names, cuts, rank):
                owners.setdefault(tuple(cuts[f][rank] for f in names), rank)
        for rank in owners.values():
            stretches = [by_rank[rank][d][i][1] for d, i in enumerate(choice)]
            pieces.append(Piece(rank, tuple((dim, found) for (dim, _), found in zip(dims, stretches, strict=True))))
    covered = sum(prod(sum(run[2] for run in found) for _, found in piece.dims) for piece in pieces)
    wanted = prod(shape[dim] for dim, _ in dims)
    if covered != wanted:
        raise CollectiveError(
            f"all_gather: the ranks hold {covered} of {wanted} blocks of the whole {shape}: {placement}"
        )
    locals_ = _local_shapes(shape, dims, cuts, shapes, {piece.rank for piece in pieces})
    return GatherPlan(shape, locals_, tuple(pieces), devices, _joined(pieces, shape, locals_))


def _local_shapes(
    shape: tuple[int, ...],
    dims: Sequence[tuple[int, DimLayout]],
    cuts: Cuts,
    given: Sequence[tuple[int, ...]],
    owners: set[int],
) -> tuple[tuple[int, ...] | None, ...]:
    found: list[tuple[int, ...] | None] = []
    for rank, rank_shape in enumerate(given):
        if rank not in owners:
            found.append(None)
            continue
        expected = list(shape)
        for dim, layout in dims:
            expected[dim] = local_size(layout, cuts, rank)
        if tuple(expected) != tuple(rank_shape):
            raise CollectiveError(
                f"all_gather: rank {rank} has a tensor of shape {tuple(rank_shape)}, its part of the whole {shape} is "
                f"{tuple(expected)}"
            )
        found.append(tuple(expected))
    return tuple(found)


def _joined(
    pieces: Sequence[Piece], shape: tuple[int, ...], locals_: Sequence[tuple[int, ...] | None]
) -> tuple[int, tuple[int, ...]] | None:
    """(dim, ranks) where each piece is a rank's whole tensor and they follow each other along the one dim."""
    if any(len(piece.dims) != 1 or len(piece.dims[0][1]) != 1 for piece in pieces):
        return None
    ordered = sorted(pieces, key=lambda piece: piece.dims[0][1][0][0])
    dim = ordered[0].dims[0][0]
    for piece in ordered:
        local = locals_[piece.rank]
        if local is None or piece.dims[0][1][0][1:] != (0, local[dim]):
            return None
    return dim, tuple(piece.rank for piece in ordered)
