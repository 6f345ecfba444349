"""Optimisers of split models: one that holds some parts of a weight and not others would tear it apart in silence."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensor_parallel.errors import TensorParallelError
from tensor_parallel.shard.shards import ModelShards


def check_optimizers(shards: ModelShards) -> None:
    """Look at each optimiser at its first step; as long as the model lives."""
    model = weakref.ref(shards)
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        alive = model()
        if alive is not None and optimizer not in seen:
            _check(optimizer, alive)
            seen.add(optimizer)

    weakref.finalize(shards, register_optimizer_step_pre_hook(check).remove)


def _check(optimizer: torch.optim.Optimizer, shards: ModelShards) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key, split in shards.tensors.items():
        trained = [piece for piece in split.pieces if piece.tensor.requires_grad or id(piece.tensor) in held]
        missing = [piece.ranks[0] for piece in trained if id(piece.tensor) not in held]
        if missing and len(missing) < len(trained):
            raise TensorParallelError(
                f"this {type(optimizer).__name__} holds some parts of {key} and not those of rank "
                f"{', '.join(map(str, missing))}: its step would tear the weight apart. Give it all of "
                f"model.parameters() or named_parameters() ({key}@1 stands beside {key}), and make it after the model "
                "was changed"
            )
