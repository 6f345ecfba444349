"""TensorParallel: N ranks of one module behind one object."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from tensor_parallel.errors import DeviceError, PlanError
from tensor_parallel.plan import Config, Plan, ResolvedPlan, resolve
from tensor_parallel.plan.table import bytes_text
from tensor_parallel.runtime import ThreadTeam
from tensor_parallel.shard import (
    Adapter,
    Leaves,
    ModelShards,
    SplitModule,
    bytes_held,
    check_optimizers,
    is_assembled,
    is_by_rank,
    joined_copy,
    joined_state,
    kinds_of,
    shards_of,
    split_module,
    up_to_date,
)
from tensor_parallel.zero import ShardingManager, sharded_plan

ALL: tuple[str, ...] = ("*",)
"""Every parameter that is whole is sharded."""
Device = str | int | torch.device


class Replan(Protocol):
    """Makes a plan of a changed model as the first one was made."""

    @property
    def given(self) -> bool:
        """Whether the first one was given by hand."""
        ...

    def __call__(self, module: nn.Module) -> Plan: ...


class ModuleShards(tuple[nn.Module, ...]):
    """The ranks' modules."""

    def __getattr__(self, name: str) -> nn.Module:
        if name.isdigit() and int(name) < len(self):
            return self[int(name)]
        raise AttributeError(f"{name!r}: the ranks are 0 to {len(self) - 1}")


