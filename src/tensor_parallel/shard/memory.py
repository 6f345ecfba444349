"""What the devices hold, for whoever runs out of memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tensor_parallel.plan.table import bytes_text
from tensor_parallel.shard.shards import ModelShards

_CURE = (
    "what helps: more devices, shorter or fewer rows in a batch, activation checkpointing "
    "(model.activation_checkpointing_enable()) in training, a smaller dtype (model.to(torch.bfloat16))"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator refused: of a GPU, or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explain_out_of_memory(error: BaseException, shards: ModelShards) -> None:
    """Say in a note on the error what each device held, rank by rank, and what helps."""
    if getattr(error, "_tp_explained", False):
        return
    lines = ["out of memory while the model was split as follows:"]
    for rank, device in enumerate(shards.devices):
        owned = [piece.tensor for t in shards.tensors.values() for piece in t.pieces if piece.ranks[0] == rank]
        copies = [
            piece.tensor
            for t in shards.tensors.values()
            for piece in t.pieces
            if rank in piece.ranks[1:] and shards.devices[piece.ranks[0]] != device
        ]
        held = f"parameters {_total(owned + copies)}, gradients {_total(t.grad for t in owned if t.grad is not None)}"
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            held += f", {bytes_text(torch.cuda.memory_allocated(device))} of {bytes_text(total)} allocated by torch"
        lines.append(f"  rank {rank} on {device}: {held}")
    error.add_note("\n".join([*lines, _CURE]))
    error._tp_explained = True  # type: ignore[attr-defined]


def _total(tensors: Iterable[torch.Tensor]) -> str:
    return bytes_text(sum(tensor.nbytes for tensor in tensors))
