"""Random draws of a rank that is a process: the generators of all ranks are in one state when a run begins, so each
draws the whole model's numbers and takes its part of them (see joint_random.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tensor_parallel.comm.draws import DRAWING, Layouts, draws
from tensor_parallel.runtime.joint_random import Call, own_part


class OwnRandom(TorchFunctionMode):
    """One rank's view; active in its thread for a run.  here: whether the rank's own code runs."""

    def __init__(self, rank: int, size: int, layouts: Layouts, here: Callable[[], bool]) -> None:
        super().__init__()
        self._rank, self._size = rank, size
        self._layouts, self._here = layouts, here

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func not in DRAWING or not self._here():
            return func(*args, **given)
        drawn = self._layouts(self._rank, getattr(func, "__name__", str(func)))
        if not draws(func, args, given):
            return func(*args, **given)
        call = Call(func, args, given, drawn, None)
        rest = own_part(call, self._rank, self._size)
        if rest is not None:
            return rest()
        if drawn is None:
            return _aside(call)
        if drawn.placement.kind == "shard" and self._size > 1:
            raise NotImplementedError(
                f"{call.name} draws random numbers for a tensor that is split over processes, and they cannot be taken "
                "from those of the whole tensor; use tp.tensor_parallel in one process, or a plan that keeps it whole"
            )
        return func(*args, **given)


def _aside(call: Call) -> Any:
    """The call, after which the generators of all ranks are in one state again, whatever each rank's tensor took."""
    tensor = call.tensor
    cuda = [tensor.device] if isinstance(tensor, torch.Tensor) and tensor.is_cuda else []
    with torch.random.fork_rng(devices=cuda):
        result = call.run()
    for device in [torch.device("cpu"), *cuda]:
        torch.empty(1, device=device).uniform_()
    return result
