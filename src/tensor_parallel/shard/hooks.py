"""User code at modules inside a split model: hooks of every kind, and forwards patched onto an instance.

Where a module has any, its call in the ranks becomes a call from outside in the middle of the run: what comes in is
made whole, rank 0 calls the module as the caller would, with torch's own order of hooks, while the other ranks serve;
what it gives is handed round, and cut as the plan has it. So user code sees whole tensors, once, and may return others;
in backward it sees whole gradients, since only rank 0's tensors lead on.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from tensor_parallel.errors import PlanError
from tensor_parallel.own_hooks import is_own, is_recorder
from tensor_parallel.plan import ModulePlan
from tensor_parallel.shard.one_run import Counterparts
from tensor_parallel.shard.shards import ModelShards, Slot, survey_of
from tensor_parallel.shard.values import leaves, map_leaves


def has_user_code(module: nn.Module) -> bool:
    """Whether user code stands at the module."""
    if "forward" in module.__dict__ or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not is_recorder(hook) and not is_own(hook) for hook in hooks)


def watch(shards: ModelShards, spare: bool) -> None:
    """Find the modules at which whole values are wanted, before a run: every rank must take the same way through them.

    spare: what modules give beside what others read is wanted too.
    """
    everywhere = torch_modules._has_any_global_hook()  # type: ignore[no-untyped-call]
    survey = survey_of(shards)
    if survey is not None and not survey.hooks_changed(everywhere, spare):
        return
    found = set(shards.spare) if spare else set()
    for name, reference in shards.visible.items():
        module = reference()
        if module is not None and name and (everywhere or has_user_code(module)):
            found.add(name)
    if found == shards.watched:
        return
    for name in found ^ shards.watched:
        for rank in range(shards.world_size):
            shards.module(rank, name).__dict__["_tp_slot"].watched = name in found
    shards.watched = found


def run_own_hooks(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run the pre-hooks that are a part of the module; its arguments as they leave them."""
    for hook in module._forward_pre_hooks.values():
        if is_own(hook):
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    return args


def call_watched(module: nn.Module, slot: Slot, args: Any, kwargs: Any) -> Any:
    """One rank's call of a module at which user code, or a recorder that is switched on, sees whole values."""
    shards, rank = slot.shards, slot.rank
    if shards.by_hand:
        _refuse_parts(slot, (args, kwargs))
    if slot.around is not None:
        args, kwargs, _ = slot.around.enter(args, kwargs)

    def as_caller(others: list[dict[Any, Any]]) -> tuple[Any, Counterparts]:
        with shards.run.showing(slot.name, _same_places(others)) as counterparts:
            return module(*args, **kwargs), counterparts

    result, counterparts = shards.team.as_caller(rank, as_caller, opaque((args, kwargs)))
    result = _own_result(result, counterparts, shards, rank)
    if rank:
        record(module, args, kwargs, result)
    if slot.around is None:
        return result
    if isinstance(result, Mapping) or dataclasses.is_dataclass(result):
        result = copy.copy(result)  # the user's code may have kept it, and what is cut below is for this rank
    return slot.around.leave(result, None)


def _refuse_parts(slot: Slot, given: Any) -> None:
    """Raise PlanError where rules by hand leave a part on each rank of what a module with user code gets: nobody knows
    how to make it whole."""
    group = slot.shards.team.groups[slot.rank]
    first = dict(leaves(group.broadcast_object(given)))
    for path, tensor in leaves(given):
        if isinstance(tensor, torch.Tensor) and not _alike(first[path].detach(), tensor.detach()):
            raise PlanError(
                f"{slot.name} has a hook or a patched forward, and what it gets is not the same on all ranks: the "
                "rules of the tp.Config leave a part of it on each; put the hook at a module that gets whole tensors, "
                "or leave the rules out: a plan that is found by itself shows hooks whole tensors everywhere"
            )


def spare_modules(modules: Mapping[str, ModulePlan]) -> frozenset[str]:
    """The innermost modules with spare outputs, by name."""
    found = sorted(name for name, plan in modules.items() if name and any(b.spare for b in plan.outputs))
    return frozenset(name for name in found if not any(other.startswith(f"{name}.") for other in found))


_NOT_PLANNED = (
    'the plan was not made for this call. For attention weights load the model with attn_implementation="eager" before '
    "the split; where that is not enough, split with example_inputs that take this path, such as "
    "{'input_ids': ids, 'output_attentions': True}"
)
BY_HAND = (
    "the rules of the tp.Config leave a part of it on each rank. An output rule ('gather DIM' or 'sum') at this module "
    "or at the one around it that is called, makes it whole"
)


def check_replicas(name: str, outputs: Sequence[Any], why: str = _NOT_PLANNED) -> None:
    """Raise PlanError where the ranks' outputs differ that should be the same: rank 0's part would be taken for the
    whole."""
    others = [dict(leaves(output)) for output in outputs[1:]]
    for path, tensor in leaves(outputs[0]):
        if not isinstance(tensor, torch.Tensor):
            continue
        for other in others:
            twin = other.get(path)
            if not isinstance(twin, torch.Tensor) or not _alike(tensor.detach(), twin.detach()):
                where = ".".join(map(str, path)) or "itself"
                raise PlanError(f"the output {where} of {name or 'the model'} is not the same on all ranks: {why}")


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    second = second.to(first.device)
    if not first.is_floating_point():
        return bool((first == second).all())
    return torch.allclose(first.float(), second.float(), rtol=1e-2, atol=1e-3, equal_nan=True)


def opaque(value: Any) -> dict[Any, Any]:
    """What is no tensor and no plain value, by place: each rank has its own (a cache made in the forward)."""
    plain = (torch.Tensor, str, int, float, bool, type(None))
    return {path: leaf for path, leaf in leaves(value) if not isinstance(leaf, plain)}


def _same_places(found: list[dict[Any, Any]]) -> Iterator[list[Any]]:
    for path in found[0]:
        if all(path in other for other in found[1:]):
            yield [other[path] for other in found]


def note_outputs(outputs: list[Any], counterparts: Counterparts) -> None:
    """Remember which objects in the ranks' outputs belong together."""
    for same in _same_places([opaque(output) for output in outputs]):
        counterparts.setdefault(id(same[0]), same)


def _own_result(result: Any, counterparts: Counterparts, shards: ModelShards, rank: int) -> Any:
    """Rank 0's result as this rank's: tensors handed round by one node, objects exchanged for the rank's own."""
    tensors = {id(leaf): leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor)}
    given = shards.team.groups[rank].broadcast_tensors(list(tensors.values()))
    if rank == 0:
        return result
    own = dict(zip(tensors, given, strict=True))

    def exchange(leaf: Any) -> Any:
        if id(leaf) in own:
            return own[id(leaf)]
        same = counterparts.get(id(leaf))
        return leaf if same is None else same[rank]

    return map_leaves(result, exchange, anew=True)


def record(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    """Let the recorders on a rank's own tree see a call."""
    for key, hook in module._forward_hooks.items():
        if is_recorder(hook):
            with_kwargs = key in module._forward_hooks_with_kwargs
            _ = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
