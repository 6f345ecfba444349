"""The report's numbers, of plans and of shards made by hand: what is counted, and what is not."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from tensor_parallel.errors import PlanError, TensorParallelError
from tensor_parallel.layout import DimLayout, Part, Segment, TensorLayout, holders, local_shape
from tensor_parallel.plan import Factor, Plan, TensorPlan, Traffic, resolve
from tensor_parallel.verify import report
from tensor_parallel.verify.report import cut_share


def dim(*segments):
    """dim((4, "f"), 16) is one segment of a factor and an inner size; dim([..], [..]) is several."""
    many = [s if isinstance(s, list) else None for s in segments]
    listed = many if all(s is not None for s in many) else [list(segments)]
    return DimLayout(
        tuple(Segment(tuple(Part(*part) if isinstance(part, tuple) else Part(part) for part in s)) for s in listed)
    )


def tensor_plan(name, *dims, **more):
    layout = TensorLayout(tuple(d if isinstance(d, DimLayout) else DimLayout.whole(d) for d in dims))
    nbytes = 8
    for size in layout.shape:
        nbytes *= size
    return TensorPlan((name,), layout, nbytes, **more)


def split_by_hand(plan, world_size):
    """A model whose shards are what the plan says, without running anything."""
    resolved = resolve(plan, world_size)
    tensors = {}
    for key, planned in plan.tensors.items():
        owners = holders(planned.layout, resolved.cuts, world_size)
        if planned.rank0_only:
            owners = [[0]]
        pieces = [
            SimpleNamespace(
                ranks=tuple(o),
                tensor=torch.zeros(local_shape(planned.layout, resolved.cuts, o[0]), dtype=torch.float64),
            )
            for o in owners
        ]
        tensors[key] = SimpleNamespace(plan=planned, pieces=pieces)
    devices = (torch.device("cpu"),) * world_size
    return SimpleNamespace(resolved=resolved, devices=devices, tensors=tensors, world_size=world_size)


PLAN = Plan(
    {"h": Factor("h", 3, None, "head"), "kv": Factor("kv", 1, None, "KV head")},
    {
        t.names[0]: t
        for t in (
            tensor_plan("q.weight", dim((3, "h"), 4), 10),
            tensor_plan("k.weight", dim((1, "kv"), 4), 10),
            tensor_plan("packed.weight", dim([(3, "h"), 4], [8]), 10),
            tensor_plan("norm.weight", 10, reason="a norm over the width"),
            tensor_plan("o.bias", 10, rank0_only=True, reason="added before a sum"),
            tensor_plan("alone.weight", dim((3, "h")), 10, gathered=True),
            tensor_plan("table", 1000, is_buffer=True),
        )
    },
    traffic=(Traffic("o", "", "all_reduce", 2, 80), Traffic("head", "", "all_gather", 1, 800)),
)


@pytest.fixture
def reported(monkeypatch):
    """report() of shards made by hand, which says what report() of their plan does."""
    module = sys.modules["tensor_parallel.verify.report"]

    def of(plan, world_size):
        monkeypatch.setattr(module, "up_to_date", lambda model: split_by_hand(plan, world_size))
        found = report(torch.nn.Identity())
        planned = report(plan, world_size)
        assert dataclasses.replace(planned, devices=found.devices) == found
        assert planned.devices == ("any",) * world_size
        return found

    return of


def test_fractions_count_segments_that_no_rank_holds_whole(reported):
    found = reported(PLAN, 2)
    total = 120 + 40 + 200 + 10 + 10 + 30
    assert found.split_fraction == pytest.approx((120 + 120) / total)
    assert found.gathered_fraction == pytest.approx(30 / total)
    assert found.parameter_bytes == 8 * total


def test_bytes_count_what_each_rank_holds(reported):
    found = reported(PLAN, 2)
    rank0 = 80 + 40 + (80 + 80) + 10 + 10 + 20
    rank1 = 40 + 0 + (40 + 80) + 10 + 0 + 10
    assert found.bytes_per_device == [8 * rank0, 8 * rank1]


def test_what_is_whole_is_named_with_its_reason(reported):
    assert reported(PLAN, 2).kept_whole == {
        "k.weight": "kv: too few units for 2 ranks, so that one rank holds all of them",
        "norm.weight": "a norm over the width",
        "o.bias": "added before a sum",
    }


def test_collectives_come_from_the_plan(reported):
    found = reported(PLAN, 3)
    assert found.collectives == 3
    assert [t.op for t in found.traffic] == ["all_reduce", "all_gather"]


def test_one_device_splits_nothing_and_talks_to_nobody(reported):
    found = reported(PLAN, 1)
    assert (found.split_fraction, found.gathered_fraction, found.collectives, found.traffic) == (0.0, 0.0, 0, ())
    assert found.bytes_per_device == [found.parameter_bytes]
    assert set(found.kept_whole.values()) == {"there is one device"}


def test_more_ranks_than_units_leave_a_rank_with_nothing(reported):
    found = reported(PLAN, 4)
    assert found.bytes_per_device[3] == 8 * 10, "a rank without units holds the norm alone"
    assert found.split_fraction > 0


def test_a_partner_takes_the_ranks_that_a_factor_is_too_small_for():
    factors = {"kv": Factor("kv", 2, "g"), "g": Factor("g", 3)}
    q = tensor_plan("q", dim((2, "kv"), (3, "g"), 4), 10)
    k = tensor_plan("k", dim((2, "kv"), 4), 10)
    cuts = resolve(Plan(factors, {"q": q, "k": k}), 4).cuts
    assert cut_share(q.layout, cuts, 4) == 1.0
    assert cut_share(k.layout, cuts, 4) == 1.0


def test_two_cut_dims_count_once():
    factors = {"a": Factor("a", 2), "b": Factor("b", 2)}
    t = tensor_plan("t", dim([(2, "a")], [2]), dim([(2, "b")], [6]))
    cuts = resolve(Plan(factors, {"t": t}), 2).cuts
    assert cut_share(t.layout, cuts, 2) == pytest.approx(1 - (2 / 4) * (6 / 8))


def test_it_prints_as_a_table(reported):
    text = str(reported(PLAN, 2))
    for part in (
        "q.weight",
        "a norm over the width",
        "too few units for 2 ranks",
        "all-reduce",
        "58.5% of 3.3 kB split",
    ):
        assert part in text
    assert all(len(line) <= 140 for line in text.splitlines())


def test_a_plan_is_reported_for_the_number_of_ranks_that_it_was_made_for():
    found = report(dataclasses.replace(PLAN, world_size=3))
    assert dataclasses.replace(found, plan=PLAN) == report(PLAN, 3)
    assert "3 ranks" in str(found)
    with pytest.raises(PlanError, match="at least 1"):
        report(PLAN, 0)


def test_one_rank_shows_no_cuts():
    text = str(report(PLAN, 1))
    assert text.startswith("1 rank: 0.0% of 3.3 kB split")
    assert "how it is cut" not in text


def test_a_number_of_ranks_that_a_model_is_not_split_over(reported):
    reported(PLAN, 2)
    assert report(torch.nn.Identity(), 2).devices == ("cpu", "cpu")
    with pytest.raises(ValueError, match="world_size is 3, but the model is split over 2 ranks"):
        report(torch.nn.Identity(), 3)


def test_an_unsplit_model_is_refused():
    with pytest.raises(TensorParallelError, match="not split"):
        report(torch.nn.Linear(2, 2))
