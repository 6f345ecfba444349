"""What the devices hold, for reports and for whoever runs out of memory."""

from __future__ import annotations

import torch
from torch import nn

from tensor_parallel.plan.table import bytes_text
from tensor_parallel.shard.shards import ModelShards


def bytes_held(shards: ModelShards) -> list[int]:
    """Bytes of the parameters that each rank holds, by rank; what several ranks hold counts at each of them."""
    held = [0] * len(shards.devices)
    for tensor in shards.tensors.values():
        if tensor.plan.is_buffer:
            continue
        for piece in tensor.pieces:
            for rank in piece.ranks[:1] if tensor.plan.rank0_only else piece.ranks:
                held[rank] += piece.tensor.nbytes
    return held


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator refused: of a GPU, or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explain_out_of_memory(
    error: BaseException, shards: ModelShards, model: nn.Module, *, splitting: bool = False
) -> None:
    """Say in a note on the error what each device held, rank by rank, and what helps this model. The rank that failed
    has a note of its own, where it was one."""
    if getattr(error, "_tp_explained", False):
        return
    gradients = [0] * len(shards.devices)
    for tensor in shards.tensors.values():
        for piece in tensor.pieces:
            gradients[piece.ranks[0]] += 0 if piece.tensor.grad is None else piece.tensor.grad.nbytes
    lines = [f"out of memory while the model was {'being split' if splitting else 'split'} as follows:"]
    for rank, (device, held) in enumerate(zip(shards.devices, bytes_held(shards), strict=True)):
        line = f"  rank {rank} on {device}: parameters {bytes_text(held)}, gradients {bytes_text(gradients[rank])}"
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            line += f", {bytes_text(torch.cuda.memory_allocated(device))} of {bytes_text(total)} allocated by torch"
        lines.append(line)
    error.add_note("\n".join([*lines, _cure(model, splitting)]))
    error._tp_explained = True  # type: ignore[attr-defined]


def _cure(model: nn.Module, splitting: bool) -> str:
    cures = ["more devices", "a smaller dtype (model.to(torch.bfloat16))"]
    if splitting:
        cures += ["a model that lies on the CPU before it is split", "devices that nothing else uses"]
    else:
        cures.append("shorter or fewer rows in a batch")
        own = hasattr(model, "activation_checkpointing_enable")
        how = "model.activation_checkpointing_enable()" if own else "torch.utils.checkpoint around its layers"
        cures.append(f"in training activation checkpointing ({how})")
        cures.append("where no gradients are needed, torch.inference_mode()")
    return "what helps: " + ", ".join(cures)
