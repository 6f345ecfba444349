"""The algebra of dims beside a model of it: every leaf has coordinates of its own, a dim is the list of its units.

A unit of a dim is the set of (leaf, index) pairs that lead to it. Reshapes, slices and concatenations of types must say
what the same operations on the lists of units give.
"""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensor_parallel.layout import runs, spread
from tensor_parallel.planner.index_types import (
    Blocked,
    Dim,
    concatenation,
    cut_sum,
    find,
    leaf,
    leaves,
    normal_form,
    product,
    reshape,
    split_product,
    unify,
)

FAST = settings(max_examples=150, deadline=None)


@st.composite
def dims(draw, depth=3, largest=60):
    """A fresh dim of leaves, products and sums."""
    size = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["leaf", "prod", "sum"])) if depth else "leaf"
    if kind == "leaf":
        return leaf(size)
    parts = [draw(dims(depth=depth - 1)) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        parts.append(draw(st.sampled_from(parts)))  # the same units twice
    made = product(parts) if kind == "prod" else concatenation(parts)
    assume(made.size <= largest)
    return made


def units(dim):
    """The units of a dim, in order: each the (leaf, index) pairs that lead to it; a leaf of one unit says nothing."""
    node = find(dim)
    if node.kind == "leaf":
        return [((id(node), i),) for i in range(node.size)] if node.size > 1 else [()] * node.size
    if node.kind == "sum":
        return [unit for part in node.parts for unit in units(part)]
    found = [()]
    for part in node.parts:
        found = [a + b for a in found for b in units(part)]
    return found


def well_formed(dim):
    node = find(dim)
    if node.kind == "leaf":
        return True
    sizes = [find(p).size for p in node.parts]
    whole = math.prod(sizes) if node.kind == "prod" else sum(sizes)
    return whole == node.size == len(units(node)) and all(map(well_formed, node.parts))


@FAST
@given(dims(), st.data())
def test_cut_sum_cuts_the_list_of_units(dim, data):
    at = data.draw(st.integers(0, dim.size))
    size = dim.size
    try:
        first, rest = cut_sum(dim, at)
    except Blocked:
        assert well_formed(dim)
        assert find(dim).size == size
        return
    assert (find(first).size, find(rest).size) == (at, size - at)
    assert units(first) + units(rest) == units(dim)
    assert well_formed(dim)


@FAST
@given(dims(), st.data())
def test_split_product_splits_the_list_of_units(dim, data):
    leading = data.draw(st.sampled_from([n for n in range(1, dim.size + 1) if dim.size % n == 0]))
    try:
        parts = split_product(dim, leading)
    except Blocked:
        assert well_formed(dim)
        return
    sizes = [find(p).size for p in parts]
    assert sizes == ([leading, dim.size // leading] if 1 < leading < dim.size else [dim.size])
    assert units(product(parts)) == units(dim)


@FAST
@given(dims(), dims(), st.booleans())
def test_unify_makes_one_list_of_units(a, b, align):
    if align:
        size = math.gcd(a.size, b.size)
        assume(size > 1)
        try:
            a, b = split_product(a, size)[0], split_product(b, size)[0]
        except Blocked:
            assume(False)
    before = a.size, b.size
    try:
        result = unify(a, b)
    except Blocked:
        assert (find(a).size, find(b).size) == before
        assert well_formed(a)
        assert well_formed(b)
        return
    assert before[0] == before[1] == result.size
    assert units(a) == units(b) == units(result)
    assert well_formed(a)
    assert unify(a, b) is find(a)


def factorisations(draw, total):
    sizes = []
    while total > 1 and len(sizes) < 4:
        size = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        sizes.append(size)
        total //= size
    return [*sizes, total] if total > 1 or not sizes else sizes


@FAST
@given(st.lists(dims(depth=2, largest=12), min_size=1, max_size=3), st.data())
def test_reshape_keeps_the_order_of_units(parts, data):
    total = math.prod(p.size for p in parts)
    assume(total <= 300)
    sizes = factorisations(data.draw, total)
    try:
        result = reshape(parts, sizes)
    except Blocked:
        assert all(map(well_formed, parts))
        return
    assert [find(d).size for d in result] == sizes
    assert units(product(result)) == units(product(parts))


@FAST
@given(st.lists(dims(depth=2), min_size=1, max_size=3), st.data())
def test_a_cut_of_a_concatenation_where_its_parts_meet_gives_the_parts(parts, data):
    whole = concatenation(parts)
    at = data.draw(st.integers(0, len(parts)))
    first, rest = cut_sum(whole, sum(p.size for p in parts[:at]))
    assert units(first) == [u for p in parts[:at] for u in units(p)]
    assert units(rest) == [u for p in parts[at:] for u in units(p)]


@FAST
@given(dims(), st.data())
def test_normal_form_selects_the_units_in_a_ranks_range(dim, data):
    nodes = list(dict.fromkeys(leaves(dim)))
    chosen = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2, unique=True))
    cut = {node: f"f{i}" for i, node in enumerate(chosen)}
    ranks = data.draw(st.integers(1, 4))
    cuts = {name: spread(node.size, ranks) for node, name in cut.items()}
    assume(all(node.size >= ranks for node in chosen))
    try:
        layout = normal_form(dim, cut)
    except Blocked:
        return
    assert layout.size == dim.size
    for rank in range(ranks):
        ranges = {id(node): range(*cuts[name][rank]) for node, name in cut.items()}
        wanted = [
            index for index, unit in enumerate(units(dim)) if all(i in ranges.get(at, range(10**9)) for at, i in unit)
        ]
        found = [index for start, stop in runs(layout, cuts, rank) for index in range(start, stop)]
        assert found == wanted


@FAST
@given(dims(), st.data())
def test_normal_form_of_nothing_cut_is_whole(dim, data):
    layout = normal_form(dim, {})
    assert layout.size == dim.size
    assert not layout.factors
    assert len(layout.segments) == 1


# --- what models do ---------------------------------------------------------------------------------------------------


def shown(dim, names):
    return [[(p.size, p.factor) for p in s.parts] for s in normal_form(dim, names).segments]


def test_a_packed_qkv_of_heads():
    packed = leaf(3 * 24)
    q, rest = cut_sum(packed, 24)
    k, v = cut_sum(rest, 24)
    heads = [reshape([part], [4, 6]) for part in (q, k, v)]
    for a, b in ((0, 1), (0, 2)):
        for x, y in zip(heads[a], heads[b], strict=True):
            unify(x, y)
    assert shown(packed, {find(heads[0][0]): "h"}) == [[(4, "h"), (6, None)]] * 3


def test_the_same_qkv_seen_as_three_times_heads():
    packed = leaf(3 * 24)
    three, heads, _ = reshape([packed], [3, 4, 6])
    assert find(three).size == 3
    assert shown(packed, {find(heads): "h"}) == [[(3, None), (4, "h"), (6, None)]]


def test_groups_of_queries_beside_key_heads():
    queries, keys = leaf(24), leaf(8)
    q_heads, _ = reshape([queries], [6, 4])
    kv, _ = reshape([keys], [2, 4])
    unify(q_heads, product([kv, leaf(3)]))
    assert shown(queries, {find(kv): "kv"}) == [[(2, "kv"), (12, None)]]


def test_a_multi_query_pack():
    packed = leaf(64 + 16 + 16)
    heads, _ = reshape([packed], [6, 16])
    q, k, v = cut_sum(heads, 4)[0], *cut_sum(cut_sum(heads, 4)[1], 1)
    assert [find(d).size for d in (q, k, v)] == [4, 1, 1]
    assert shown(packed, {find(q): "q"}) == [[(4, "q"), (16, None)], [(32, None)]]


def test_a_sum_seen_through_its_common_factor():
    dim = concatenation([leaf(64), leaf(16), leaf(16)])
    lead, tail = split_product(dim, 6)
    assert (lead.size, find(tail).size) == (6, 16)
    assert find(lead).kind == "sum"


def test_what_does_not_fit_is_blocked():
    six, four = leaf(6), leaf(4)
    with pytest.raises(Blocked):
        unify(six, four)
    with pytest.raises(Blocked):
        unify(product([leaf(3), leaf(4)]), product([leaf(4), leaf(3)]))
    with pytest.raises(Blocked):
        split_product(product([leaf(3), leaf(5)]), 5)
    with pytest.raises(Blocked):
        reshape([leaf(6), leaf(4)], [5, 5])
    with pytest.raises(Blocked):
        cut_sum(product([leaf(3), leaf(5)]), 4)
    with pytest.raises(Blocked):
        cut_sum(leaf(3), 4)
    node = leaf(3)
    with pytest.raises(Blocked):
        unify(node, Dim(3, "sum", (node, leaf(0))))


def test_a_factor_in_a_concatenation_that_a_factor_repeats_is_blocked():
    inside = leaf(3)
    outer = leaf(2)
    dim = product([outer, concatenation([inside, leaf(2)])])
    assert shown(dim, {inside: "f"}) == [[(3, "f")], [(2, None)]] * 2
    with pytest.raises(Blocked):
        normal_form(dim, {inside: "f", outer: "g"})
