"""A plan applied in one process: the module becomes this rank's part of itself."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tensor_parallel.comm.process import ProcessGroup
from tensor_parallel.comm.process_exchange import Shared
from tensor_parallel.layout import local_shape
from tensor_parallel.plan import ResolvedPlan, TensorPlan
from tensor_parallel.shard.borders import RankView, compile_borders
from tensor_parallel.shard.classes import ClassTable
from tensor_parallel.shard.hand_rules import ruled_forward
from tensor_parallel.shard.joined import base_class
from tensor_parallel.shard.one_run import KnownDraws
from tensor_parallel.shard.pieces import cut_buffer, held_by, own_part
from tensor_parallel.shard.process import ProcessModule, ProcessShard, ProcessSlot, Randomness, SavingModule
from tensor_parallel.shard.shards import Adapter, Binding
from tensor_parallel.shard.sizes import localise_sizes
from tensor_parallel.shard.trees import NO_PLAN, check_splittable, forward_signature
from tensor_parallel.shard.watch import Watch


def _outside(module: nn.Module, slot: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own: ProcessSlot = slot
    return own.shards.call(module, own, args, kwargs)


def split_here(
    module: nn.Module,
    resolved: ResolvedPlan,
    group: ProcessGroup,
    adapters: Sequence[Adapter] = (),
    randomness: Randomness = lambda *_: nullcontext(),
) -> nn.Module:
    """Make `module` this rank's part of itself, in place, on the group's device.

    Raises:
        AlreadySplitError, PlanError, NotImplementedError: before anything is changed.
    """
    plans = check_splittable(module, resolved)
    shard = ProcessShard(resolved, group, adapters, randomness)
    _cut_parameters(module, plans, shard)
    _cut_buffers(module, plans, shard)
    _install(module, shard)
    shard.root = weakref.ref(module)
    module.__dict__["_tp_slot"].watch = Watch(module, resolved.plan.reads)
    return module


def _cut_parameters(module: nn.Module, plans: Mapping[int, TensorPlan], shard: ProcessShard) -> None:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((child, name))
    for parameter in list(module.parameters()):
        plan = plans[id(parameter)]
        own = own_part(parameter, plan, shard.resolved, shard.rank, shard.group.device)
        shared = _shared(own, plan, shard)
        if shared is not None:
            shard.shared.append(shared)
        for child, name in places[id(parameter)]:
            child._parameters[name] = own
            if shared is not None:
                flat = child if isinstance(child, nn.RNNBase) else None
                shard.places.append(Binding(child._parameters, name, len(shard.shared) - 1, flat))  # type: ignore[arg-type]
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.__dict__["_flat_weights"] = [child._parameters.get(n) for n in child._flat_weights_names]


def _shared(own: torch.Tensor, plan: TensorPlan, shard: ProcessShard) -> Shared | None:
    """How several ranks hold the same of a parameter; None where none do."""
    if not plan.is_cut:
        return Shared((own.numel(),), 0, not (plan.rank0_only and shard.rank))
    cuts = shard.resolved.cuts
    several = [ranks for ranks in held_by(plan, cuts, shard.group.size()) if len(ranks) > 1]
    if not several:
        return None
    sizes = [torch.Size(local_shape(plan.layout, cuts, ranks[0])).numel() for ranks in several]
    return Shared(tuple(sizes), next((i for i, ranks in enumerate(several) if shard.rank in ranks), None))


def _cut_buffers(module: nn.Module, plans: Mapping[int, TensorPlan], shard: ProcessShard) -> None:
    done: dict[int, torch.Tensor] = {}
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is None:
                continue
            plan, device = plans.get(id(buffer)), shard.group.device
            if id(buffer) not in done:
                cut = plan is not None and plan.is_cut
                own = cut_buffer(buffer, plan, shard.resolved, shard.rank, device) if cut else buffer.to(device)
                done[id(buffer)] = own
            child._buffers[name] = done[id(buffer)]


def _install(module: nn.Module, shard: ProcessShard) -> None:
    """Swap every module's class and give it its slot."""
    classes, saves = ClassTable(_outside), hasattr(module, "save_pretrained")
    view = RankView(shard.rank, shard.group, shard.resolved.cuts)
    for path, child in list(module.named_modules()):
        base = base_class(child)
        plan = shard.resolved.plan.modules.get(path, NO_PLAN)
        signature = forward_signature(base)
        own_class, forward = classes.of(base, plan, (SavingModule if path == "" and saves else ProcessModule,))
        slot = ProcessSlot(shard, path, ruled_forward(forward, plan, path, signature, shard.group))
        slot.inside = compile_borders(plan, child, signature, view, "inside")
        slot.outside = compile_borders(plan, child, signature, view, "outside")
        slot.around = compile_borders(plan, child, signature, view, "around")
        slot.draws = KnownDraws(plan.draws)
        by_call = (slot.inside, slot.outside, slot.around, slot.draws)
        shard.counted.extend(b for b in by_call if b is not None and b.by_call)
        child.__class__ = own_class
        child.__dict__["_tp_slot"] = slot
        localise_sizes(child, own_class, plan, shard.rank, shard.resolved.cuts, shard.rank_here)
