"""tensor_parallel(): any module, split over several devices."""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from tensor_parallel import planner
from tensor_parallel.errors import AlreadySplitError, DeviceError, PlanError, TraceError
from tensor_parallel.plan import Config, Plan, bytes_by_rank, resolve
from tensor_parallel.plan.check import check_plan
from tensor_parallel.plan.table import bytes_text, counted
from tensor_parallel.planner import DEFAULT_RULES, Rules
from tensor_parallel.shard import check_splittable
from tensor_parallel.shard.shards import slot_of
from tensor_parallel.tensor_parallel import ALL, Device, TensorParallel, as_device, check_device_ids, delay, split
from tensor_parallel.zero import sharded_plan

Inputs = Mapping[str, Any] | tuple[Any, ...]

_KEYWORDS = (
    "example_inputs",
    "output_device",
    "output_device_index",
    "ratios",
    "process_group",
    "device_mesh",
    "runtime",
    "verify",
    "strict",
    "delay_init",
)


def tensor_parallel(
    module: nn.Module,
    device_ids: Sequence[Device] | None = None,
    tensor_parallel_config: Plan | Config | None = None,
    distributed: bool | None = None,
    sharded: bool | None = None,
    sharded_param_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Split `module` over devices; it is used up and becomes the result, which runs as the module did.

    module: any module; best on the CPU, so that no device ever holds it whole.
    device_ids: names, `torch.device`s or CUDA indices, one a rank; the same may be named several times. Default: all
        CUDA devices, else one CPU.
    tensor_parallel_config: a `tp.Plan`, or a `tp.Config` of rules by hand; default: found from a trace of the module's
        forward.
    example_inputs: a dict or a tuple of what the forward takes, or a list of them: what to trace with. transformers
        models make their own. Without any, each linear, embedding and convolution layer is split by itself.
    sharded: True: what the plan leaves whole is cut evenly over the ranks, put together just before it is needed and
        freed after (ZeRO-3).  sharded_param_names: which parameters, by name; default: all.
    strict: False: a rule of a tp.Config that fits nothing warns; else it raises.
    delay_init: the parts stay on the CPU until the model is first called.
    output_device, output_device_index: where outputs go, one of the devices or its index; default: the first.

    Returns a `tp.TensorParallel`, or a `tp.TensorParallelPreTrainedModel` for a transformers model.

    Raises (all before anything is changed, but SplitError):
        TypeError: `module` is no module, or an unknown keyword.
        DeviceError: an unknown, missing, mixed or foreign device.
        AlreadySplitError: the module is split already.
        PlanError, TraceError: no plan can be made, or the given one does not fit.
        NotImplementedError: a keyword whose part is not there yet.
        SplitError: cutting failed; the module is used up.
    """
    _refuse_unknown(kwargs)
    _refuse_later(tensor_parallel_config, distributed, kwargs)
    devices = check_device_ids(device_ids)
    output_device = _output_device(devices, kwargs.get("output_device"), kwargs.get("output_device_index"))
    check_module(module)
    config, plan = None, tensor_parallel_config
    if isinstance(plan, Config):
        config, plan = plan, plan.plan(module, len(devices), strict=kwargs.get("strict", True))
    elif plan is None:
        start = time.perf_counter()
        plan = make_plan(module, len(devices), kwargs.get("example_inputs"))
        _log_plan(plan, type(module).__name__, time.perf_counter() - start)
        gc.collect()  # what planning leaves in cycles refers to the module: `del model` must free it at once
    else:
        check_plan(plan, module)
    resolved = resolve(plan, len(devices))
    check_splittable(module, resolved)
    if len(devices) == 1:
        logging.getLogger(__name__).info("one device, %s: the model runs there whole", devices[0])
    replan = _Replan(len(devices), kwargs.get("example_inputs"), tensor_parallel_config is not None, config)
    delayed = bool(kwargs.get("delay_init"))
    home = [torch.device("cpu")] * len(devices) if delayed else devices
    wanted = _sharded(sharded, sharded_param_names)
    if wanted is not None:
        sharded_plan(plan, module, len(devices), sharded_param_names)  # raises before anything is changed
        if any(parameter.is_meta for parameter in module.parameters()):
            raise PlanError(
                "sharded=True of a model without values (meta device): load it, then model.apply_sharding()"
            )
    out = home[devices.index(output_device)]
    made = split(module, resolved, home, out, wrapper_for(module), replan, sharded=wanted)
    if delayed:
        delay(made, devices, output_device)
    return made


def _log_plan(plan: Plan, name: str, seconds: float) -> None:
    """INFO: what was planned, and the bytes of each rank; DEBUG: why each tensor stays whole. The candidates that lost
    and what they would have cost: planner/select.py's."""
    log = logging.getLogger(__name__)
    if not log.isEnabledFor(logging.INFO):
        return
    parameters = [tensor for tensor in plan.tensors.values() if not tensor.is_buffer]
    held = bytes_by_rank(resolve(plan, plan.world_size), parameters)
    total, cut = sum(t.nbytes for t in parameters), sum(t.nbytes for t in parameters if t.is_cut)
    met = {op: sum(t.calls for t in plan.traffic if t.op == op) for op in ("all_reduce", "all_gather")}
    log.info(
        "planned %s in %.2f s for %s from %s: %.0f%% of %s of parameters split, by %s; one forward has %s and %s; "
        "bytes of parameters by rank: %s",
        *(name, seconds, counted(plan.world_size, "rank"), "; ".join(plan.paths) or "its layers one by one"),
        *(100 * cut / max(total, 1), bytes_text(total), counted(len(plan.factors), "factor")),
        *(counted(met["all_reduce"], "all-reduce"), counted(met["all_gather"], "all-gather")),
        "; ".join(map(bytes_text, held)),
    )
    for tensor in plan.tensors.values():
        if not tensor.is_cut:
            log.debug(
                "%s stays whole (%s): %s", tensor.names[0], bytes_text(tensor.nbytes), tensor.reason or "a buffer"
            )


@dataclass(frozen=True)
class _Replan:
    """For a split model that was changed: by the rules that were given, else from a trace; where its forward cannot be
    traced any more, layer by layer."""

    world_size: int
    example_inputs: Any
    given: bool
    config: Config | None = None

    def __call__(self, module: nn.Module) -> Plan:
        if self.config is not None:
            return self.config.plan(module, self.world_size, strict=False)
        try:
            return make_plan(module, self.world_size, self.example_inputs)
        except TraceError as error:
            logging.getLogger(__name__).warning(
                "%s was changed, and its new plan was made without a trace, layer by layer (exact, but less is split "
                "and more is sent): %s",
                *(type(module).__name__, error),
            )
            return planner.layerwise_plan(module, self.world_size)


def make_plan(
    module: nn.Module,
    world_size: int,
    example_inputs: Any = None,
    ratios: Sequence[float] | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Plan:
    """How `tensor_parallel` would split `module`; the module is not changed.

    world_size: steers what is worth cutting; the plan serves any number of devices.
    example_inputs: as for `tensor_parallel`.
    rules: what operators do to dims that are cut; `DEFAULT_RULES.with_rule(name, rule)` adds one.

    Raises:
        PlanError, TraceError: no plan can be made, or the forward refuses the inputs.
    """
    if ratios is not None:
        raise NotImplementedError("`ratios` is not there yet; leave it out")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size is {world_size!r}; give the number of devices, such as 2")
    check_module(module)
    inputs = own_example_inputs(module) if example_inputs is None else as_inputs(example_inputs)
    if inputs is None:
        return planner.layerwise_plan(module, world_size)
    padded = _padded_too(module, inputs) if example_inputs is not None else []
    if padded:
        try:
            return planner.make_plan(module, world_size, [*inputs, *padded], rules=rules)
        except TraceError as error:  # the forward takes no such mask: what was given is all there is
            logging.getLogger(__name__).debug("planned without padding: %s", error)
    plan = planner.make_plan(module, world_size, inputs, rules=rules)
    labelled = _labelled_too(module, inputs, plan) if example_inputs is None else []
    if labelled:
        try:
            return planner.make_plan(module, world_size, [*inputs, *labelled], rules=rules)
        except TraceError as error:  # labels of another kind: the forward is called without them, or given an example
            logging.getLogger(__name__).debug("planned without labels: %s", error)
    return plan


def _is_pretrained(module: nn.Module) -> bool:
    """Whether it is a transformers model, without importing transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def wrapper_for(module: nn.Module) -> type[TensorParallel]:
    """TensorParallelPreTrainedModel for a transformers model, else TensorParallel."""
    if not _is_pretrained(module):
        return TensorParallel
    from tensor_parallel.pretrained_model import TensorParallelPreTrainedModel

    return TensorParallelPreTrainedModel


def as_inputs(example_inputs: Any) -> list[Inputs]:
    """example_inputs as a list of dicts and tuples.

    Raises:
        TypeError: it is something else.
    """
    found = list(example_inputs) if isinstance(example_inputs, list) else [example_inputs]
    if not found or not all(isinstance(item, (Mapping, tuple)) for item in found):
        kinds = ", ".join(type(item).__name__ for item in found) or "nothing"
        if isinstance(example_inputs, torch.Tensor):
            kinds = "a bare tensor, for which you would write (tensor,)"
        raise TypeError(f"example_inputs holds {kinds}; give a dict or a tuple of arguments, or a list of them")
    return found


def _padded_too(module: nn.Module, inputs: Sequence[Inputs]) -> list[Inputs]:
    """For a transformers model the given inputs with padding on the left: attention takes another path then, and the
    plan must hold on it too."""
    if not _is_pretrained(module) or "attention_mask" not in inspect.signature(module.forward).parameters:
        return []
    found: list[Inputs] = []
    for item in inputs:
        if not isinstance(item, Mapping):
            continue
        ids, mask = item.get("input_ids"), item.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.size(1) < 3:
            continue
        if mask is None or (isinstance(mask, torch.Tensor) and mask.shape == ids.shape and bool(mask.all())):
            mask = torch.ones_like(ids) if mask is None else mask.clone()
            mask[0, : ids.size(1) // 3] = 0
            found.append({**item, "attention_mask": mask})
    return found


def _labelled_too(module: nn.Module, inputs: Sequence[Inputs], plan: Plan) -> list[Inputs]:
    """For a transformers model whose root gathers its logits at its very end, the inputs with labels: the loss reads
    the logits before that, and the plan must gather them for it."""
    root = plan.modules.get("")
    cut = root is not None and any(boundary.before.kind == "shard" for boundary in root.outputs)
    if not cut or "labels" not in inspect.signature(module.forward).parameters:
        return []
    first = next((item for item in inputs if isinstance(item, Mapping)), {})
    ids = first.get("decoder_input_ids", first.get("input_ids"))
    return [] if ids is None else [{**first, "labels": ids}]


def own_example_inputs(module: nn.Module) -> list[Inputs] | None:
    """What a transformers model is traced with; None for other modules, or where it makes none."""
    if not _is_pretrained(module):
        return None
    from tensor_parallel.transformers_support.example_inputs import example_inputs

    return list(example_inputs(module))


def _refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name not in _KEYWORDS:
            near = get_close_matches(name, _KEYWORDS, 1)
            cure = f"did you mean {near[0]!r}?" if near else f"known ones: {', '.join(_KEYWORDS)}"
            raise TypeError(f"tensor_parallel() got an unknown keyword {name!r}; {cure}")


def _refuse_later(config: Any, distributed: bool | None, kwargs: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for what comes with later versions, by the keyword's name."""
    if config is not None and not isinstance(config, (Plan, Config)):
        cure = {
            "tuple": "inputs to trace with go into example_inputs=",
            "str": "a plan file is read by tp.Plan.load(path)",
            "PosixPath": "a plan file is read by tp.Plan.load(path)",
        }.get(type(config).__name__, "leave it out to have the split found")
        raise TypeError(
            f"tensor_parallel_config is a {type(config).__name__}; a tp.Plan or a tp.Config is needed: {cure}"
        )
    if distributed is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotImplementedError(
            "torch.distributed is initialised, so `distributed` would be on, which is not there yet; "
            "tp.make_distributed_shard gives this process its part, distributed=False splits within this process"
        )
    later = {
        "distributed": distributed,
        "ratios": kwargs.get("ratios"),
        "process_group": kwargs.get("process_group"),
        "device_mesh": kwargs.get("device_mesh"),
        "verify": kwargs.get("verify"),
    }
    for name, value in later.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"`{name}` is not there yet; leave it out")
    if kwargs.get("runtime", "threads") not in (None, "threads"):
        if kwargs["runtime"] == "processes":
            raise NotImplementedError("`runtime='processes'` is not there yet; leave it out for threads")
        raise ValueError(f"runtime is {kwargs['runtime']!r}; it can be 'threads' or, in a later version, 'processes'")


def _output_device(devices: tuple[torch.device, ...], device: Any, index: int | None) -> torch.device:
    if index is not None:
        if isinstance(index, bool) or not isinstance(index, int) or not -len(devices) <= index < len(devices):
            raise DeviceError(f"output_device_index is {index!r}; there are {len(devices)} devices, from 0")
        if device is not None and as_device(device) != devices[index]:
            raise DeviceError(f"output_device {device} is not device {index}, {devices[index]}; give one of both")
        return devices[index]
    if device is None:
        return devices[0]
    found = as_device(device)
    if found not in devices:
        raise DeviceError(f"output_device {found} is not among the devices {', '.join(map(str, devices))}")
    return found


def _sharded(sharded: bool | None, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if sharded is False and names is not None:
        raise ValueError("sharded_param_names is given and sharded is False; give one of both")
    if not sharded and names is None:
        return None
    if isinstance(names, str):
        raise TypeError(f"sharded_param_names is {names!r}; give a list of names")
    return ALL if names is None else tuple(names)


def Sharded(module: nn.Module, sharded_param_names: Sequence[str] | None = None) -> nn.Module:
    """`module.apply_sharding(sharded_param_names)`, and the module.

    Raises:
        TypeError: the module is not split.  PlanError: see `TensorParallel.apply_sharding`.
    """
    if not isinstance(module, TensorParallel):
        raise TypeError(f"tp.Sharded shards split models, and {type(module).__name__} is none; split it first")
    module.apply_sharding(sharded_param_names)
    return module


def check_module(module: nn.Module) -> None:
    """Raise where `module` is none, is split already or has no parameters."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; an nn.Module is needed")
    for name, child in module.named_modules():
        if slot_of(child) is not None:
            raise AlreadySplitError(f"{name or type(module).__name__} is split already; split an unsplit model")
    if not any(True for _ in module.parameters()):
        raise PlanError(f"{type(module).__name__} has no parameters; there is nothing to split")


_ORDER_OF_2_0 = (
    *("module", "device_ids", "output_device", "output_device_index", "tensor_parallel_config"),
    *("delay_init", "distributed", "sharded", "sharded_param_names"),
)


def _construct(cls: type[TensorParallel], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """What calling `cls` does: the same as `tensor_parallel`, with version 2.0's order of arguments."""
    if len(args) > len(_ORDER_OF_2_0):
        raise TypeError(f"{cls.__name__} takes {len(_ORDER_OF_2_0)} arguments by position: {', '.join(_ORDER_OF_2_0)}")
    given = dict(zip(_ORDER_OF_2_0, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"{cls.__name__} got several values for {', '.join(sorted(twice))}")
    given |= kwargs
    if "module" not in given:
        raise TypeError(f"{cls.__name__} needs the module to split")
    module = given["module"]
    if isinstance(module, nn.Module) and not issubclass(wrapper_for(module), cls):
        raise TypeError(
            f"tp.{cls.__name__} is for transformers models, and {type(module).__name__} is none; use tp.TensorParallel"
        )
    return tensor_parallel(**given)


TensorParallel.constructor = staticmethod(_construct)  # the class lies below this room, and is called as well
