"""All-gathers of uneven, packed, repeated and empty shards."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_parallel.comm.gather import solve
from tensor_parallel.errors import CollectiveError
from tensor_parallel.layout import (
    RUNTIME,
    Cuts,
    DimLayout,
    Part,
    Placement,
    Ranges,
    Segment,
    TensorLayout,
    holds_nothing,
    local_size,
    shard,
    spread,
    take_local,
)
from tensor_parallel.runtime import ThreadTeam

CPU = torch.device("cpu")
TEAMS: dict[int, ThreadTeam] = {}


def team_of(size: int) -> ThreadTeam:
    if size not in TEAMS:
        TEAMS[size] = ThreadTeam([CPU] * size)
    return TEAMS[size]


@pytest.fixture(scope="module", autouse=True)
def _close() -> None:
    yield
    while TEAMS:
        TEAMS.popitem()[1].close()


@st.composite
def ranges(draw: st.DrawFn, units: int, size: int) -> Ranges:
    """Spread over all ranks (some empty), over groups of ranks that hold the same units, or on the last ranks only."""
    kind = draw(st.sampled_from(["spread", "copies", "late"]))
    if kind == "spread":
        return spread(units, size)
    if kind == "copies":
        stride = draw(st.integers(1, size))
        outer = spread(units, -(-size // stride))
        return tuple(outer[rank // stride] for rank in range(size))
    empty = draw(st.integers(0, size - 1))
    return ((0, 0),) * empty + spread(units, size - empty)


@st.composite
def dims(draw: st.DrawFn, names: list[tuple[str, int]]) -> DimLayout:
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        parts = [Part(draw(st.integers(1, 3)))]
        for name, units in draw(st.lists(st.sampled_from(names), max_size=len(names), unique=True)):
            parts.insert(draw(st.integers(0, len(parts))), Part(units, name))
        segments.append(Segment(tuple(parts)))
    return DimLayout(tuple(segments))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Cuts, TensorLayout]:
    size = draw(st.integers(1, 5))
    names = [("a", draw(st.integers(1, 5))), ("b", draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        cuts = {"a": draw(ranges(names[0][1], size)), "b": ((0, names[1][1]),) * size}
    else:  # both are cut: a over groups of ranks, b inside each group
        size, stride = draw(st.sampled_from([(4, 2), (6, 2), (6, 3), (2, 2)]))
        outer, inner = spread(names[0][1], size // stride), spread(names[1][1], stride)
        cuts = {
            "a": tuple(outer[rank // stride] for rank in range(size)),
            "b": tuple(inner[rank % stride] for rank in range(size)),
        }
    # The parts of two dims must reach every combination of units, so a factor stands in one of them only.
    by_dim = [[names], [names[:1], names[1:]]][draw(st.integers(0, 1))]
    return size, cuts, TensorLayout(tuple(draw(dims(chosen)) for chosen in by_dim))


def open_one(layout: DimLayout) -> DimLayout:
    """The layout with the unsplit part of its first segment known only at run time."""
    first = layout.segments[0]
    at = next(i for i, part in enumerate(first.parts) if part.factor is None)
    parts = (*first.parts[:at], Part(RUNTIME), *first.parts[at + 1 :])
    return DimLayout((Segment(parts), *layout.segments[1:]))


def locals_of(whole: torch.Tensor, layout: TensorLayout, cuts: Cuts, size: int) -> list[torch.Tensor]:
    """Every rank's part; noise on a rank that has no block of the whole, whose tensor must not be read."""
    found = []
    for rank in range(size):
        part = take_local(whole, layout, cuts, rank).clone()
        blocks = product(*(dim.segments for dim in layout.dims))
        if all(holds_nothing([f for s in block for f in s.factors], cuts, rank) for block in blocks):
            part = torch.full_like(part, torch.nan)
        found.append(part)
    return found


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans())
def test_every_rank_gets_the_whole_and_the_adjoint_is_true(
    case: tuple[int, Cuts, TensorLayout], at_run_time: bool
) -> None:
    size, cuts, layout = case
    team = team_of(size)
    whole = torch.randn(layout.shape, dtype=torch.float64)
    parts = [part.requires_grad_() for part in locals_of(whole, layout, cuts, size)]
    named = [open_one(dim) if at_run_time else dim for dim in layout.dims]
    placement = Placement("shard", tuple((i - len(named), dim) for i, dim in enumerate(named)))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found = team.run(lambda rank: team.groups[rank].all_gather(parts[rank], placement, cuts))
        for result in found:
            assert torch.equal(result, whole)
        if grad:
            _check_adjoint(found, parts, whole)
    assert len({result.data_ptr() for result in found}) == size


