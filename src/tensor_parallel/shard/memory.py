"""What the devices hold, for reports and for whoever runs out of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from tensor_parallel.comm.failures import is_out_of_memory
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


def gradients_held(shards: ModelShards) -> list[int]:
    """Bytes of the gradients that lie on each rank, by rank: the first one of those that share a leaf has them all."""
    held = [0] * len(shards.devices)
    for tensor in shards.tensors.values():
        for piece in tensor.pieces:
            held[piece.ranks[0]] += 0 if piece.tensor.grad is None else piece.tensor.grad.nbytes
    return held


def buffers_held(root: nn.Module, shards: ModelShards) -> list[int]:
    """Bytes of each rank's own buffers, by rank; of a tree that is not there yet 0."""
    trees = [root, *shards.hidden]
    held = [sum(buffer.nbytes for buffer in tree.buffers()) for tree in trees]
    return held + [0] * (len(shards.devices) - len(held))


When = Literal["in a forward", "in a backward", "while the model was being split"]


def explain_if_out_of_memory(
    error: BaseException, shards: ModelShards, when: When, root: nn.Module | None = None
) -> None:
    """Say in a note on an out-of-memory error what each rank held, and what helps this model; once. Which rank failed
    says a note of its own.

    root: rank 0's tree, where `shards` does not know it yet.
    """
    if not is_out_of_memory(error) or getattr(error, "_tp_explained", False):
        return
    known = shards.visible.get("")
    root = known() if root is None and known is not None else root
    lines = [f"out of memory {when}; the ranks held:"]
    buffers = [0] * len(shards.devices) if root is None else buffers_held(root, shards)
    kinds = zip(bytes_held(shards), gradients_held(shards), buffers, strict=True)
    for rank, (device, held) in enumerate(zip(shards.devices, kinds, strict=True)):
        parameters, gradients, own = map(bytes_text, held)
        line = f"  rank {rank} on {device}: parameters {parameters}, gradients {gradients}, buffers {own}"
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            line += f", {bytes_text(torch.cuda.memory_allocated(device))} of {bytes_text(total)} allocated by torch"
        lines.append(line)
    error.add_note("\n".join([*lines, _cure(root, when)]))
    error._tp_explained = True  # type: ignore[attr-defined]


def explaining_backward(shards: ModelShards) -> Callable[[BaseException], None]:
    """What a joint node's backward explains its out-of-memory by; does not keep the model alive."""
    found = weakref.ref(shards)

    def explain(error: BaseException) -> None:
        alive = found()
        if alive is not None:
            explain_if_out_of_memory(error, alive, "in a backward")

    return explain


def _cure(root: nn.Module | None, when: When) -> str:
    cures = ["more devices", "a smaller dtype (model.to(torch.bfloat16))"]
    if when == "while the model was being split":
        cures += ["a model that lies on the CPU before it is split", "devices that nothing else uses"]
    else:
        cures.append("shorter or fewer rows in a batch")
        cures.append(f"in training activation checkpointing ({_checkpointing(root)})")
    if when == "in a forward":
        cures.append("where no gradients are needed, torch.inference_mode()")
    return "what helps: " + ", ".join(cures)


def _checkpointing(root: nn.Module | None) -> str:
    """How this very model is checkpointed."""
    if getattr(root, "supports_gradient_checkpointing", False):
        for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
            if hasattr(root, name):
                return f"model.{name}()"
    return "torch.utils.checkpoint around its layers"