class TensorParallel(SplitModule):
    """A module that runs split over several devices, and is still an instance of its own class.

    `tp.tensor_parallel(module, device_ids)` makes one; it is the given module itself, which holds rank 0's part. So
    does `tp.TensorParallel(module, device_ids, output_device, output_device_index, tensor_parallel_config, delay_init,
    distributed, sharded, sharded_param_names)`, the way of version 2.0.
    """

    constructor: Callable[[type[TensorParallel], tuple[Any, ...], dict[str, Any]], nn.Module]
    """What calling the class does: set by the factory."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.constructor(cls, args, kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `__new__` gives a module that was made long before."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The ranks' devices, by rank."""
        return shards_of(self).devices

    @property
    def output_device(self) -> torch.device:
        """Where outputs go."""
        return shards_of(self).output_device

    # What version 2.0 had beside it

    @property
    def device_ids(self) -> list[int]:
        """The ranks' devices as indices of CUDA devices; -1 for a CPU."""
        return [-1 if device.type == "cpu" else device.index or 0 for device in self.devices]

    @property
    def output_device_index(self) -> int:
        """The rank on whose device outputs are."""
        return self.devices.index(self.output_device)

    @property
    def tensor_parallel_config(self) -> Plan | Config:
        """The rules that were given, else the plan."""
        shards = shards_of(self)
        config: Config | None = getattr(shards.replan, "config", None)
        return shards.before.resolved.plan if config is None else config

    @property
    def module_shards(self) -> ModuleShards:
        """The ranks' modules, by rank; rank 0's is this one. Rank 1's is found as `getattr(model.module_shards, "1")`
        too, as dotted names need it."""
        return ModuleShards(shards_of(self).trees)

    @property
    def modified_parameters_names(self) -> set[str]:
        """The parameters of which some rank holds less than the whole, by their names in the unsplit model."""
        tensors = shards_of(self).tensors.values()
        cut = (t for t in tensors if (t.is_cut or t.plan.rank0_only) and not t.plan.is_buffer and len(self.devices) > 1)
        return {name for tensor in cut for name in tensor.plan.names}

    @property
    def param_fractions(self) -> tuple[float, ...]:
        """The share of the model's parameters (in elements) that each rank holds, by rank."""
        shards = shards_of(self)
        parameters = [tensor for tensor in shards.tensors.values() if not tensor.plan.is_buffer]
        total = sum(prod(tensor.plan.layout.shape) for tensor in parameters)
        held = [
            sum(piece.tensor.numel() for t in parameters for piece in t.pieces if rank in piece.ranks)
            for rank in range(shards.world_size)
        ]
        return tuple(count / max(total, 1) for count in held)

    @property
    def need_delayed_init(self) -> bool:
        """Whether the parts still wait on the CPU for the first call (`delay_init`)."""
        pending = shards_of(self).pending
        return pending is not None and pending.devices is not None

    @property
    def preserve_shards_when_saving(self) -> bool:
        """False: `state_dict` speaks of whole tensors under plain names, always."""
        return False

    @property
    def sharding_manager(self) -> ShardingManager | None:
        """What is kept in pieces of what the plan leaves whole; None without `sharded=True`."""
        shards = shards_of(self)
        if shards.before.sharded is None:
            return None
        return ShardingManager(tuple(key for key, tensor in shards.tensors.items() if is_assembled(tensor)))

    def apply_sharding(self, names: Sequence[str] | None = None) -> None:
        """Cut what the plan leaves whole evenly over the ranks, as `sharded=True` does (ZeRO-3): put together just
        before it is needed and freed after, gradients and optimiser states for the pieces alone.

        names: which parameters, by their names in the unsplit model; None: all.

        Raises:
            PlanError: an unknown name, or one that the plan cuts already; sharded already; parameters without values.
        """
        shards = up_to_date(self)
        if shards.before.sharded is not None:
            raise PlanError("the model is sharded already; apply_sharding can be called once")
        if shards.empty:
            raise PlanError("apply_sharding: parameters have no values yet (meta device); load them first")
        wanted = ALL if names is None else tuple(names)
        sharded_plan(shards.resolved.plan, self, shards.world_size, names)  # raises before anything is changed
        shards.pending = _Pending(sharded=wanted)
        up_to_date(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As of the unsplit model. A state dict that version 2.0 wrote, with an entry a rank, is joined first.

        Raises:
            PlanError: it was written for another number of ranks, or its parts do not make up the whole.
        """
        if is_by_rank(state_dict):
            state_dict = joined_state(state_dict, up_to_date(self))
        return super().load_state_dict(state_dict, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        shards = up_to_date(self)
        fresh = joined_copy(self, memo)
        wrapper = type(self).__bases__[0]
        before = shards.before
        return _again(
            fresh, before.resolved, shards.devices, shards.output_device, wrapper, shards.replan, before.sharded
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        shards = up_to_date(self)
        made_from = joined_copy(self, {}), shards.before.resolved, shards.devices, shards.output_device
        return _again, (*made_from, type(self).__bases__[0], shards.replan, shards.before.sharded)

    @classmethod
    def _adapters(cls) -> list[Adapter]:
        return []


def _again(
    module: nn.Module,
    resolved: ResolvedPlan,
    devices: tuple[torch.device, ...],
    output_device: torch.device,
    wrapper: type[TensorParallel],
    replan: Replan | None = None,
    sharded: tuple[str, ...] | None = None,
) -> nn.Module:
    """Split a copy as its original was."""
    for device in devices:
        _check_exists(device)
    return split(module, resolved, devices, output_device, wrapper, replan, sharded=sharded)


@dataclass(frozen=True)
class _Before:
    """How a model was split. kinds: of its modules and shapes, for which the plan was made."""

    resolved: ResolvedPlan
    devices: tuple[torch.device, ...]
    output_device: torch.device
    wrapper: type[TensorParallel]
    replan: Replan | None
    kinds: Mapping[str, Any]
    lock: Any
    sharded: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Pending:
    """How a model is to be split again at its next call, where that is otherwise than before."""

    devices: tuple[torch.device, ...] | None = None
    output_device: torch.device | None = None
    sharded: tuple[str, ...] | None = None


def delay(model: nn.Module, devices: Sequence[torch.device], output_device: torch.device) -> None:
    """Let the parts of a model, which lie on the CPU, move to `devices` when it is first called."""
    shards_of(model).pending = _Pending(tuple(devices), output_device)


def _split_again(
    before: _Before, module: nn.Module, leaves: Leaves, differences: Sequence[str], pending: _Pending | None
) -> None:
    """Split a joined model: by the plan that it had, where modules, shapes and what leads its forward are what that was
    made for."""
    resolved, replan, log = before.resolved, before.replan, logging.getLogger(__name__)
    changed = kinds_of(module) != before.kinds
    if changed or differences:
        name, why = type(module).__name__, "; ".join(differences) or "its modules or shapes are others"
        if replan is None or (changed and replan.given):
            raise PlanError(
                f"{name} was changed ({why}), and its plan was given by hand: split it with a plan of the changed "
                "model (it is whole now)"
            )
        level = logging.WARNING if replan.given else logging.INFO
        log.log(level, "planning %s anew%s: %s", name, ", in place of the given plan" if replan.given else "", why)
        resolved = resolve(replan(module), len(before.devices))
    devices, output_device, sharded = before.devices, before.output_device, before.sharded
    if pending is not None:
        devices, output_device = pending.devices or devices, pending.output_device or output_device
        sharded = pending.sharded if sharded is None else sharded
    split(module, resolved, devices, output_device, before.wrapper, replan, leaves, before.lock, sharded)


def split(
    module: nn.Module,
    resolved: ResolvedPlan,
    devices: Sequence[torch.device],
    output_device: torch.device,
    wrapper: type[TensorParallel] = TensorParallel,
    replan: Replan | None = None,
    leaves: Leaves | None = None,
    lock: Any = None,
    sharded: tuple[str, ...] | None = None,
) -> nn.Module:
    """Split `module` in place over `devices` by a resolved plan; the module, with `wrapper` mixed into its class.

    replan: makes a plan anew when modules of the split model were changed.  leaves: of an earlier split.
    lock: of an earlier split: who waits for the model's turn waits for this one too.
    sharded: parameters that are whole and to be kept in pieces (ALL: all of them), None for none.

    Raises:
        PlanError, AlreadySplitError, NotImplementedError: before anything is changed.
        SplitError: cutting failed; the module is used up.
    """
    kinds, start = kinds_of(module), time.perf_counter()
    make_team: Callable[[], ThreadTeam] = lambda: ThreadTeam(devices)  # noqa: E731
    given = resolved
    if sharded is not None:
        plan = sharded_plan(resolved.plan, module, len(devices), None if sharded == ALL else sharded)
        resolved = resolve(plan, len(devices))
    shards: ModelShards = split_module(
        module, resolved, devices, make_team, output_device=output_device, mixins=(wrapper,), leaves=leaves
    )
    shards.replan, shards.lock = replan, lock or shards.lock
    before = _Before(given, shards.devices, output_device, wrapper, replan, kinds, shards.lock, sharded)
    shards.before = before
    shards.again = functools.partial(_split_again, before)
    check_optimizers(shards)
    log = logging.getLogger(__name__)
    if log.isEnabledFor(logging.INFO):
        log.info(
            "split %s over %s in %.2f s; bytes of parameters by rank: %s",
            *(type(module).__name__, ", ".join(map(str, shards.devices)), time.perf_counter() - start),
            "; ".join(map(bytes_text, bytes_held(shards))),
        )
    shards.adapters.extend(wrapper._adapters())
    return module


def check_device_ids(device_ids: Sequence[Device] | None = None) -> tuple[torch.device, ...]:
    """The devices to split over, checked: names, `torch.device`s, or indices of CUDA devices; one may be named several
    times. None: all CUDA devices, else one CPU.

    Raises:
        DeviceError: the list is empty, a device is unknown or does not exist, or kinds are mixed.
    """
    if device_ids is None:
        count = torch.cuda.device_count()
        return tuple(torch.device("cuda", index) for index in range(count)) or (torch.device("cpu"),)
    if isinstance(device_ids, (str, int, torch.device)):
        raise DeviceError(f"device_ids is {device_ids!r}; give a list of devices, such as ['cpu'] * 2")
    devices = tuple(as_device(item) for item in device_ids)
    if not devices:
        raise DeviceError("device_ids is empty; name at least one device, or leave it out for all CUDA devices")
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise DeviceError(f"device_ids mixes {' and '.join(kinds)} devices; all must be of one kind")
    return devices


def as_device(given: Device) -> torch.device:
    """One device, checked and with its index ("cuda" is cuda:0; CPUs have none).

    Raises:
        DeviceError: it is unknown or does not exist.
    """
    if isinstance(given, bool) or not isinstance(given, (str, int, torch.device)):
        raise DeviceError(f"{given!r} is no device; give a name such as 'cuda:0', a torch.device, or a CUDA index")
    try:
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            f"unknown device {given!r}; give 'cpu', 'cuda:0', or another kind that torch knows"
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    _check_exists(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return device


def _check_exists(device: torch.device) -> None:
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count or (device.index is not None and device.index >= count):
            there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise DeviceError(f"device {device} does not exist: there is {there}")
        return
    try:
        made = torch.empty(1, device=device)
    except (RuntimeError, NotImplementedError, AssertionError, ImportError) as error:
        here = ["cpu", *([f"cuda:0 to cuda:{torch.cuda.device_count() - 1}"] if torch.cuda.device_count() else [])]
        raise DeviceError(
            f"device {device} cannot be used: this torch or this machine has no {device.type} backend; there is "
            f"{' and '.join(here)}"
        ) from error
    if made.is_meta:
        raise DeviceError("a model cannot run on the meta device; name the devices that it shall run on")
