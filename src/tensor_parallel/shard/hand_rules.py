"""Rules by hand at a module's border, done to the letter (see `tp.Config`)."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tensor_parallel.comm.group import Group
from tensor_parallel.errors import PlanError
from tensor_parallel.layout import Cuts, DimLayout, Part, Placement, Segment, shard
from tensor_parallel.plan import HandRule, ModulePlan
from tensor_parallel.plan.state_actions import with_rank

_GIVEN = "as given"
Convert = Callable[[Any], Any]


def ruled_forward(
    forward: Callable[..., Any], plan: ModulePlan, name: str, signature: inspect.Signature, group: Group
) -> Callable[..., Any]:
    """A rank's forward with its rules around it; `forward` where there are none."""
    inputs = [
        (_argument(rule.key, signature), _convert(rule, name, group)) for rule in plan.rules if rule.kind == "input"
    ]
    outputs = [(rule.key, _convert(rule, name, group)) for rule in plan.rules if rule.kind == "output"]
    if not inputs and not outputs:
        return forward

    def ruled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for (position, keyword), convert in inputs:
            if position is not None and position < len(given):
                given[position] = convert(given[position])
            elif keyword in kwargs:
                kwargs[keyword] = convert(kwargs[keyword])
        output = forward(module, *given, **kwargs)
        for key, convert in outputs:
            output = _changed(output, key, convert, name)
        return output

    return ruled


def local_attribute_values(module: nn.Module, plan: ModulePlan, rank: int) -> dict[str, Any]:
    """What the attribute rules make of the module's attributes on `rank`."""
    found = {}
    for rule in plan.rules:
        if rule.kind != "attribute" or isinstance(rule.action, str):
            continue
        attribute = str(rule.key)
        found[attribute] = with_rank(rule.action, getattr(module, attribute), rank)
    return found


def _argument(key: int | str, signature: inspect.Signature) -> tuple[int | None, str]:
    """(position, keyword) of an argument given by either."""
    names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if isinstance(key, int):
        return key, names[key] if 0 <= key < len(names) else ""
    return names.index(key) if key in names else None, key


def _convert(rule: HandRule, name: str, group: Group) -> Convert:
    rank, size, action = group.rank(), group.size(), rule.action
    if not isinstance(action, str):
        return lambda value: with_rank(action, value, rank)
    word, *numbers = action.split()
    where = f"the {rule.kind} rule {rule.key!r}: {action!r} of {name or 'the model'}"
    if word == "sum":
        return _of_tensor(group.all_reduce, where)
    if word == "gather":
        known: dict[Any, tuple[Placement, Cuts]] = {}
        return _of_tensor(lambda tensor: _gather(tensor, int(numbers[0]), group, known), where)
    if word == "split":
        return _of_tensor(lambda tensor: torch.tensor_split(tensor, size, int(numbers[0]))[rank], where)
    if word == "scale":
        return lambda value: None if value is None else value / size

    def scale_int(value: Any) -> Any:
        if value is None:
            return None
        if value % size:
            raise PlanError(f"{where} met {value}, which {size} ranks do not divide")
        return value // size

    return scale_int


def _gather(tensor: torch.Tensor, dim: int, group: Group, known: dict[Any, tuple[Placement, Cuts]]) -> torch.Tensor:
    """The ranks' tensors one after the other along a dim, of whatever sizes."""
    dim = dim if dim < 0 else dim - tensor.dim()
    own = torch.zeros(group.size(), dtype=torch.long, device=tensor.device)
    own[group.rank()] = tensor.shape[dim]
    with torch.no_grad():
        sizes = tuple(group.all_reduce(own).tolist())
    if (dim, sizes) not in known:
        ends = list(itertools.accumulate(sizes))
        whole = DimLayout((Segment((Part(ends[-1], _GIVEN),)),))
        known[dim, sizes] = shard(dim, whole), {_GIVEN: tuple(zip([0, *ends[:-1]], ends, strict=True))}
    return group.all_gather(tensor, *known[dim, sizes])


def _of_tensor(convert: Callable[[torch.Tensor], torch.Tensor], where: str) -> Convert:
    def converted(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise PlanError(f"{where} met a {type(value).__name__}; a tensor is needed")
        return convert(value)

    return converted


def _changed(output: Any, key: int | str, convert: Convert, name: str) -> Any:
    """The output with one item changed; one tensor is its own item 0."""
    if isinstance(output, torch.Tensor) and key == 0:
        return convert(output)
    if isinstance(output, Mapping):
        names = list(output)
        at = names[key] if isinstance(key, int) and key < len(names) else key
        if at not in output:
            return output  # asked for in other calls only
        changed = convert(output[at])
        output[at] = changed  # type: ignore[index]
        return output
    if isinstance(output, Sequence) and isinstance(key, int):
        if key >= len(output):
            return output
        items = [convert(item) if index == key else item for index, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)  # type: ignore[call-arg]
    raise PlanError(
        f"output rule {key!r} of {name or 'the model'}: its output is a {type(output).__name__} and has no such item"
    )
