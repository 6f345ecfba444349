"""Ordinary, unsplit copies of split models and their parts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tensor_parallel.shard.pieces import MARK
from tensor_parallel.shard.shards import shards_of


def itself(module: nn.Module) -> nn.Module:
    """For pickling: a joined copy is all there is to make again."""
    return module


def base_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module of a split model had before."""
    found: type[nn.Module] = type(module).__dict__.get("_tp_base", type(module))
    return found


def joined_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """An ordinary, unsplit deep copy of a module of a split model (whole parameters, original classes)."""
    if id(module) in memo:
        found: nn.Module = memo[id(module)]
        return found
    shards = shards_of(module)
    base = base_class(module)
    fresh = base.__new__(base)
    memo[id(module)] = fresh
    for name, parameter in module._parameters.items():
        key = shards.key_of.get(id(parameter))
        if parameter is not None and key is not None and MARK not in name and id(parameter) not in memo:
            whole = nn.Parameter(shards.tensors[key].whole().clone(), requires_grad=parameter.requires_grad)
            gradient = shards.whole_gradient(key)
            whole.grad = None if gradient is None else gradient.clone()
            memo[id(parameter)] = whole
    for name, value in module.__dict__.items():
        if name.startswith("_tp_"):
            continue
        own = value
        if name == "_parameters":
            own = {n: p for n, p in value.items() if MARK not in n}
        elif name == "_buffers":
            own = dict(_whole_buffers(module))
        fresh.__dict__[name] = copy.deepcopy(own, memo)
    return fresh


def _whole_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    shards = shards_of(module)
    for name, buffer in module._buffers.items():
        key = shards.key_of.get(id(buffer))
        yield name, buffer if key is None or buffer is None else shards.tensors[key].whole()
