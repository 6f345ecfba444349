"""A plan applied: one module becomes rank 0's tree, with hidden trees for the other ranks."""

from __future__ import annotations

import copy
import inspect
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tensor_parallel.errors import AlreadySplitError, PlanError, SplitError
from tensor_parallel.own_hooks import is_own, is_recorder
from tensor_parallel.plan import ModulePlan, ResolvedPlan, TensorPlan
from tensor_parallel.shard.assembly import assembled_names, letting_go
from tensor_parallel.shard.borders import RankView, compile_borders
from tensor_parallel.shard.classes import ClassTable
from tensor_parallel.shard.hand_rules import ruled_forward
from tensor_parallel.shard.hooks import spare_modules
from tensor_parallel.shard.joined import base_class
from tensor_parallel.shard.loading import empty_tensors
from tensor_parallel.shard.memory import explain_if_out_of_memory, explaining_backward
from tensor_parallel.shard.module import SplitModule
from tensor_parallel.shard.pieces import MARK, Piece, SplitTensor, check_tensor, cut_buffer, cut_parameter, moved
from tensor_parallel.shard.routes import Routes
from tensor_parallel.shard.run import run_on_all
from tensor_parallel.shard.shards import (
    Binding,
    BufferWatch,
    CutBuffer,
    Leaves,
    ModelShards,
    SharedLeaf,
    Slot,
    slot_of,
)
from tensor_parallel.shard.sizes import localise_sizes
from tensor_parallel.shard.survey import Survey
from tensor_parallel.shard.tail import Tail
from tensor_parallel.shard.team import Team

NO_PLAN = ModulePlan()


def check_splittable(module: nn.Module, resolved: ResolvedPlan) -> dict[int, TensorPlan]:
    """The plan of each tensor of `module`, by id; nothing is changed.

    Raises:
        AlreadySplitError: a part of the module is split already.
        PlanError: the plan does not fit the module.
        NotImplementedError: the module is of a kind that cannot be split yet.
    """
    modules = dict(module.named_modules())
    for name, child in modules.items():
        _check_kind(name or "the model", child)
    for name in resolved.plan.modules:
        if name not in modules:
            raise PlanError(f"the plan names module {name!r}, which the model does not have; make a plan of this model")
    plans: dict[int, TensorPlan] = {}
    for plan in resolved.plan.tensors.values():
        for name in plan.names:
            tensor = _find(module, name)
            if tensor is None:
                raise PlanError(f"the plan names {name!r}, which the model does not have; make a plan of this model")
            if id(tensor) not in plans:
                check_tensor(plan, resolved, tensor)
                plans[id(tensor)] = plan
            elif plans[id(tensor)] is not plan:
                raise PlanError(f"{name} and {plans[id(tensor)].names[0]} are one tensor with two plans")
    for name, parameter in module.named_parameters():
        if id(parameter) not in plans:
            raise PlanError(f"the plan says nothing of {name}; make a plan of this model")
        if MARK in name:
            raise PlanError(f"{name}: names with {MARK} are kept for the parts of split parameters")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise NotImplementedError(f"{name} has no shape yet; run the lazy module once before splitting it")
    return plans


def _check_kind(name: str, module: nn.Module) -> None:
    if slot_of(module) is not None:
        raise AlreadySplitError(f"{name} ({type(module).__name__}) is split already; split the whole model once")
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError(f"{name} is a ScriptModule; split the Python module instead")
    if "forward" in module.__dict__:
        raise NotImplementedError(
            f"{name} has its forward patched on the instance, as accelerate's hooks do; split it first"
        )


def _find(module: nn.Module, name: str) -> torch.Tensor | None:
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    found = owner._parameters.get(last)
    return found if found is not None else owner._buffers.get(last)


def split_module(
    module: nn.Module,
    resolved: ResolvedPlan,
    devices: Sequence[torch.device],
    make_team: Callable[[], Team],
    *,
    output_device: torch.device | None = None,
    mixins: tuple[type, ...] = (SplitModule,),
    leaves: Leaves | None = None,
) -> ModelShards:
    """Split `module` over `devices`, in place: it becomes rank 0's tree.

    Everything is checked and copied that can be before the first parameter is cut. `mixins` are the first bases of the
    root's new class. leaves: of the other ranks, to be used again.

    Raises:
        SplitError: cutting failed; the module is used up and its parameters are freed.
    """
    plans = check_splittable(module, resolved)
    device = devices[0] if output_device is None else output_device
    shards = ModelShards(resolved, tuple(devices), make_team(), device)
    team = shards.team
    team.owner.on_out_of_memory = explaining_backward(shards)
    try:
        for rank in range(1, len(devices)):
            shards.hidden.append(_hidden_tree(module, plans, resolved, rank, devices[rank]))
    except Exception as error:  # nothing was changed yet
        explain_if_out_of_memory(error, shards, "while the model was being split", module)
        team.close()
        raise
    shards.peers = [{}, *(dict(tree.named_modules()) for tree in shards.hidden)]
    try:
        return _apply_plan(module, plans, shards, mixins, leaves or {})
    except Exception as error:
        explain_if_out_of_memory(error, shards, "while the model was being split", module)
        del shards
        for parameter in module.parameters():
            parameter.data, parameter.grad = torch.empty(0), None
        team.close()
        # The error's frames hold the pieces that were cut; whoever keeps the error must not keep those.
        traceback.clear_frames(error.__traceback__)
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if "\n" not in note)
        raise SplitError(
            f"splitting {type(module).__name__} failed: {error}{where}; the module is used up (its parameters are "
            "empty now) and the devices are free again: build or load the model anew"
        ) from error


