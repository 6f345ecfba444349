"""A split model made ordinary again, in place: for changes that need whole tensors or a plan made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from tensor_parallel.errors import TensorParallelError
from tensor_parallel.shard.joined import base_class
from tensor_parallel.shard.loading import adopt_loaded
from tensor_parallel.shard.pieces import MARK, SplitTensor
from tensor_parallel.shard.shards import Leaves, ModelShards, shards_of, slot_of, survey_of

_T = TypeVar("_T")
_CHANGED = "its modules, parameters or settings were changed"
_WHOLE = "it was made whole (tp.whole_parameters, apply, resize_token_embeddings)"


def kinds_of(root: nn.Module) -> dict[str, Any]:
    """What a plan was made for: by name the class of every module, and of every parameter and buffer the shape and what
    it is tied to."""
    kinds: dict[str, Any] = {f"{name}()": base_class(module) for name, module in root.named_modules()}
    first: dict[int, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        kinds[name] = tuple(parameter.shape), first.setdefault(id(parameter), name)
    for name, buffer in root.named_buffers(remove_duplicate=False):
        kinds[name] = tuple(buffer.shape), first.setdefault(id(buffer), name)
    return kinds


def _is_stale(shards: ModelShards) -> bool:
    """Whether modules, parameters, cut buffers or callables that belong to them were assigned, moved or deleted since
    the split: the visible tree is the truth. Where the model is gone, what is left of it runs on as it was."""
    survey = survey_of(shards)
    return survey is not None and (shards.unmirrored or survey.is_stale() or shards.buffers_exchanged())


def _refuse_exchanged(shards: ModelShards) -> None:
    """Raise where parameters were put in place past the modules: they may be somebody else's, for one call."""
    for name, reference in shards.visible.items():
        module = reference()
        for own, parameter in module._parameters.items() if module is not None else ():
            if parameter is not None and id(parameter) not in shards.assigned:
                raise NotImplementedError(
                    f"parameter {own!r} of {name or 'the model'} was exchanged for the time of a call, as "
                    "torch.func.functional_call does: a split model cannot run with whole tensors in place of its "
                    "parts; assign parameters (module.weight = ...), or use the unsplit model"
                )


def joining_device(devices: Sequence[torch.device]) -> torch.device | None:
    """Where the whole model is put together: on the CPU where there are several devices, since it may fit none of them;
    None: where it is."""
    return torch.device("cpu") if len(set(devices)) > 1 else None


def join_in_place(shards: ModelShards, why: str) -> Leaves:
    """Give every visible module its own class and whole parameters and buffers back, each parameter the same object as
    before, on the CPU where the parts lie on several devices; the ranks end. Returns the other ranks' leaves, to be
    used again.

    why: what is being done, in words for who calls backward meanwhile.
    """
    leaves: Leaves = {}
    for graphs in (shards.team.graphs, *shards.earlier):
        graphs.outdated = why
    home = joining_device(shards.devices)
    modules = [module for reference in shards.visible.values() if (module := reference()) is not None]
    with torch.no_grad():
        for split in shards.tensors.values():
            first, *others = (piece.tensor for piece in split.pieces)
            leaves[id(first)] = {piece.ranks[0]: piece.tensor for piece in split.pieces[1:]}  # type: ignore[misc]
            if not split.plan.is_buffer and (split.is_cut or home is not None):
                gradient = split.whole_gradient(home)
                first.grad = None
                first.data = split.whole(home)
                first.grad = gradient
            for other in others if not split.plan.is_buffer else ():  # buffers are joined below, and dropped
                other.data, other.grad = other.data.new_empty(0), None
    buffers: dict[int, torch.Tensor] = {}
    for module in modules:
        _make_ordinary(module, shards, home, buffers)
    shards.retired = True
    shards.team.close()
    return leaves


def _make_ordinary(
    module: nn.Module, shards: ModelShards, home: torch.device | None, buffers: dict[int, torch.Tensor]
) -> None:
    """buffers: those that were made whole, by the id of rank 0's part: modules may share one."""
    for name in [name for name in module._parameters if MARK in name]:
        del module._parameters[name]
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        if id(buffer) not in buffers:
            key = shards.key_of.get(id(buffer))
            cut = key is not None and shards.tensors[key].is_cut
            whole = shards.tensors[key].whole(home) if cut and key is not None else buffer
            buffers[id(buffer)] = whole if home is None else whole.to(home)
        module._buffers[name] = buffers[id(buffer)]
    module.__class__ = base_class(module)
    for name in [name for name in module.__dict__ if name.startswith("_tp_")]:
        del module.__dict__[name]
    if isinstance(module, nn.RNNBase):
        module.__dict__["_flat_weights"] = [module._parameters.get(n) for n in module._flat_weights_names]


