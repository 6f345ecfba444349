"""The end of a forward: what the model's own code does after its last gather (a loss, say), rank 0 does alone.

The other ranks stand by. Where rank 0 calls a collective after all, on a path that the plan does not know, they go on
with it; where it is done they leave the forward by an exception, for nobody looks at what they would return.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensor_parallel.errors import TensorParallelError
from tensor_parallel.layout import Placement
from tensor_parallel.shard.borders import Convert, RankView
from tensor_parallel.shard.hooks import opaque
from tensor_parallel.shard.one_run import Run
from tensor_parallel.shard.shards import ModelShards

_PLAIN = (bool, int, float, str, type(None))


class Done(BaseException):
    """A rank is not needed any more in this run. No Exception: the model's code must not catch it."""


class Tail:
    """What modules of one split model do for it: all of them ask the run under way whether it ends so."""

    def __init__(self, shards: ModelShards) -> None:
        self._shards = weakref.ref(shards)

    def _run(self) -> Run:
        shards = self._shards()
        if shards is None:
            raise TensorParallelError("the split model of this rank was deleted")
        return shards.run

    def exit(self, gather: Convert, placement: Placement, view: RankView) -> Convert:
        """The last gather of `view`'s rank: `gather` where all ranks go on."""
        group = view.group

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            run = self._run()
            if not run.ends_alone or run.in_regions[view.rank]:
                return gather(tensor)
            own = group.stand_by(group.gather_first(tensor, placement, view.cuts))
            if own is None:
                raise Done
            return own

        return leave

    def noting(self, rank: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module that the root's own code calls, noting the objects that it gets and gives: a cache
        that the root made is of use to nobody else."""

        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = forward(module, *args, **kwargs)
            run = self._run()
            if run.ends_alone:
                run.given[rank].append(opaque((args, kwargs, output)))
            return output

        return noted


def follow_plain_attributes(root: nn.Module, peers: list[nn.Module]) -> None:
    """Numbers and words that rank 0's forward wrote into the root after the others had left."""
    for name, value in root.__dict__.items():
        if isinstance(value, _PLAIN):
            for peer in peers:
                if peer.__dict__.get(name, value) != value:
                    peer.__dict__[name] = value
