"""Whole tensors of a split model, under the names of the unsplit one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def save_tensor_parallel(model: nn.Module) -> Iterator[nn.Module]:
    """Version 2.0's way to save plain files: within it `torch.save(model.state_dict(), path)` or
    `model.save_pretrained(path)`. They are plain outside of it too.

    Raises:
        TensorParallelError: the model is not split.
    """
    shards_of(model)
    yield model
