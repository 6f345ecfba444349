"""How one dim of a tensor is built from factors, and which part of it each rank holds.

A *factor* is a part of a dim that moves as one unit (a head, a KV group, a hidden unit). A dim is a concatenation of
*segments* (q, k, v; gate, up), each a row-major product of *parts*, some of which are factors that ranks cut:

    c_attn.weight dim 1 of GPT-2 with 4 heads of 16:  3 x Segment(Part(4, "h.0.head"), Part(16))

That normal form covers contiguous, per-segment and strided slices, and needs neither ranks nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

RUNTIME = -1
"""The size of a part that is known only at run time (a batch, a length); at most one part of a dim has it."""

Ranges = tuple[tuple[int, int], ...]
"""One factor's share of each rank, by rank: units [start, stop). Equal ranges are copies; an empty one is no share."""

Cuts = Mapping[str, Ranges]
"""Ranges of every factor, by the factor's name."""


@dataclass(frozen=True, slots=True)
class Part:
    """`size` units of a dim; `factor` names what they are, None where no rank cuts them."""

    size: int
    factor: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A row-major product of parts."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return prod(part.size for part in self.parts)

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(part.factor for part in self.parts if part.factor is not None)


@dataclass(frozen=True, slots=True)
class DimLayout:
    """A concatenation of segments."""

    segments: tuple[Segment, ...]

    @classmethod
    def whole(cls, size: int) -> DimLayout:
        return cls((Segment((Part(size),)),))

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f for segment in self.segments for f in segment.factors))

    def at_run_time(self, size: int) -> DimLayout:
        """The same layout with its RUNTIME part solved from the whole dim's `size`.

        Raises:
            ValueError: where no whole number of units gives that size.
        """
        fixed = sum(s.size for s in self.segments if all(p.size != RUNTIME for p in s.parts))
        open_ = [s for s in self.segments if any(p.size == RUNTIME for p in s.parts)]
        if not open_:
            return self
        unit = sum(prod(p.size for p in s.parts if p.size != RUNTIME) for s in open_)
        units, rest = divmod(size - fixed, unit)
        if rest or units < 0:
            raise ValueError(f"a dim of size {size} is no whole number of units of {unit} after {fixed} fixed ones")

        def solved(part: Part) -> Part:
            return Part(units, part.factor) if part.size == RUNTIME else part

        return DimLayout(tuple(Segment(tuple(solved(p) for p in s.parts)) for s in self.segments))


def spread(units: int, ranks: int, ratios: Sequence[float] | None = None) -> Ranges:
    """Contiguous ranges of `units` over `ranks`, as even as can be, the first ranks taking what is over (5 over 4 is
    2, 1, 1, 1), or in proportion to `ratios` by largest remainder."""
    if ratios is None:
        sizes = [units // ranks + (rank < units % ranks) for rank in range(ranks)]
    else:
        exact = [units * ratio / sum(ratios) for ratio in ratios]
        sizes = [int(share) for share in exact]
        by_remainder = sorted(range(ranks), key=lambda rank: (sizes[rank] - exact[rank], rank))
        for rank in by_remainder[: units - sum(sizes)]:
            sizes[rank] += 1
    stops = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    return tuple((stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


def holds_nothing(factors: Sequence[str], cuts: Cuts, rank: int) -> bool:
    """Whether `rank` has no unit of one of `factors`, and so no share of a tensor cut by them."""
    return any(cuts[f][rank][0] >= cuts[f][rank][1] for f in factors)


def compute_range(factor: str, cuts: Cuts, rank: int) -> tuple[int, int]:
    """The units `rank` computes with: its own, or unit 0 as a *stand-in* where it holds nothing.

    Code such as `x.view(batch, length, -1, 16)` cannot run on empty tensors, so a rank without a share computes with a
    copy of unit 0 whose results every collective leaves out.
    """
    start, stop = cuts[factor][rank]
    return (start, stop) if start < stop else (0, 1)


def _segment_runs(parts: Sequence[Part], cuts: Cuts, rank: int) -> list[tuple[int, int]]:
    if not parts:
        return [(0, 1)]
    inner = prod(part.size for part in parts[1:])
    head, tail = parts[0], _segment_runs(parts[1:], cuts, rank)
    start, stop = (0, head.size) if head.factor is None else compute_range(head.factor, cuts, rank)
    if tail == [(0, inner)]:
        return [(start * inner, stop * inner)]
    return [(unit * inner + a, unit * inner + b) for unit in range(start, stop) for a, b in tail]


def runs(dim: DimLayout, cuts: Cuts, rank: int) -> list[tuple[int, int]]:
    """The whole dim's index ranges that `rank` computes with, in order, neighbours merged."""
    found: list[tuple[int, int]] = []
    offset = 0
    for segment in dim.segments:
        for start, stop in _segment_runs(segment.parts, cuts, rank):
            if found and found[-1][1] == offset + start:
                found[-1] = (found[-1][0], offset + stop)
            else:
                found.append((offset + start, offset + stop))
        offset += segment.size
    return found


def local_size(dim: DimLayout, cuts: Cuts, rank: int) -> int:
    """The size of the dim on `rank` (of its stand-in, where it holds nothing)."""
    return sum(stop - start for start, stop in runs(dim, cuts, rank))


def cut_segments(dim: DimLayout) -> Iterator[tuple[int, Segment]]:
    """(offset in the whole dim, segment) of every segment."""
    offset = 0
    for segment in dim.segments:
        yield offset, segment
        offset += segment.size
