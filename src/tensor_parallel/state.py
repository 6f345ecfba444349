"""Whole tensors of a split model, under the names of the unsplit one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tensor_parallel.shard import named_tensors, shards_of


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
    for key, tensor in named_tensors(shards_of(model)):
        gradient = tensor.whole_gradient()
        if gradient is not None:
            found[key] = gradient
    return found
