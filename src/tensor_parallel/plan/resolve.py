"""Plan + world size -> concrete cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import Cuts, Ranges, holds_nothing, local_shape, spread
from tensor_parallel.plan.plan import Factor, Plan, TensorPlan


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan with the units of every factor dealt out to `world_size` ranks."""

    plan: Plan
    world_size: int
    cuts: Cuts


def bytes_by_rank(resolved: ResolvedPlan, tensors: Iterable[TensorPlan]) -> list[int]:
    """Bytes of these tensors that each rank holds, by rank; what several ranks hold counts at each of them. Of a tensor
    whose parts a function of a rule by hand makes, each rank is taken to hold an even share."""
    world_size, cuts = resolved.world_size, resolved.cuts
    held = [0] * world_size
    for tensor in tensors:
        elements = prod(tensor.layout.shape)
        for rank in range(world_size):
            if tensor.action is not None:
                held[rank] += -(-tensor.nbytes // world_size)
            elif elements and not (rank and tensor.rank0_only) and not holds_nothing(tensor.layout.factors, cuts, rank):
                held[rank] += tensor.nbytes * prod(local_shape(tensor.layout, cuts, rank)) // elements
    return held


def _busiest(first: Ranges, second: Ranges) -> int:
    return max((a[1] - a[0]) * (b[1] - b[0]) for a, b in zip(first, second, strict=True))


def _pair_ranges(factor: Factor, partner: Factor, world_size: int) -> tuple[Ranges, Ranges]:
    """Ranges of a factor with fewer units than ranks and of its partner: the factor over some ranks and nothing on
    the others, or over gcd(units, ranks) ranks with the partner over the rest, whichever leaves less on the busiest."""
    alone = spread(factor.units, world_size), ((0, partner.units),) * world_size
    parts = gcd(factor.units, world_size)
    stride = world_size // parts
    outer, inner = spread(factor.units, parts), spread(partner.units, stride)
    both = (
        tuple(outer[rank // stride] for rank in range(world_size)),
        tuple(inner[rank % stride] for rank in range(world_size)),
    )
    return both if _busiest(*both) < _busiest(*alone) else alone


def resolve(plan: Plan, world_size: int, ratios: Sequence[float] | None = None) -> ResolvedPlan:
    """Deal out the units of every factor to `world_size` ranks.

    Raises:
        PlanError: world_size below 1, or ratios that do not name every rank.
    """
    if world_size < 1:
        raise PlanError(f"world_size is {world_size}; at least 1 rank is needed")
    if ratios is not None and (len(ratios) != world_size or min(ratios) <= 0):
        raise PlanError(f"ratios {list(ratios)} must be {world_size} positive numbers, one a rank")
    cuts: dict[str, Ranges] = {}
    for name, factor in plan.factors.items():
        if name in cuts:
            continue
        if factor.partner is not None:
            partner = plan.factors[factor.partner]
            if factor.units < world_size:
                cuts[name], cuts[partner.name] = _pair_ranges(factor, partner, world_size)
                continue
            cuts[partner.name] = ((0, partner.units),) * world_size
        cuts[name] = spread(factor.units, world_size, ratios)
    return ResolvedPlan(plan, world_size, cuts)
