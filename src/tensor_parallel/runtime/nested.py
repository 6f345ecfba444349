"""Rank 0 at the user's own code in the middle of a run: a hook, a patched forward.

While it runs, rank 0's thread counts as the caller's (no rank runs in it), and the other ranks serve: what the user's
code asks of the split model runs on all of them, in rank 0's thread for rank 0.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tensor_parallel.comm.rendezvous import Rendezvous
from tensor_parallel.runtime.caller_state import CallerState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Request:
    """One run that the user's code asked for. variables: context variables that it has set; beside them each rank keeps
    its own context (the lists that transformers collects hidden states in are one a rank)."""

    work: Callable[[int], Any]
    state: CallerState
    variables: list[tuple[contextvars.ContextVar[Any], Any]]

    def serve(self, rank: int, device: torch.device) -> Any:
        for variable, value in self.variables:
            variable.set(value)
        return self.state.call_within(self.work, rank, device)


@dataclass(frozen=True, slots=True)
class _Over:
    """The user's code is done; `result` is what it returned, `error` what it raised."""

    result: Any
    error: Exception | None = None


class NestedRuns:
    """What the ranks of one team do while rank 0 acts as the caller; as deep as hooks call hooked modules."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._thread: int | None = None
        self._hooks: Any = None
        self._context = contextvars.Context()
        self.joint_random = False
        """Whether the run under way draws jointly: one inside it then does so already."""

    def acts_here(self) -> bool:
        """Whether the calling thread is rank 0's at the user's code."""
        return self._thread is not None and self._thread == threading.get_ident()

    def changed_saving(self) -> bool:
        """Whether the user's code has put saved-tensor hooks in place that the other ranks do not have."""
        return bool(_saving() != self._hooks)

    def as_caller(self, rank: int, work: Callable[[list[Any]], T], value: Any) -> T:
        """All ranks call it with a `value` each: rank 0 does `work(values)` as if it were the caller, the others serve
        meanwhile; every rank gets the very result.

        Raises:
            RankError: on the other ranks, where rank 0's work failed.
        """
        meeting = self._meeting
        values = meeting.meet(rank, "user code", _everyones, value, ordered=False)
        if rank:
            served: T = self._serve(rank)
            return served
        thread = threading.get_ident()
        outer = self._thread, self._hooks, self._context
        del meeting.threads[thread]
        self._thread, self._hooks, self._context = thread, _saving(), contextvars.copy_context()
        try:
            result = work(values)
        except Exception as error:
            if meeting.error is None:  # the model's code may catch it: on every rank, then
                meeting.meet(0, "user code", _first, _Over(None, error), ordered=False)
            raise
        finally:
            self._thread, self._hooks, self._context = outer
            meeting.threads[thread] = 0
        meeting.meet(0, "user code", _first, _Over(result), ordered=False)
        return result

    def run(self, work: Callable[[int], T], state: CallerState, joint_random: bool) -> list[T]:
        """`work` on every rank, asked for by the user's code; the results by rank."""
        meeting, thread = self._meeting, threading.get_ident()
        now, missing = contextvars.copy_context(), object()
        changed = [(name, value) for name, value in now.items() if self._context.get(name, missing) is not value]
        meeting.meet(0, "user code", _first, _Request(work, state, changed), ordered=False)
        outer = self._thread, self.joint_random
        self._thread, self.joint_random = None, joint_random
        meeting.threads[thread] = 0
        try:
            own = work(0)
            results: list[T] = meeting.meet(0, "results", _everyones, own, ordered=False)
        except BaseException as error:
            meeting.abort(error, 0)  # the user's code may catch it, and the others must not wait for what never comes
            raise
        finally:
            del meeting.threads[thread]
            self._thread, self.joint_random = outer
        return results

    def _serve(self, rank: int) -> Any:
        meeting = self._meeting
        device = meeting.devices[rank]
        while True:
            message = meeting.meet(rank, "user code", _first, None, ordered=False, patient=True)
            if isinstance(message, _Over):
                if message.error is not None:
                    raise message.error
                return message.result
            result = contextvars.copy_context().run(message.serve, rank, device)
            meeting.meet(rank, "results", _everyones, result, ordered=False)
            del message, result


def _saving() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _everyones(values: list[Any]) -> list[list[Any]]:
    return [values] * len(values)


def _first(values: list[Any]) -> list[Any]:
    return [values[0]] * len(values)
