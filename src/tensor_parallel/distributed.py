"""make_distributed_shard(): one rank's part of a module, where every rank is a process of torch.distributed."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from tensor_parallel.comm.draws import Layouts
from tensor_parallel.comm.process import ProcessGroup
from tensor_parallel.comm.process_exchange import check_device, check_group, device_kinds, gather_objects
from tensor_parallel.errors import DeviceError, PlanError, RankError
from tensor_parallel.factory import check_module, make_plan, wrapper_for
from tensor_parallel.plan import Config, Plan, resolve
from tensor_parallel.plan.check import check_plan
from tensor_parallel.plan.serialize import to_text
from tensor_parallel.runtime.own_random import OwnRandom
from tensor_parallel.shard import check_splittable
from tensor_parallel.shard.process import ProcessShard
from tensor_parallel.shard.process_split import split_here
from tensor_parallel.tensor_parallel import Device, as_device

_SOME = 2**16
_KEYWORDS = ("example_inputs", "process_group", "strict")


def make_distributed_shard(
    module: nn.Module, device: Device | None = None, config: Plan | Config | None = None, **kwargs: Any
) -> nn.Module:
    """This rank's part of `module`, which is used up and becomes the result; of the module's own class. Every rank of
    the process group calls it with the same module, and calls the result with the same inputs: outputs, and gradients
    of inputs and of whole parameters, are on every rank what the unsplit module gives; gradients of split parameters
    are this rank's parts. Each rank has an optimiser of its own; `state_dict` holds its parts. What adds over all
    parameters (`clip_grad_norm_`) sees one rank's parts alone.

    device: where this rank computes; default: this process's own GPU (LOCAL_RANK, else the current one) where there is
        any and the group has a backend for it, else the CPU.
    config: a `tp.Plan`, or a `tp.Config` of rules by hand; default: found from a trace, on every rank by itself.
    example_inputs: as for `tp.tensor_parallel`.
    process_group: of torch.distributed; default: all processes.
    strict: False: a rule of a tp.Config that fits nothing warns; else it raises.

    Raises (all before anything is changed):
        TensorParallelError: torch.distributed is not initialised, or this process is none of the group's.
        TypeError: `module` is no module, or an unknown keyword.
        DeviceError: an unknown or missing device, one that the backend is not for, or not of the other ranks' kind.
        AlreadySplitError: the module is split already.
        PlanError, TraceError: no plan can be made, the given one does not fit, or the ranks' plans or values differ.
        RankError: another rank raised one of these, which it names.
    """
    ranks = check_group(kwargs.get("process_group"))
    try:
        _refuse_unknown(kwargs)
        own = _device(device, device_kinds(ranks))
        check_device(ranks, own)
        plan = _plan(module, ranks.size(), config, kwargs)
        resolved = resolve(plan, ranks.size())
        check_splittable(module, resolved)
        said = "", own.type, _digest(to_text(plan)), _marks(module)
    except Exception as error:
        gather_objects(ranks, (f"{type(error).__name__}: {error}", "", "", {}))  # the others wait for it
        raise
    _check_same(gather_objects(ranks, said), lambda: gather_objects(ranks, to_text(plan)))
    group = ProcessGroup(ranks, own)
    adapters = wrapper_for(module)._adapters()

    def randomness(shard: ProcessShard, layouts: Layouts) -> AbstractContextManager[Any]:
        return OwnRandom(shard.rank, group.size(), layouts, shard.applies)

    return split_here(module, resolved, group, adapters, randomness)


def _refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name not in _KEYWORDS:
            near = get_close_matches(name, _KEYWORDS, 1)
            cure = f"did you mean {near[0]!r}?" if near else f"known ones: {', '.join(_KEYWORDS)}"
            raise TypeError(f"make_distributed_shard() got an unknown keyword {name!r}; {cure}")


def _device(given: Device | None, backends: list[str]) -> torch.device:
    if given is not None:
        return as_device(given)
    if "cuda" in backends and torch.cuda.is_available():
        return as_device(int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")


def _plan(module: nn.Module, world_size: int, config: Any, kwargs: Mapping[str, Any]) -> Plan:
    check_module(module)
    if any(parameter.is_meta for parameter in module.parameters()):
        raise PlanError("the module has parameters without values (meta device); load it before make_distributed_shard")
    if isinstance(config, Config):
        return config.plan(module, world_size, strict=kwargs.get("strict", True))
    if config is None:
        plan = make_plan(module, world_size, kwargs.get("example_inputs"))
        gc.collect()  # what planning leaves in cycles refers to the module
        return plan
    if not isinstance(config, Plan):
        raise TypeError(f"config is a {type(config).__name__}; a tp.Plan or a tp.Config is needed, or nothing")
    check_plan(config, module)
    return config


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _marks(module: nn.Module) -> dict[str, tuple[str, str, tuple[int, ...], float]]:
    """What tells parameters of other values apart, by some of them."""
    found = {}
    for name, tensor in module.named_parameters():
        flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        some = flat.reshape(-1)[:: max(1, flat.numel() // _SOME)].double().cpu()
        weighted = some @ torch.linspace(1, 2, some.numel(), dtype=torch.float64)
        kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
        found[name] = kind, str(tensor.dtype), tuple(tensor.shape), float(weighted)
    return found


def _check_same(found: list[Any], plans: Callable[[], list[str]]) -> None:
    """Raise where another rank failed, or has another device, plan or module than rank 0. plans: fetches all ranks'."""
    for rank, (error, *_) in enumerate(found):
        if error:
            raise RankError(f"make_distributed_shard failed on rank {rank}: {error}")
    _, device, digest, marks = found[0]
    for rank, (_, other_device, _, other_marks) in enumerate(found):
        if other_device != device:
            raise DeviceError(f"rank 0 is on {device} and rank {rank} on {other_device}; all must be of one kind")
        for name in dict.fromkeys([*marks, *other_marks]):
            if not _equal(marks.get(name), other_marks.get(name)):
                raise PlanError(
                    f"{name} is not the same on rank 0 and rank {rank} ({_text(marks.get(name))} and "
                    f"{_text(other_marks.get(name))}); every rank must give the same module with the same values: load "
                    "the same file, or set the same seed before building it"
                )
    if all(other[2] == digest for other in found):
        return
    texts = plans()
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise PlanError(
                f"rank 0 and rank {rank} have different plans: {_difference(texts[0], text)}; give all ranks one "
                "plan (config=tp.Plan.load(path)), or the same example_inputs"
            )


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None or one[:3] != other[:3]:
        return False
    return bool(abs(one[3] - other[3]) <= 1e-9 * max(1.0, abs(one[3]))) or one[3] != one[3] != other[3]


def _text(mark: Any) -> str:
    return "not there" if mark is None else f"{mark[0]}, {mark[1]}, {list(mark[2])}, weighted sum {mark[3]:.9g}"


def _difference(one: str, other: str) -> str:
    """The first tensor, module or factor of which two plans say different things."""
    first, second = json.loads(one), json.loads(other)
    for part, what in (("tensors", "tensor"), ("modules", "module"), ("factors", "factor")):
        for name in dict.fromkeys([*first[part], *second[part]]):
            said = [json.dumps(plan[part].get(name, "nothing")) for plan in (first, second)]
            if said[0] != said[1]:
                return f"for the {what} {name or 'itself, the root'} {said[0][:200]} and {said[1][:200]}"
    names = [name for name in first if first[name] != second.get(name)]
    return f"in their {', '.join(names)}"
