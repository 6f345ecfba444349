"""Ways of running a model that do not reach the ranks' threads, and would give constants or zeros there."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as fwAD
import torch.fx


def refuse_transforms(name: str, recomputing: bool = False) -> None:
    """Raise NotImplementedError where torch traces, scripts or transforms what the calling thread does.

    recomputing: a backward runs a part of the model again, which a torch.func transform alone can touch.
    """
    what = _under_way(recomputing)
    if what:
        raise NotImplementedError(
            f"{what} cannot pass through {name or 'a model'} that is split over threads: it does not reach them; use "
            "it on the unsplit model (copy.deepcopy within `with tp.whole_parameters(model):` gives one), or leave it "
            "out"
        )


def refuse_proxy(value: object) -> None:
    """Raise NotImplementedError for what torch.fx puts in place of a tensor."""
    if isinstance(value, torch.fx.Proxy):
        raise NotImplementedError(
            "torch.fx cannot trace a model that is split over threads; trace the unsplit model, then split it"
        )


def _under_way(recomputing: bool) -> str:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform (grad, vmap, jvp, ...)"
    if recomputing:
        return ""
    if fwAD._current_level >= 0:
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    if torch._C._is_tracing():
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.compiler.is_compiling():
        return "torch.compile"
    return ""
