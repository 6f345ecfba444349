"""The end of a forward: what the model's own code does after its last gather (a loss, say), rank 0 does alone.

The other ranks stand by. Where rank 0 calls a collective after all, on a path that the plan does not know, they go on
with it; where it is done they leave the forward by an exception, for nobody looks at what they would return.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from tensor_parallel.layout import Placement
from tensor_parallel.shard.borders import Convert, RankView
from tensor_parallel.shard.hooks import opaque
from tensor_parallel.shard.shards import slot_of

_PLAIN = (bool, int, float, str, type(None))


class Done(BaseException):
    """A rank is not needed any more in this run. No Exception: the model's code must not catch it."""


class Tail:
    """Whether the run under way ends so, and the objects that modules gave on the way, by rank: the caches among them
    belong together, and the other ranks return none."""

    def __init__(self, world_size: int) -> None:
        self.on = False
        self.given: list[list[Any]] = [[] for _ in range(world_size)]
        self.in_regions = [0] * world_size
        """By rank, how many checkpoints are around its code now: their recomputation must go the same way."""

    def start(self) -> None:
        self.on = True

    def end(self) -> list[list[Any]]:
        """What modules gave, by rank; nothing is kept."""
        self.on = False
        given, self.given = self.given, [[] for _ in self.given]
        return given

    def exit(self, gather: Convert, placement: Placement, view: RankView) -> Convert:
        """The last gather of `view`'s rank: `gather` where all ranks go on."""
        group = view.group

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            if not self.on or self.in_regions[view.rank]:
                return gather(tensor)
            self.given[view.rank].append(_objects_of_root())
            own = group.stand_by(group.gather_first(tensor, placement, view.cuts))
            if own is None:
                raise Done
            return own

        return leave

    def noting(self, rank: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a child of the root, noting the objects in its output."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self.on:
                self.given[rank].append(opaque(output))
            return output

        return noted


def _objects_of_root() -> dict[str, Any]:
    """The objects that the root's own forward, which is under way, holds in its variables: a cache that it made."""
    found: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        slot = slot_of(own) if isinstance(own := frame.f_locals.get("self"), nn.Module) else None
        if slot is not None and slot.name == "":
            for name, value in frame.f_locals.items():
                objects = {path: leaf for path, leaf in opaque(value).items() if not isinstance(leaf, nn.Module)}
                found.setdefault(name, objects)
        elif found:
            break
        frame = frame.f_back
    return found


def follow_plain_attributes(root: nn.Module, peers: list[nn.Module]) -> None:
    """Numbers and words that rank 0's forward wrote into the root after the others had left."""
    for name, value in root.__dict__.items():
        if isinstance(value, _PLAIN):
            for peer in peers:
                if peer.__dict__.get(name, value) != value:
                    peer.__dict__[name] = value