def _check_adjoint(found: list[torch.Tensor], parts: list[torch.Tensor], whole: torch.Tensor) -> None:
    """<gather(x), y> = <x, adjoint(y)>, each element of the whole taken from one place."""
    upstream = [torch.randn_like(result) for result in found]
    grads = torch.autograd.grad(found, parts, upstream, allow_unused=True)
    total = sum(upstream)
    given = [(part, grad) for part, grad in zip(parts, grads, strict=True) if grad is not None]
    left = (whole * total).sum()
    right = sum((part.detach() * grad).sum() for part, grad in given)
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    assert sum(int(grad.ne(0).sum()) for _, grad in given) == whole.numel()


@settings(max_examples=200, deadline=None)
@given(cases())
def test_run_time_sizes_are_solved_from_any_rank(case: tuple[int, Cuts, TensorLayout]) -> None:
    size, cuts, layout = case
    for dim in layout.dims:
        for rank in range(size):
            assert solve(open_one(dim), cuts, rank, local_size(dim, cuts, rank)) == dim


def test_a_size_that_no_number_of_units_gives_is_named() -> None:
    cuts = {"h": ((0, 2), (2, 3))}
    with pytest.raises(CollectiveError, match="size 5 on rank 0"):
        solve(DimLayout((Segment((Part(RUNTIME), Part(3, "h"))),)), cuts, 0, 5)


def test_a_vocabulary_is_gathered_at_any_length() -> None:
    """Logits [batch, length, vocabulary] cut on the last dim, 7 over 4 ranks: one concatenation."""
    team = team_of(4)
    cuts = {"v": spread(7, 4)}
    placement = shard(-1, DimLayout((Segment((Part(7, "v"),)),)))
    for length in (1, 3):
        whole = torch.randn(2, length, 7)
        parts = [whole[..., slice(*cuts["v"][rank])] for rank in range(4)]
        for result in team.run(lambda rank, p=parts: team.groups[rank].all_gather(p[rank], placement, cuts)):
            assert torch.equal(result, whole)


def test_second_derivatives_through_uneven_gathers() -> None:
    team = team_of(3)
    cuts = {"h": ((0, 1), (1, 3), (0, 1))}  # rank 2 holds a copy of rank 0's
    layout = DimLayout((Segment((Part(2), Part(3, "h"))), Segment((Part(2),))))
    placement = shard(-1, layout)
    whole = torch.randn(2, layout.size, dtype=torch.float64)
    full = TensorLayout((DimLayout.whole(2), layout))
    parts = [take_local(whole, full, cuts, rank).clone().requires_grad_() for rank in range(3)]

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            team.run(
                lambda rank: torch.tanh(team.groups[rank].all_gather(given[rank] ** 2, placement, cuts)) * (rank + 1)
            )
        )

    assert torch.autograd.gradcheck(function, parts)
    assert torch.autograd.gradgradcheck(function, parts)


def test_the_backward_of_a_gather_gives_nothing_to_the_holder_of_a_copy() -> None:
    team = team_of(2)
    cuts = {"h": ((0, 2), (0, 2))}
    parts = [torch.ones(2, requires_grad=True) for _ in range(2)]
    placement = shard(-1, DimLayout((Segment((Part(2, "h"),)),)))
    out = team.run(lambda rank: team.groups[rank].all_gather(parts[rank], placement, cuts))
    (out[0] + out[1] * 2).sum().backward()
    assert parts[0].grad.eq(3).all()
    assert parts[1].grad is None


@pytest.mark.parametrize("shape", [(2, 3), (5, 2), (2, 2, 1)])
def test_a_part_of_the_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    team = team_of(2)
    cuts = {"h": spread(4, 2)}
    placement = shard(-1, DimLayout((Segment((Part(4, "h"),)),)))
    given = [torch.ones(2, 2), torch.ones(shape)]
    with pytest.raises(CollectiveError, match=r"rank 1 has a tensor of shape .* is \(2, 2\)") as caught:
        team.run(lambda rank: team.groups[rank].all_gather(given[rank], placement, cuts))
    assert str(tuple(shape)) in str(caught.value)


def test_wrong_placements_are_refused() -> None:
    team = team_of(2)
    cuts = {"h": spread(4, 2)}
    whole_dim = DimLayout((Segment((Part(4, "h"),)),))
    for placement in (Placement(), Placement("shard", ((0, whole_dim),)), Placement("shard", ((-3, whole_dim),))):
        with pytest.raises(CollectiveError, match="placement"):
            team.run(lambda rank, p=placement: team.groups[rank].all_gather(torch.ones(2, 2), p, cuts))


def test_parts_that_do_not_make_a_whole_are_refused() -> None:
    """One factor on both dims: no rank has the blocks off the diagonal."""
    team = team_of(2)
    cuts = {"h": spread(4, 2)}
    both = DimLayout((Segment((Part(4, "h"),)),))
    with pytest.raises(CollectiveError, match="8 of 16"):
        team.run(
            lambda rank: team.groups[rank].all_gather(
                torch.ones(2, 2), Placement("shard", ((-2, both), (-1, both))), cuts
            )
        )
