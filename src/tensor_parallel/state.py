"""Whole tensors of a split model, under the names of the unsplit one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensor_parallel.errors import PlanError
from tensor_parallel.plan import Config, Plan, resolve
from tensor_parallel.shard import MARK, named_tensors, part_of, shards_of, up_to_date


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The unsplit model's state dict: whole tensors, tied weights sharing one; the same as `model.state_dict()`.

    Raises:
        TensorParallelError: the model is not split.
    """
    shards_of(model)
    found: dict[str, Any] = model.state_dict()
    return found


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter by its name in the unsplit model's `named_parameters()` (of tied ones the
    first); parameters that none arrived at are left out.

    Raises:
        TensorParallelError: the model is not split.
    """
    found = {}
    for key, tensor in named_tensors(up_to_date(model)):
        gradient = tensor.whole_gradient()
        if gradient is not None:
            found[key] = gradient
    return found


@contextmanager
def save_tensor_parallel(model: nn.Module) -> Iterator[nn.Module]:
    """Version 2.0's way to save plain files: within it `torch.save(model.state_dict(), path)` or
    `model.save_pretrained(path)`. They are plain outside of it too.

    Raises:
        TensorParallelError: the model is not split.
    """
    shards_of(model)
    yield model


def convert_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    tensor_parallel_config: Plan | Config,
    world_size: int,
    for_pretrained: bool = False,
) -> dict[str, torch.Tensor]:
    """A plain state dict, or a piece of one, as the ranks' parts: `module_shards.RANK.NAME`, for a model that was split
    before it had values (see docs/from-2.0.md).

    tensor_parallel_config: `model.tensor_parallel_config`: the rules that were given, or the plan that was found.
    world_size: the number of ranks.  for_pretrained: for a TensorParallelPreTrainedModel, whose names 2.0 began with
        `wrapped_model.`.

    Raises:
        PlanError: a name that the plan does not know, or a tensor that it cannot cut.
    """
    plan = tensor_parallel_config
    if isinstance(plan, Config):
        plan = plan.plan_of_tensors(state_dict, world_size)
    resolved, prefix = resolve(plan, world_size), "wrapped_model." if for_pretrained else ""
    by_name = {name: tensor for tensor in plan.tensors.values() for name in tensor.names}
    found = {}
    for name, whole in state_dict.items():
        if name not in by_name:
            raise PlanError(f"{name} is none of the plan's tensors; give the model's own tensor_parallel_config")
        for rank in range(world_size):
            found[f"{prefix}module_shards.{rank}.{name}"] = part_of(whole, by_name[name], resolved.cuts, rank)
    return found


def infer_sharded_device_map(model: nn.Module) -> dict[str, torch.device]:
    """Where each part of a split model goes, by name (`module_shards.RANK.NAME`, for transformers models after
    `wrapped_model.`), for accelerate's loading of a model that was split before it had values.

    Raises:
        TensorParallelError: the model is not split.
    """
    shards = shards_of(model)
    prefix = "wrapped_model." if hasattr(model, "wrapped_model") else ""
    pending = shards.pending
    devices = shards.devices if pending is None or pending.devices is None else pending.devices
    found = {}
    for rank, tree in enumerate(shards.trees):
        for walk in (tree.named_parameters, tree.named_buffers):
            for name, _ in walk(remove_duplicate=False):
                if MARK not in name:
                    found[f"{prefix}module_shards.{rank}.{name}"] = devices[rank]
    return found
