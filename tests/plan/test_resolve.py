"""Dealing out the units of a plan's factors to ranks."""

import pytest

from tensor_parallel.errors import PlanError
from tensor_parallel.plan import Factor, Plan, resolve


def plan(kv, groups):
    return Plan({"kv": Factor("kv", kv, "group"), "group": Factor("group", groups)}, {})


def shares(cuts, rank):
    return {(k, g) for k in range(*cuts["kv"][rank]) for g in range(*cuts["group"][rank])}


@pytest.mark.parametrize("kv", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_every_head_is_held_once(kv, groups, ranks):
    cuts = resolve(plan(kv, groups), ranks).cuts
    held = [unit for rank in range(ranks) for unit in shares(cuts, rank)]
    assert sorted(held) == [(k, g) for k in range(kv) for g in range(groups)]
    assert shares(cuts, 0)


def test_query_groups_take_the_ranks_that_kv_heads_are_too_few_for():
    cuts = resolve(plan(2, 2), 4).cuts
    assert cuts["kv"] == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert cuts["group"] == ((0, 1), (1, 2), (0, 1), (1, 2))


def test_kv_heads_stay_apart_where_sharing_them_gains_nothing():
    cuts = resolve(plan(3, 3), 4).cuts
    assert cuts["kv"] == ((0, 1), (1, 2), (2, 3), (3, 3))
    assert cuts["group"] == ((0, 3),) * 4


def test_bad_requests_are_refused():
    with pytest.raises(PlanError, match="at least 1 rank"):
        resolve(plan(2, 2), 0)
    with pytest.raises(PlanError, match="2 positive numbers"):
        resolve(plan(2, 2), 2, [1.0])
