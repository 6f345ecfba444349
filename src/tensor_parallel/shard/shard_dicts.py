"""State dicts of version 2.0, with an entry a rank, as whole tensors under plain names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from tensor_parallel.errors import PlanError
from tensor_parallel.shard.pieces import SplitTensor
from tensor_parallel.shard.shards import ModelShards

_ENTRY = re.compile(r"^(?:wrapped_model\.)?module_shards\.(\d+)\.(.+)$")
_INFIX = "tp_wrapped_module."
"""What 2.0 put into the names of modules with input or output rules."""


def is_by_rank(state_dict: Mapping[str, Any]) -> bool:
    """Whether version 2.0 wrote it, with an entry a rank."""
    return any(_ENTRY.match(name) for name in state_dict)


def joined_state(state_dict: Mapping[str, Any], shards: ModelShards) -> dict[str, Any]:
    """The state dict with whole tensors, split as `shards` are.

    Raises:
        PlanError: it was written for another number of ranks, or parts do not make up the whole.
    """
    by_name: dict[str, dict[int, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in state_dict.items():
        match = _ENTRY.match(name)
        if match is None:
            plain[name] = value
        else:
            by_name.setdefault(match[2].replace(_INFIX, ""), {})[int(match[1])] = value
    ranks = 1 + max(rank for parts in by_name.values() for rank in parts)
    if ranks != shards.world_size:
        raise PlanError(
            f"the state dict has parts of {ranks} ranks, and the model is split over {shards.world_size}: split it "
            f"over {ranks} devices, load, and save it again; what is saved then serves any number"
        )
    known = {name: tensor for tensor in shards.tensors.values() for name in tensor.plan.names}
    for name, parts in by_name.items():
        found = [parts[rank] for rank in sorted(parts)]
        split = known.get(name)
        if len(found) < ranks:
            missing = sorted(set(range(ranks)) - parts.keys())
            raise PlanError(f"{name}: the state dict has no part of rank {', '.join(map(str, missing))}")
        plain[name] = found[0] if split is None else _whole(name, found, split, _was_scaled(name, by_name, known))
    return plain


def _whole(name: str, parts: list[Any], split: SplitTensor, scaled: bool) -> Any:
    shape, first = split.plan.layout.shape, parts[0]
    if split.is_cut and all(tuple(parts[p.ranks[0]].shape) == tuple(p.tensor.shape) for p in split.pieces):
        return split.joined([parts[piece.ranks[0]] for piece in split.pieces])
    if all(tuple(part.shape) == tuple(shape) for part in parts):
        return _sum(parts) if scaled else first
    dims = [
        dim
        for dim in range(len(shape))
        if sum(part.shape[dim] for part in parts) == shape[dim]
        and all(_without(part, dim) == _without(first, dim) for part in parts)
    ]
    packed = any(len(dim.segments) > 1 for dim in split.plan.layout.dims)
    if len(dims) != 1 or packed:
        shapes = [tuple(part.shape) for part in parts]
        raise PlanError(
            f"{name}: parts of shapes {shapes} do not say how they make up the whole, {tuple(shape)}; split the model "
            "with the tensor_parallel_config by which they were made"
        )
    return torch.cat([part.to(first.device) for part in parts], dims[0])


def _was_scaled(name: str, by_name: Mapping[str, Any], known: Mapping[str, SplitTensor]) -> bool:
    """Whether a bias was divided by the number of ranks: each rank has all of it and a part of the weight beside it, so
    that the outputs are partial sums."""
    module, _, last = name.rpartition(".")
    weight = f"{module}.weight" if module else "weight"
    if last != "bias" or weight not in by_name or weight not in known:
        return False
    whole = tuple(known[weight].plan.layout.shape)
    return any(tuple(part.shape) != whole for part in by_name[weight].values())


def _without(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part.to(total.device)
    return total
