"""Random plans: any field may take any value that its type allows."""

from hypothesis import strategies as st

from tensor_parallel.layout import RUNTIME, DimLayout, Part, Placement, Segment, TensorLayout
from tensor_parallel.plan import Boundary, CallSite, Factor, LocalSize, Lookup, ModulePlan, Plan, TensorPlan, Traffic

NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
SIZES = st.integers(0, 50) | st.just(RUNTIME)
PARTS = st.builds(Part, SIZES, st.none() | NAMES)
DIMS = st.builds(
    DimLayout, st.lists(st.builds(Segment, st.lists(PARTS, max_size=3).map(tuple)), max_size=3).map(tuple)
) | st.builds(DimLayout.whole, st.integers(0, 50))
PLACEMENTS = st.builds(
    Placement,
    st.sampled_from(["replicate", "shard", "partial"]),
    st.lists(st.tuples(st.integers(-4, -1), DIMS), max_size=2).map(tuple),
    st.lists(NAMES, max_size=2).map(tuple),
)
BOUNDARIES = st.builds(Boundary, NAMES, PLACEMENTS, PLACEMENTS, st.none() | st.integers(0, 5), st.booleans())
NUMBERS = st.integers(-(2**40), 2**40)
SITES = st.builds(
    CallSite,
    NAMES,
    st.tuples(*[st.integers(0, 999)] * 4),
    st.lists(st.integers(-5, 5), max_size=3).map(tuple),
    NUMBERS,
    st.none() | DIMS,
)


def tuples_of(strategy):
    return st.lists(strategy, max_size=2).map(tuple)


MODULES = st.builds(
    ModulePlan,
    tuples_of(BOUNDARIES),
    tuples_of(BOUNDARIES),
    tuples_of(st.builds(Lookup, NAMES, NAMES, DIMS)),
    tuples_of(st.builds(LocalSize, NAMES, DIMS)),
    tuples_of(SITES),
)
TENSORS = st.builds(
    TensorPlan,
    tuples_of(NAMES),
    st.builds(TensorLayout, tuples_of(DIMS)),
    st.integers(0, 2**45),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    NAMES,
)
TRAFFIC = st.builds(
    Traffic, NAMES, NAMES, st.sampled_from(["all_reduce", "all_gather"]), st.integers(0, 9), st.integers(0, 2**45)
)


@st.composite
def plans(draw):
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    factors = {n: Factor(n, draw(st.integers(1, 99)), draw(st.none() | NAMES), draw(NAMES)) for n in names}
    return Plan(
        factors,
        draw(st.dictionaries(NAMES, TENSORS, max_size=3)),
        draw(st.dictionaries(NAMES, MODULES, max_size=3)),
        draw(tuples_of(TRAFFIC)),
        draw(tuples_of(NAMES)),
        draw(st.dictionaries(NAMES, st.booleans(), max_size=3)),
        draw(st.integers(1, 64)),
    )
