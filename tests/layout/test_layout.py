"""Local parts and whole tensors: whatever the segments, factors and ranks, joining what was taken gives the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensor_parallel.layout import (
    RUNTIME,
    DimLayout,
    Part,
    Segment,
    TensorLayout,
    holders,
    holds_nothing,
    join,
    local_shape,
    local_size,
    runs,
    spread,
    take_local,
)

RANKS = st.integers(1, 17)


@st.composite
def cut_tensors(draw):
    """(layout, cuts, ranks) of a tensor with up to two dims of up to three segments, all cut by the same factors."""
    ranks = draw(RANKS)
    units = {"a": draw(st.integers(1, 9)), "b": draw(st.integers(1, 5))}
    cuts = {name: spread(size, ranks) for name, size in units.items()}

    def segment(factors):
        parts = [Part(units[f], f) for f in factors]
        for _ in range(draw(st.integers(0, len(factors) + 1))):
            parts.insert(draw(st.integers(0, len(parts))), Part(draw(st.integers(1, 3))))
        return Segment(tuple(parts))

    dims = []
    for factors in draw(st.sampled_from([(("a",),), (("a",), ()), ((), ("a",)), (("a", "b"),)])):
        dims.append(DimLayout(tuple(segment(factors) for _ in range(draw(st.integers(1, 3))))))
    return TensorLayout(tuple(dims)), cuts, ranks


@given(cut_tensors())
def test_joining_what_was_taken_gives_the_whole(case):
    layout, cuts, ranks = case
    if len(holders(layout, cuts, ranks)) == 0:
        return
    if len({f for dim in layout.dims for f in dim.factors}) == 2:
        # Two factors dealt out alike hold the blocks of a diagonal: a plan deals a partner out to the other ranks.
        cuts = {**cuts, "b": ((0, units_of(layout, "b")),) * ranks}
    whole = torch.arange(torch.Size(layout.shape).numel()).reshape(layout.shape)
    parts = [take_local(whole, layout, cuts, rank) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        assert tuple(part.shape) == local_shape(layout, cuts, rank)
    assert torch.equal(join(parts, layout, cuts), whole)


def units_of(layout, factor):
    return next(p.size for d in layout.dims for s in d.segments for p in s.parts if p.factor == factor)


@given(cut_tensors())
def test_ranks_hold_disjoint_units_that_cover_the_whole(case):
    layout, cuts, ranks = case
    dim = next(d for d in layout.dims if d.factors)
    if dim.factors != ("a",):
        return
    holding = [rank for rank in range(ranks) if not holds_nothing(("a",), cuts, rank)]
    held = [i for rank in holding for start, stop in runs(dim, cuts, rank) for i in range(start, stop)]
    assert sorted(held) == list(range(dim.size))


@given(st.integers(0, 200), RANKS)
def test_spread_is_even_ordered_and_whole(units, ranks):
    ranges = spread(units, ranks)
    sizes = [stop - start for start, stop in ranges]
    assert sum(sizes) == units
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


@given(st.integers(0, 200), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_spread_by_ratio_is_within_one_unit_of_it(units, ratios):
    sizes = [stop - start for start, stop in spread(units, len(ratios), ratios)]
    assert sum(sizes) == units
    assert all(abs(size - units * ratio / sum(ratios)) < 1 for size, ratio in zip(sizes, ratios, strict=True))


def test_a_rank_without_a_share_computes_with_unit_0():
    dim = DimLayout((Segment((Part(2, "head"), Part(4))),))
    cuts = {"head": spread(2, 3)}
    assert holds_nothing(("head",), cuts, 2)
    assert runs(dim, cuts, 2) == [(0, 4)]
    assert local_size(dim, cuts, 2) == 4
    assert holders(TensorLayout((dim,)), cuts, 3) == [[0], [1]]


def test_ranks_with_equal_ranges_hold_one_piece():
    layout = TensorLayout((DimLayout((Segment((Part(2, "kv"), Part(4))),)),))
    cuts = {"kv": ((0, 1), (0, 1), (1, 2), (1, 2))}
    assert holders(layout, cuts, 4) == [[0, 1], [2, 3]]


def test_runs_of_neighbouring_segments_are_merged():
    whole = DimLayout((Segment((Part(3),)), Segment((Part(2, "a"),))))
    assert runs(whole, {"a": ((0, 2),)}, 0) == [(0, 5)]


def test_a_runtime_part_is_solved_from_the_whole_size():
    dim = DimLayout((Segment((Part(RUNTIME), Part(4, "head"))),))
    assert dim.at_run_time(12).size == 12
    assert local_size(dim.at_run_time(12), {"head": spread(4, 2)}, 1) == 6
    with pytest.raises(ValueError, match="no whole number of units of 4"):
        dim.at_run_time(10)
