"""Which rank failed first, in a note on the error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

_RAISED = "raised on rank "


class Owner(Protocol):
    """Whoever the ranks of a joint node belong to.

    on_out_of_memory: says in a note on an error of a backward what every rank held; set by whoever knows.
    """

    on_out_of_memory: Callable[[BaseException], None] | None

    def is_rank(self) -> bool:
        """Whether the calling thread runs a rank: a gradient taken there would see one rank's part alone."""
        ...

    def check_backward(self) -> None:
        """Raises where backward cannot go through a joint node: inside a rank, or after the parts were changed."""
        ...


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator refused: of a GPU, or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))
    )


def note_rank(error: BaseException, rank: int, device: torch.device) -> None:
    """Name the rank that failed. Of an out-of-memory the first one named counts: the last rank to come to a collective
    allocates for the others."""
    notes = getattr(error, "__notes__", ())
    note = f"{_RAISED}{rank} ({device})"
    if note in notes or (is_out_of_memory(error) and any(known.startswith(_RAISED) for known in notes)):
        return
    error.add_note(note)


def note_allocation(error: BaseException, rank: int, device: torch.device) -> None:
    """As `note_rank`, for an out-of-memory alone: whoever else fails in joint work did not fail for that rank."""
    if is_out_of_memory(error):
        note_rank(error, rank, device)


Backward = TypeVar("Backward", bound=Callable[..., Any])


def explained(backward: Backward) -> Backward:
    """A joint node's backward, whose out-of-memory says what the ranks held. No team runs it that would say so."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: torch.Tensor | None) -> Any:
        try:
            return backward(ctx, *grads)
        except Exception as error:
            explain = None if ctx.owner is None else ctx.owner.on_out_of_memory
            if explain is not None and is_out_of_memory(error):
                explain(error)
            raise

    return wrapped  # type: ignore[return-value]
