"""State dicts speak of whole tensors under the unsplit model's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensor_parallel.shard.pieces import MARK, SplitTensor
from tensor_parallel.shard.shards import Slot


def _cut_tensors(module: nn.Module, slot: Slot) -> dict[str, SplitTensor]:
    """The module's own cut parameters and buffers by plain local name."""
    shards = slot.shards
    found = {}
    for holder in (module._parameters, module._buffers):
        for name, tensor in holder.items():
            key = shards.key_of.get(id(tensor))
            if key is not None and MARK not in name and shards.tensors[key].is_cut:
                found[name] = shards.tensors[key]
    return found


def save_whole(module: nn.Module, slot: Slot, own: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """In a module's own part of a state dict, put whole tensors for rank 0's parts and leave out the others'."""
    shards = slot.shards
    for name in module._parameters:
        if MARK in name:
            own.pop(prefix + name, None)
    for name in _cut_tensors(module, slot):
        if prefix + name not in own:
            continue
        part = module._parameters.get(name)
        tensor = part if part is not None else module._buffers[name]
        whole = shards.whole(shards.key_of[id(tensor)])
        own[prefix + name] = (
            nn.Parameter(whole, requires_grad=part.requires_grad) if keep_vars and part is not None else whole
        )


@contextmanager
def load_whole(module: nn.Module, slot: Slot, assign: bool) -> Iterator[None]:
    """Within it the module holds whole tensors to load into, and no other rank's parts; after it, what was loaded is
    cut and handed to all ranks, into the same leaves as before."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    cut_tensors = _cut_tensors(module, slot)
    empty: dict[str, torch.Tensor] = {}
    for name, split in cut_tensors.items():
        like = split.pieces[0].tensor
        whole = torch.empty(split.plan.layout.shape, dtype=like.dtype, device="cpu")
        empty[name] = nn.Parameter(whole, requires_grad=like.requires_grad) if name in parameters else whole
    versions = {name: tensor._version for name, tensor in empty.items()}
    own = {name: empty.get(name, p) for name, p in parameters.items() if MARK not in name}
    _replace(module._parameters, own)
    _replace(module._buffers, {name: empty.get(name, b) for name, b in buffers.items()})
    slot.loading = True
    try:
        yield
        loaded = {**module._buffers, **module._parameters}
    finally:
        slot.loading = False
        _replace(module._parameters, parameters)
        kept = {n: b if n in cut_tensors else module._buffers.get(n, b) for n, b in buffers.items()}
        _replace(module._buffers, kept)
    for name, split in cut_tensors.items():
        tensor = loaded[name]
        if tensor is None:
            continue
        if tensor is not empty[name]:
            split.assign(tensor)
        elif tensor._version != versions[name]:
            split.put(tensor)
    if assign:
        _assign_kept(slot, parameters, loaded, cut_tensors)
    _hand_on(slot, cut_tensors)
    slot.shards.forget_buffers(module._buffers)


def _assign_kept(
    slot: Slot, parameters: dict[str, Any], loaded: dict[str, Any], cut_tensors: dict[str, SplitTensor]
) -> None:
    for name, old in parameters.items():
        new = loaded.get(name)
        if MARK in name or name in cut_tensors or new is None or old is None or new is old:
            continue
        old.data = new.detach().to(old.device)
        for peer in slot.peers():
            zeros = peer._parameters[name]
            if zeros is not None and zeros is not old:
                peer._parameters[name] = zeros.to(old.dtype)  # type: ignore[assignment]


def _hand_on(slot: Slot, cut_tensors: dict[str, SplitTensor]) -> None:
    """Give the other ranks their own copies of what was loaded: stand-ins, and parts of buffers."""
    for rank, peer in enumerate(slot.peers(), start=1):
        for name, split in cut_tensors.items():
            holder: Any = peer._parameters if name in peer._parameters else peer._buffers
            old = holder[name]
            if not any(piece.tensor is old for piece in split.pieces):
                holder[name] = split.part(split.whole(), rank, old.device)


def _replace(holder: Any, items: dict[str, Any]) -> None:
    holder.clear()
    holder.update(items)