def _keep_graphs(shards: ModelShards, root: nn.Module) -> None:
    """After `root` was split again: what was made before may be gone through where all parts lie as they did."""
    now = shards_of(root)
    if all(_lies_as_before(split, now) for split in shards.tensors.values() if not split.plan.is_buffer):
        now.earlier = [shards.team.graphs, *shards.earlier]
        for graphs in now.earlier:
            graphs.outdated = ""


def _lies_as_before(split: SplitTensor, now: ModelShards) -> bool:
    if not split.is_cut and joining_device(now.devices) is None:  # it was left alone
        return True
    key = now.key_of.get(id(split.pieces[0].tensor))
    if key is None:
        return False
    return now.tensors[key].lies_as(split)


def follow_changes(shards: ModelShards) -> bool:
    """Under the model's lock: whether `shards` is what the model is. If not, it is after this: what was changed is
    followed by joining the model and splitting it again, by the same plan where it still fits.

    Raises:
        TensorParallelError: the model's root was deleted.
    """
    if shards.retired:
        return False
    if shards.empty:
        adopt_loaded(shards)
    routes = shards.routes
    differences = routes.differences() if routes.stale() else []
    if not differences and shards.pending is None and not _is_stale(shards):
        return True
    root = shards.visible[""]()
    if root is None or shards.again is None:
        raise TensorParallelError("the split model that this module belonged to was deleted; split it again")
    _refuse_exchanged(shards)
    again = shards.again
    with _own_forwards(root):
        _in_fresh_thread(lambda: again(root, join_in_place(shards, _CHANGED), differences, shards.pending))
    _keep_graphs(shards, root)
    return False


@contextmanager
def _own_forwards(root: nn.Module) -> Iterator[None]:
    """Without the forwards patched onto instances, which are user code and stay where they were put."""
    patched = [(m, m.__dict__.pop("forward")) for m in root.modules() if "forward" in m.__dict__]
    try:
        yield
    finally:
        for module, forward in patched:
            module.__dict__["forward"] = forward


def _in_fresh_thread(work: Callable[[], _T]) -> _T:
    """Run `work` without the caller's modes (autocast, inference mode, saved-tensor hooks, function modes): parameters
    and plans are for other calls too than the one that is about to be made."""
    with ThreadPoolExecutor(1, "planning") as thread:
        return thread.submit(work).result()


def follow_if_idle(module: nn.Module) -> None:
    """Follow changes of the model that `module` belongs to, unless something runs on it."""
    slot = slot_of(module)
    if slot is None or slot.rank or slot.rank_here() is not None:
        return
    shards = slot.shards
    if not shards.team.acts_as_caller() and shards.lock.acquire(blocking=False):
        try:
            follow_changes(shards)
        finally:
            shards.lock.release()


def up_to_date(model: nn.Module) -> ModelShards:
    """The data of a split model after its changes were followed.

    Raises:
        TensorParallelError: it is not split.
    """
    shards = shards_of(model)
    if not shards.team.acts_as_caller() and shards.team.rank_here() is None:
        with shards.lock:
            follow_changes(shards)
    return shards_of(model)


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Within it the model that `model` belongs to is the ordinary, unsplit one: its own classes, whole parameters and
    gradients, each parameter the same object as before, so that whatever reads, writes or exchanges weights and modules
    may be done. At its end, also after an error, the model is split again: by the same plan, or by one made anew where
    modules or shapes have changed. It takes the memory of the whole model, in the host where there are several devices.
    A model that is not split is left as it is.

    Raises:
        TensorParallelError: a rank runs in this thread.
    """
    slot = slot_of(model)
    if slot is None:
        yield
        return
    shards = shards_of(model)
    if slot.rank_here() is not None or slot.rank or shards.team.acts_as_caller():
        raise TensorParallelError("whole_parameters within a forward of the model: the ranks are using their parts")
    root = shards.visible[""]()
    if root is None or shards.again is None:
        raise TensorParallelError("the split model that this module belonged to was deleted; split it again")
    with shards.lock:
        again, routes = shards.again, shards.routes
        differences, before = routes.differences(), routes.snapshot(root)
        leaves = _in_fresh_thread(lambda: join_in_place(shards, _WHOLE))
    try:
        yield
    finally:
        with shards.lock, _own_forwards(root):
            found = [*differences, *routes.since(root, before)]
            _in_fresh_thread(lambda: again(root, leaves, found, shards.pending))
            _keep_graphs(shards, root)
