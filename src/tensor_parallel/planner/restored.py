"""A module after a trace is what it was before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tensor_parallel.own_hooks import is_own, is_recorder

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Whatever a forward changes is put back: buffers, hooks that it registers, attributes that it adds, and the
    random states. The user's hooks
    do not run: they are none of the model's work, and would see example inputs."""
    saved = [(b, b.detach().clone()) for b in module.buffers()]
    named = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    hooks = [(holder, dict(holder)) for part in module.modules() for holder in _hooks(part)]
    attributes = [(part.__dict__, set(part.__dict__)) for part in module.modules()]
    for holder, known in hooks:
        for key, hook in known.items():
            if callable(hook) and not is_own(hook) and not is_recorder(hook):
                del holder[key]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for own, names in attributes:
            for name in [name for name in own if name not in names]:
                del own[name]
        for holder, known in hooks:
            holder.clear()
            holder.update(known)
        for found, before in named:
            if any(found.get(name) is not buffer for name, buffer in before.items()):
                found.update(before)
        with torch.no_grad():
            for buffer, copy in saved:
                # Not by version: a batch norm under a dispatch mode writes its statistics without a new one.
                if not buffer.is_meta and not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [module.__dict__[name] for name in _HOOKS if name in module.__dict__]
