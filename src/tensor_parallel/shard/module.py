"""The class of every module of a split model: the module's own class, with what a rank does at its border."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, Self

import torch
from torch import nn

from tensor_parallel.errors import DeviceError, PlanError
from tensor_parallel.shard.classes import Swapped
from tensor_parallel.shard.hooks import call_watched, record, run_own_hooks
from tensor_parallel.shard.joined import itself, joined_copy
from tensor_parallel.shard.shards import Slot
from tensor_parallel.shard.state_dict import load_whole, save_whole
from tensor_parallel.shard.unsplit import follow_if_idle, whole_parameters

_SCALARS = (bool, int, float, str, type(None))


class SplitModule(Swapped):
    """First base of every class made for a split model's modules. One call has two callers: from outside, the module
    runs on all ranks with whole tensors in and out; from a rank, it is that rank's own."""

    _tp_slot: Slot

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        slot = self._tp_slot
        rank = slot.rank_here()
        if rank is None:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if rank != slot.rank:
            return slot.shards.module(rank, slot.name)(*args, **kwargs)
        recording = slot.shards.records(self) if self._forward_hooks else ""
        if slot.watched or recording == "whole":
            return call_watched(self, slot, args, kwargs)
        if self._forward_pre_hooks:
            args = run_own_hooks(self, args)
        borders = slot.inside
        if borders is None:
            output = slot.own_forward(self, *args, **kwargs)
        else:
            changed, keywords, elsewhere = borders.enter(args, kwargs)
            output = borders.leave(slot.own_forward(self, *changed, **keywords), elsewhere)
        if recording:
            record(self, args, kwargs, output)
        return output

    def __setattr__(self, name: str, value: Any) -> None:
        slot = self.__dict__.get("_tp_slot")
        if slot is None or slot.rank or slot.loading or slot.rank_here() is not None:
            super().__setattr__(name, value)
            return
        _refuse_local_size(self, slot, name, value)
        _note_route(self, slot, name, value)
        super().__setattr__(name, value)
        # Modules and parameters are followed at the next run (see unsplit.py), buffers too (BufferWatch).
        if name in self._modules or name in self._parameters or name in self._buffers:
            return
        if name == "training":
            slot.shards.training = None
        for peer in slot.peers():
            if name in peer._parameters or name in peer._modules or name in peer._buffers:
                continue  # the name of something deleted: the model is split again at the next run
            if isinstance(value, torch.Tensor):
                device = slot.shards.devices[peer.__dict__["_tp_slot"].rank]
                setattr(peer, name, value if value.requires_grad else value.to(device, copy=True))
            elif not callable(value) or isinstance(value, type) or _is_free_function(value):
                setattr(peer, name, value)
            elif name != "forward":  # it may belong to modules or tensors of rank 0; patched forwards are user code
                slot.shards.unmirrored = True

    def __delattr__(self, name: str) -> None:
        slot = self.__dict__.get("_tp_slot")
        if name not in self.__dict__ or slot is None or slot.rank or slot.rank_here() is not None:
            super().__delattr__(name)
            return
        _note_route(self, slot, name, getattr(type(self), name, None))
        super().__delattr__(name)
        for peer in slot.peers():
            if name in peer.__dict__:
                delattr(peer, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        slot = self.__dict__.get("_tp_slot")
        if slot is not None and slot.rank == 0 and param is not None:
            slot.shards.assigned.add(id(param))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, after changes were followed: an optimiser made now must find the parts of what is new."""
        follow_if_idle(self)
        return super().named_parameters(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """As of the unsplit model: `fn` sees and writes whole tensors (see `tp.whole_parameters`)."""
        with whole_parameters(self):
            nn.Module.apply(self, fn)
        return self

    # State

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._tp_slot.shards.joining():
            return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, keep_vars)
        save_whole(self, self._tp_slot, own, prefix, keep_vars)
        destination.update(own)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        with load_whole(self, self._tp_slot, assign):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    # Devices and dtypes

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        slot = self._tp_slot
        if slot.rank == 0:
            mine = {id(p) for p in self._parameters.values()}
            for peer in slot.peers():
                _apply_to_own(peer, fn, mine)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Casts the dtype. A device must be one of the model's own; nothing is moved to it: each part stays on its own.

        Raises:
            DeviceError: another device.
        """
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None:
            self._check_device(device)
        if dtype is not None:
            super().to(dtype=dtype, non_blocking=non_blocking)
        if memory_format is not None:
            super().to(memory_format=memory_format)  # type: ignore[call-overload]
        return self

    def cuda(self, device: int | torch.device | str | None = None) -> Self:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda"))

    def cpu(self) -> Self:
        return self.to(torch.device("cpu"))

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        raise NotImplementedError("to_empty of a split model: build and load the model first, then split it")

    def _check_device(self, device: torch.device) -> None:
        own = self._tp_slot.shards.devices
        if device not in own and not any(device.type == d.type and device.index is None for d in own):
            raise DeviceError(
                f"the model is split over {', '.join(map(str, own))} and cannot move to {device}; "
                "split it over other devices instead (a dtype cast works)"
            )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        where = self._tp_slot.name or type(self).__name__
        raise NotImplementedError(f"compile() of {where}, in a model that is split over threads, is not there yet")

    def __prepare_scriptable__(self) -> Self:
        where = self._tp_slot.name or type(self).__name__
        raise NotImplementedError(f"torch.jit.script of {where}, which is split over threads; script the unsplit model")

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return joined_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return itself, (joined_copy(self, {}),)


def _apply_to_own(peer: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], shared: set[int]) -> None:
    """Apply a cast to what only `peer` holds: buffers, stand-ins and zeros."""
    with torch.no_grad():
        for holder in (peer._parameters, peer._buffers):
            for name, tensor in holder.items():
                if tensor is not None and id(tensor) not in shared:
                    holder[name] = fn(tensor)  # type: ignore[assignment]


def _is_plain(value: Any) -> bool:
    """Whether a value says the same on every rank: numbers, words, and containers of such."""
    if isinstance(value, _SCALARS):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return False


def _refuse_local_size(module: nn.Module, slot: Slot, name: str, value: Any) -> None:
    sizes = module.__dict__.get("_tp_sizes", {})
    if name in sizes and isinstance(value, int) and value != module.__dict__.get(name, value):
        raise PlanError(
            f"{slot.name}.{name} is {module.__dict__[name]} and each rank has its share of it; setting it to {value} "
            "does not fit the split: change it within `with tp.whole_parameters(model):`"
        )


def _note_route(module: nn.Module, slot: Slot, name: str, value: Any) -> None:
    """An attribute is set from outside: whether the plan still holds is seen at the next run."""
    shards = slot.shards
    routes = shards.routes
    if shards.team.acts_as_caller() and routes.refuses(module, slot.name, name, value):
        raise NotImplementedError(
            f"{name} of {slot.name or 'the model'} was set by a hook, in the middle of a forward that reads it: "
            "the rest of the forward would go along a path that was not planned; set it between calls of the model"
        )
    routes.note(module, slot.name, name)


def _is_free_function(value: Any) -> bool:
    """Whether a value is a function that belongs to no module or tensor, and so is right for every rank."""
    if isinstance(value, functools.partial):
        return all(map(_is_free, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, FunctionType):
        return all(_is_free(cell.cell_contents) for cell in value.__closure__ or ())
    return isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (nn.Module, torch.Tensor))


def _is_free(value: Any) -> bool:
    return isinstance(value, type) or _is_plain(value) or _is_free_function(value)