def _apply_plan(
    module: nn.Module,
    plans: Mapping[int, TensorPlan],
    shards: ModelShards,
    mixins: tuple[type, ...],
    leaves: Leaves,
) -> ModelShards:
    _cut_all(module, plans, shards, leaves)
    _install(module, shards, mixins)
    return shards


def _hidden_tree(
    module: nn.Module, plans: Mapping[int, TensorPlan], resolved: ResolvedPlan, rank: int, device: torch.device
) -> nn.Module:
    """A copy of the tree for `rank`: parameters are still the model's own, buffers are its own, configs are shared."""
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    for child in module.modules():
        for buffer in child._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = cut_buffer(buffer, plans.get(id(buffer)), resolved, rank, device)
        for name, value in child.__dict__.items():
            if "config" in name and not name.startswith("_tp_") and hasattr(value, "__dict__"):
                memo[id(value)] = value
    tree = copy.deepcopy(module, memo)
    for child in tree.modules():
        _drop_hooks(child)
    return tree


def _drop_hooks(module: nn.Module) -> None:
    """User hooks run once, on rank 0; what torch's old weight_norm and spectral_norm hook in belongs to the module."""
    forward = module._forward_hooks, module._forward_pre_hooks
    holders: Any = (*forward, module._backward_hooks, module._backward_pre_hooks)
    for holder in holders:
        for key, hook in list(holder.items()):
            if not is_recorder(hook) and not is_own(hook):
                del holder[key]


def _cut_all(module: nn.Module, plans: Mapping[int, TensorPlan], shards: ModelShards, leaves: Leaves) -> None:
    """Cut the parameters one by one, and give each rank's tree what it holds."""
    names: dict[int, list[tuple[str, str]]] = {}
    modules = dict(module.named_modules())
    for path, child in modules.items():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append((path, name))
    for parameter in list(module.parameters()):
        plan = plans[id(parameter)]
        split, at_rest = cut_parameter(parameter, plan, shards.resolved, shards.devices, leaves.get(id(parameter), {}))
        shards.tensors[plan.names[0]] = split
        shards.key_of[id(split.pieces[0].tensor)] = plan.names[0]
        for rank in range(shards.world_size):
            tree = modules if rank == 0 else shards.peers[rank]
            for path, name in names[id(parameter)]:
                tree[path]._parameters[name] = at_rest[rank]  # type: ignore[assignment]
        _share(split, shards)
    for tree in (modules, *shards.peers[1:]):
        for peer in tree.values():
            if isinstance(peer, nn.RNNBase):
                peer.__dict__["_flat_weights"] = [peer._parameters.get(n) for n in peer._flat_weights_names]
    _cut_buffers(module, plans, shards)
    _bind(shards)


def _share(split: SplitTensor, shards: ModelShards) -> None:
    for piece in split.pieces:
        if len(piece.ranks) > 1:
            one_device = len({shards.devices[rank] for rank in piece.ranks}) == 1
            shards.shared.append(SharedLeaf(piece.tensor, piece.ranks, one_device))


def _cut_buffers(module: nn.Module, plans: Mapping[int, TensorPlan], shards: ModelShards) -> None:
    done: dict[int, torch.Tensor] = {}
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None:
                continue
            plan = plans.get(id(buffer))
            if id(buffer) not in done:
                done[id(buffer)] = _own_buffer(buffer, plan, shards)
            own = child._buffers[name] = done[id(buffer)]
            others = [shards.peers[rank][path]._buffers for rank in range(1, shards.world_size)]
            if plan is None or not plan.is_cut:
                shards.buffers.append(BufferWatch(child._buffers, name, others))
                continue
            shards.cut_buffers.append(CutBuffer(plan.names[0], [child._buffers, *others], name))
            if plan.names[0] not in shards.tensors:
                held = [own, *(other[name] for other in others)]
                pieces = [Piece((rank,), tensor) for rank, tensor in enumerate(held) if tensor is not None]
                shards.tensors[plan.names[0]] = SplitTensor(plan, pieces, shards.resolved.cuts, shards.world_size)
                shards.key_of[id(own)] = plan.names[0]


