"""How activation checkpointing reaches a split model: the one place that patches another library's entry points.

`torch.utils.checkpoint.checkpoint` recomputes in whatever thread runs backward, one call at a time; inside a split
model all ranks have to recompute together. Models bind the function by name, so it cannot be exchanged itself; but its
body looks up its two ways, reentrant and not, when it is called. These are exchanged, once, for ones that ask whether a
rank (or a trace) runs in this context, and else do what torch does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint

_MARK = "_tensor_parallel_original"


class Handler(Protocol):
    """Who takes over the checkpoints of a context. plainly: what is checkpointed runs as if it were not."""

    plainly: bool

    def applies(self) -> bool:
        """Whether it does so in the calling thread now."""
        ...

    def again(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Where torch's own checkpointing is right: what it shall recompute in `function`'s place. None: `region` does
        it all."""
        ...

    def region(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], preserve: bool, check: bool
    ) -> AbstractContextManager[None]:
        """Around one call `function(*args, **kwargs)` whose activations are not kept.

        preserve: recompute from the random state of the forward.  check: compare what was recomputed with what was
            saved.
        """
        ...


class Plainly:
    """For a trace, which keeps nothing for backward."""

    plainly = True

    def applies(self) -> bool:
        return True

    def again(self, function: Callable[..., Any]) -> None:
        return None

    def region(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()


_current: ContextVar[Handler | None] = ContextVar("tensor_parallel_checkpoint", default=None)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Hand checkpoints in this context to `handler`."""
    _install()
    token = _current.set(handler)
    try:
        yield
    finally:
        _current.reset(token)


def _here() -> Handler | None:
    handler = _current.get()
    return handler if handler is not None and handler.applies() else None


def _install() -> None:
    if hasattr(torch_checkpoint._checkpoint_without_reentrant_generator, _MARK):
        return
    original = torch_checkpoint._checkpoint_without_reentrant_generator
    reentrant = torch_checkpoint.CheckpointFunction

    def generator(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[..., Any] = torch_checkpoint.noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        handler = _here()
        if handler is None:
            own = (fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop)
            yield from original(*own, *args, **kwargs)
            return
        again = handler.again(fn)
        if again is not None:
            own = (again, preserve_rng_state, context_fn, determinism_check, debug, early_stop)
            yield from original(*own, *args, **kwargs)
            return
        if context_fn is not torch_checkpoint.noop_context_fn and not handler.plainly:
            raise NotImplementedError(
                "checkpoint(context_fn=...), selective checkpointing, cannot be used inside a split model: its modes "
                "would see the collectives of all ranks in one of them; leave it out, or checkpoint around the whole "
                "model"
            )
        with handler.region(fn, args, kwargs, preserve_rng_state, determinism_check != "none"):
            yield

    class CheckpointFunction(reentrant):  # type: ignore[valid-type, misc]
        """torch's own; inside a split model all ranks' recomputation at once."""

        @classmethod
        def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            handler = _here()
            if handler is None:
                return reentrant.apply(function, preserve, *args)  # type: ignore[no-untyped-call]
            again = handler.again(function)
            if again is not None:
                return reentrant.apply(again, preserve, *args)  # type: ignore[no-untyped-call]
            if handler.plainly or not torch.is_grad_enabled():
                return function(*args)
            if not any(torch.is_tensor(a) and a.requires_grad for a in args):
                warnings.warn(
                    "None of the inputs have requires_grad=True. Gradients will be None (checkpoint with "
                    "use_reentrant=True)",
                    stacklevel=2,
                )
                with torch.no_grad():
                    return function(*args)
            with handler.region(function, args, {}, preserve, False):
                return function(*args)

    setattr(generator, _MARK, original)
    CheckpointFunction.__module__ = reentrant.__module__
    CheckpointFunction.__qualname__ = reentrant.__qualname__
    torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]
    torch_checkpoint._checkpoint_without_reentrant_generator = generator
