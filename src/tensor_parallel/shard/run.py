"""One call from outside: the module on all ranks, whole tensors in and out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tensor_parallel.comm.joint import copy_to_ranks
from tensor_parallel.shard.assembly import saving_references
from tensor_parallel.shard.borders import cross
from tensor_parallel.shard.hooks import BY_HAND, check_replicas, note_outputs, run_own_hooks, watch
from tensor_parallel.shard.loading import finish_loading
from tensor_parallel.shard.memory import explain_if_out_of_memory
from tensor_parallel.shard.regions import handled, random_states
from tensor_parallel.shard.shards import ModelShards, Slot
from tensor_parallel.shard.tail import Done, follow_plain_attributes
from tensor_parallel.shard.transforms import refuse_proxy, refuse_transforms
from tensor_parallel.shard.unsplit import follow_changes
from tensor_parallel.shard.values import distinct_leaves, map_leaves


def run_on_all(module: nn.Module, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `module` on every rank; rank 0's output, on the model's output device.

    Raises:
        RuntimeError: a hidden rank's module is called outside its rank.
    """
    if slot.rank:
        raise RuntimeError(
            f"{slot.name or 'the model'} on rank {slot.rank} was called outside its rank, by code that the model's "
            "forward keeps for later (a thread of its own, a hook on a tensor); such code can only use rank 0's modules"
        )
    shards = slot.shards
    refuse_transforms(slot.name)
    name = slot.name
    spare = any([adapter.asks_for_spare(module, kwargs) for adapter in shards.adapters])
    within = shards.team.acts_as_caller()
    if within:
        outputs = _run_within(shards, name, spread_inputs((args, kwargs), shards))
    else:
        with shards.lock:
            current = follow_changes(shards)
            if shards.empty and not shards.retired:
                finish_loading(shards)
            if current:
                inputs = spread_inputs((args, kwargs), shards)
                with shards.running():
                    outputs = _run_prepared(shards, name, inputs, spare)
        if not current:
            return type(module).forward(module, *args, **kwargs)
    if spare or (shards.by_hand and name not in shards.proven):
        check_replicas(name, outputs, *([BY_HAND] if shards.by_hand else []))
        shards.proven.add(name)
    if outputs[-1] is not None:
        for adapter in shards.adapters:
            adapter.adopt(outputs, shards)
    return outputs[0] if within else to_output_device(outputs[0], shards)


def _run_prepared(shards: ModelShards, name: str, inputs: list[Any], spare: bool) -> list[Any]:
    copies = shards.prepare()
    watch(shards, spare)
    ends_alone = shards.has_tail and name == "" and not spare and not shards.watched

    def work(rank: int) -> Any:
        own = shards.module(rank, name)
        own_args, own_kwargs = inputs[rank]
        with shards.bound(rank, copies), saving_references(shards, rank), handled(shards, rank):
            output = enter(own, own.__dict__["_tp_slot"], own_args, own_kwargs)
        shards.team.groups[rank].release()
        return output

    try:
        return _run_with_tail(shards, work) if ends_alone else _run(shards, name, work)
    except Exception as error:
        explain_if_out_of_memory(error, shards, "in a forward")
        raise
    finally:
        shards.note_buffers()
        shards.routes.settle()


def _run_with_tail(shards: ModelShards, work: Callable[[int], Any]) -> list[Any]:
    def until_done(rank: int) -> Any:
        try:
            return work(rank)
        except Done:
            return None

    shards.run.ends_alone = True
    outputs = _run(shards, "", until_done)
    for adapter in shards.adapters:
        adapter.adopt(shards.run.given, shards)
    root = shards.module(0, "")
    follow_plain_attributes(root, shards.hidden)
    shards.forget_buffers(root._buffers)
    return outputs


def _run_within(shards: ModelShards, name: str, inputs: list[Any]) -> list[Any]:
    """A run that user code inside a run asked for: everything is in place already."""
    own_call = shards.run.is_own_call(name)

    def work(rank: int) -> Any:
        module = shards.module(rank, name)
        own_args, own_kwargs = inputs[rank]
        with nullcontext() if own_call else shards.counting_from(rank):
            return enter(module, module.__dict__["_tp_slot"], own_args, own_kwargs)

    outputs = _run(shards, name, work)
    if own_call:
        check_replicas(name, outputs)
    if shards.run.counterparts is not None:
        note_outputs(outputs, shards.run.counterparts)
    return outputs


def _run(shards: ModelShards, name: str, work: Callable[[int], Any]) -> list[Any]:
    """Random calls are made together in training, and elsewhere where the module's first call was seen to make some: it
    costs a tenth of a decoding step."""
    if shards.world_size == 1:
        return shards.team.run(work)
    if shards.is_training():
        return shards.team.run(work, joint_random=shards.run.draw_layout)
    known = shards.seen_drawing.get(name)
    if known is not None:
        return shards.team.run(work, joint_random=shards.run.draw_layout if known else False)
    before = random_states(shards.devices)
    outputs = shards.team.run(work, joint_random=shards.run.draw_layout)
    after = random_states(shards.devices)
    shards.seen_drawing[name] = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return outputs


def enter(module: nn.Module, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A rank's part of a call from outside: hooks have run in the caller, whole tensors come and go."""
    if slot.rank and module._forward_pre_hooks:
        args = run_own_hooks(module, args)
    return cross(slot.outside, slot.own_forward, module, args, kwargs)


def spread_inputs(value: Any, shards: ModelShards) -> list[Any]:
    """`value` for each rank: tensors on the rank's device and its own (a forward may write into them), one tensor that
    is given twice staying one. What requires gradients is copied by one joint node, so the caller gets them all."""
    own: dict[int, list[Any]] = {}
    known = shards.run.counterparts if shards.team.acts_as_caller() else None
    differentiable: dict[int, torch.Tensor] = {}
    for marker, leaf in distinct_leaves(value).items():
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad and torch.is_grad_enabled():
                differentiable[marker] = leaf
            else:
                own[marker] = _copies(leaf, shards.devices)
        elif known is not None and marker in known:
            own[marker] = known[marker]
        elif not isinstance(leaf, (str, int, float, type(None))):
            refuse_proxy(leaf)
            for adapter in shards.adapters:
                found = adapter.localise(leaf, shards)
                if found is not None:
                    own[marker] = found
                    break
    ranks = range(shards.world_size)
    if differentiable:
        first = [tensor.to(shards.devices[0]) for tensor in differentiable.values()]
        wanted = [ranks] * len(first)
        copies = copy_to_ranks(first, wanted, shards.devices, apart=True, owner=shards.team.owner)
        for marker, tensor, made in zip(differentiable, first, copies, strict=True):
            own[marker] = [tensor, *(made[rank] for rank in ranks[1:])]
    return [_exchanged(value, {marker: by_rank[rank] for marker, by_rank in own.items()}) for rank in ranks]


def _exchanged(value: Any, table: dict[int, Any]) -> Any:
    return map_leaves(value, lambda leaf: table.get(id(leaf), leaf))


def _copies(tensor: torch.Tensor, devices: tuple[torch.device, ...]) -> list[torch.Tensor]:
    first, *others = devices
    return [tensor.to(first), *(tensor.detach().to(device, copy=True) for device in others)]


def to_output_device(output: Any, shards: ModelShards) -> Any:
    """`output` with its tensors on the model's output device."""
    device = shards.output_device
    if device == shards.devices[0]:
        return output
    return map_leaves(output, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