def _own_buffer(buffer: torch.Tensor, plan: TensorPlan | None, shards: ModelShards) -> torch.Tensor:
    if plan is None or not plan.is_cut:
        return buffer if buffer.is_meta else moved(buffer, 0, shards.devices[0])
    return cut_buffer(buffer, plan, shards.resolved, 0, shards.devices[0])


def _bind(shards: ModelShards) -> None:
    """Find where each rank's tree holds a leaf that another rank owns."""
    index = {id(shared.leaf): i for i, shared in enumerate(shards.shared)}
    shards.bindings = [[]]
    for rank in range(1, shards.world_size):
        found = []
        for peer in shards.peers[rank].values():
            flat = peer if isinstance(peer, nn.RNNBase) else None
            for name, tensor in peer._parameters.items():
                at = index.get(id(tensor))
                if at is not None and shards.shared[at].ranks[0] != rank:
                    found.append(Binding(peer._parameters, name, at, flat))  # type: ignore[arg-type]
        shards.bindings.append(found)


def _register_parts(child: nn.Module, shards: ModelShards) -> None:
    """Put the other ranks' leaves beside rank 0's, right after it."""
    items: dict[str, Any] = {}
    for name, parameter in child._parameters.items():
        items[name] = parameter
        key = shards.key_of.get(id(parameter))
        for piece in shards.tensors[key].pieces[1:] if key is not None else ():
            items[f"{name}{MARK}{piece.ranks[0]}"] = piece.tensor
    child._parameters.clear()
    child._parameters.update(items)


def _install(module: nn.Module, shards: ModelShards, mixins: tuple[type, ...]) -> None:
    """Swap every module's class and give it its slot."""
    shards.borders_by_call = [[] for _ in shards.devices]
    shards.by_hand = any(plan.rules for plan in shards.resolved.plan.modules.values())
    shards.spare = spare_modules(shards.resolved.plan.modules)
    outputs = [boundary.path for plan in shards.resolved.plan.modules.values() for boundary in plan.outputs]
    shards.gathered = frozenset(path.partition(".")[0] for path in outputs if path and not path[0].isdigit())
    shards.has_tail = shards.world_size > 1 and any(plan.last for plan in shards.resolved.plan.modules.values())
    tail = Tail(shards) if shards.has_tail else None
    called_by_root = set(shards.resolved.plan.modules.get("", NO_PLAN).calls)
    classes = ClassTable(run_on_all)
    for path, child in list(module.named_modules()):
        base, assembled = base_class(child), assembled_names(child, shards)
        shards.assembles = shards.assembles or bool(assembled)
        plan = shards.resolved.plan.modules.get(path, NO_PLAN)
        signature = forward_signature(base)
        bases = mixins if path == "" else (SplitModule,)
        own_class, forward = classes.of(base, plan, bases, assembles=bool(assembled))
        shards.visible[path] = weakref.ref(child)
        for rank, own in enumerate([child, *(shards.peers[r][path] for r in range(1, shards.world_size))]):
            slot = Slot(shards, rank, path, forward)
            if assembled:
                slot.assembled, slot.own_forward = assembled, letting_go(slot.own_forward)
            slot.own_forward = ruled_forward(slot.own_forward, plan, path, signature, shards.team.groups[rank])
            view = RankView(rank, shards.team.groups[rank], shards.resolved.cuts)
            last = tail.exit if tail is not None and plan.last else None
            slot.inside = compile_borders(plan, own, signature, view, "inside", last)
            if tail is not None and path in called_by_root:
                slot.own_forward = tail.noting(rank, slot.own_forward)
            slot.outside = compile_borders(plan, own, signature, view, "outside")
            slot.draws = {draw.index: draw for draw in plan.draws}
            slot.around = compile_borders(plan, own, signature, view, "around")
            by_call = [b for b in (slot.inside, slot.outside, slot.around) if b is not None and b.by_call]
            shards.borders_by_call[rank].extend(by_call)
            own.__class__ = own_class
            own.__dict__["_tp_slot"] = slot
            localise_sizes(own, own_class, plan, rank, shards.resolved.cuts, shards.team.rank_here)
        _register_parts(child, shards)
        shards.assigned.update(map(id, child._parameters.values()))
    module.__dict__["_tp_slot"].survey = Survey(module)
    shards.empty = bool(empty_tensors(shards))
    shards.routes = Routes(module, shards.resolved.plan.reads)


def forward_signature(base: type[nn.Module]) -> inspect.Signature:
    """The forward's signature without its self."""
    found = inspect.signature(base.forward)
    return found.replace(parameters=list(found.parameters.values())[1:])


def named_tensors(shards: ModelShards) -> Iterator[tuple[str, SplitTensor]]:
    """(key, tensor) of every parameter, in the unsplit model's own order."""
    for key, split in shards.tensors.items():
        if not split.plan.is_buffer:
            yield key, split
