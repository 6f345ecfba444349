"""Dealing out what is whole, so as to level the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import accumulate
from math import prod

from torch import nn

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import Cuts, local_shape
from tensor_parallel.plan import Plan, TensorPlan, resolve
from tensor_parallel.plan.state_actions import FlatShard


@dataclass(frozen=True)
class ShardingManager:
    """What is sharded. parameters: their names in the unsplit model (of tied ones the first)."""

    parameters: tuple[str, ...]


def sharded_plan(plan: Plan, module: nn.Module, world_size: int, names: Sequence[str] | None = None) -> Plan:
    """The plan with parameters that are whole in it cut into flat pieces, one a rank.

    names: which; None: all of them.

    The pieces are dealt out so that the busiest rank holds as little as can be: those with smaller shares of what the
    plan cuts get more.

    Raises:
        PlanError: an unknown name, or one that the plan cuts already.
    """
    if world_size == 1:
        return plan
    keys = _chosen(plan, module, names)
    cuts = resolve(plan, world_size).cuts
    held = [0.0] * world_size
    for key, tensor in plan.tensors.items():
        if key not in keys and not tensor.is_buffer:
            for rank in range(world_size):
                held[rank] += _held(tensor, cuts, rank)
    quotas = _levelled(held, sum(plan.tensors[key].nbytes for key in keys))
    tensors = dict(plan.tensors)
    for key in keys:
        shape = plan.tensors[key].layout.shape
        action = FlatShard(_in_proportion(prod(shape), quotas), shape)
        tensors[key] = replace(plan.tensors[key], action=action, reason="")
    return replace(plan, tensors=tensors)


def _chosen(plan: Plan, module: nn.Module, names: Sequence[str] | None) -> list[str]:
    inside = {id(p) for m in module.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    key_of = {name: key for key, tensor in plan.tensors.items() for name in tensor.names if not tensor.is_buffer}
    whole = [
        key
        for key, tensor in plan.tensors.items()
        if not tensor.is_buffer
        and not tensor.is_cut
        and not tensor.rank0_only
        and tensor.nbytes
        and type(parameters[key]) is nn.Parameter
        and id(parameters[key]) not in inside
    ]
    if names is None:
        return whole
    found = []
    for name in names:
        if name not in key_of:
            near = get_close_matches(name, key_of, 3)
            raise PlanError(f"sharded_param_names: the model has no parameter {name!r}; the nearest are {near}")
        if key_of[name] not in whole:
            kept = plan.tensors[key_of[name]]
            why = "is cut by the plan already" if kept.is_cut else "cannot be sharded"
            raise PlanError(f"sharded_param_names: {name} {why}; leave it out")
        found.append(key_of[name])
    return list(dict.fromkeys(found))


def _held(tensor: TensorPlan, cuts: Cuts, rank: int) -> float:
    """Bytes of a tensor in a rank's modules: zeros and stand-ins lie there too."""
    elements = prod(tensor.layout.shape)
    if not tensor.layout.factors or not elements:
        return tensor.nbytes
    return tensor.nbytes / elements * prod(local_shape(tensor.layout, cuts, rank))


def _levelled(held: Sequence[float], total: float) -> list[float]:
    """How much of `total` each rank gets, so that the largest sum is the least: water finds its level."""
    order = sorted(range(len(held)), key=held.__getitem__)
    quotas, filled = [0.0] * len(held), 0.0
    for count in range(1, len(order) + 1):
        filled += held[order[count - 1]]
        level = (total + filled) / count
        if count == len(order) or level <= held[order[count]]:
            for rank in order[:count]:
                quotas[rank] = level - held[rank]
            break
    return quotas


def _in_proportion(count: int, quotas: Sequence[float]) -> tuple[int, ...]:
    total = sum(quotas) or 1.0
    ends = [round(count * end / total) for end in accumulate(quotas)]
    ends[-1] = count
    return tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
