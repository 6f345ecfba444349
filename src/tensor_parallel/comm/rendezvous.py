"""Where the ranks of one process meet: the last to arrive does the joint work for all, the others sleep until then."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from tensor_parallel.comm.joint import align_backward_order, backward_order
from tensor_parallel.errors import CollectiveError, DeadlineError, RankError, TensorParallelError

Joint = Callable[[list[Any]], Sequence[Any]]
"""What the last rank runs: every rank's value, by rank, in; every rank's result out."""


def describe(op: str, value: Any) -> str:
    """One rank's call of a collective, for people."""
    tensor = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(tensor, torch.Tensor):
        return op
    return f"{op} of a {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} tensor"


class Graphs:
    """The autograd graphs that some ranks made.

    outdated: what was done to the model since, in words, where its parts are no longer what the graphs go through.
    """

    __slots__ = ("outdated",)

    def __init__(self) -> None:
        self.outdated = ""

    def check(self) -> None:
        """Raises TensorParallelError where they are outdated."""
        if self.outdated:
            raise TensorParallelError(
                f"backward of a loss that a split model computed before {self.outdated}: its parts do not lie as they "
                "did then; call backward before that, or compute the loss again"
            )


class Rendezvous:
    """One meeting place for `len(devices)` ranks.

    A slot a rank holds first what the rank brings, then what it takes away; it is emptied at once, so that nothing
    keeps activations alive between two meetings. A rank sleeps on its own lock, which whoever frees it releases exactly
    once.
    """

    def __init__(self, devices: Sequence[torch.device], deadline: float) -> None:
        self.devices = tuple(devices)
        self.deadline = deadline
        self.error: BaseException | None = None
        self.failed: int | None = None
        self.threads: dict[int, int] = {}
        """The rank that runs in each thread, by the thread's ident; filled in by whoever owns the threads."""
        self.standing_by: Callable[[], None] | None = None
        """While the other ranks wait for rank 0 to be done, or to call them again: how it does so."""
        self.intra_op = (1, 1)
        """Threads of torch's own for a rank: while all work, and for one that works alone."""
        self.graphs = Graphs()
        self.on_out_of_memory: Callable[[BaseException], None] | None = None
        """See Owner."""
        self._alone = False
        self.changed_threads = False
        """Whether a rank changed its number since it was set to False: torch takes it for new threads too."""
        self._guard = threading.Lock()
        self._children: weakref.WeakSet[Rendezvous] = weakref.WeakSet()
        self._order = 0
        self.reset()

    @property
    def size(self) -> int:
        return len(self.devices)

    def is_rank(self) -> bool:
        """Whether a rank runs in the calling thread."""
        return threading.get_ident() in self.threads

    def check_backward(self) -> None:
        """Raise where a gradient is taken that would be wrong.

        Raises:
            NotImplementedError: the calling thread runs a rank, and would see its part alone.
            TensorParallelError: the ranks' parts were joined or cut otherwise since the forward.
        """
        if self.is_rank():
            raise NotImplementedError(
                "a gradient was taken inside a rank (torch.autograd.grad or backward in the model's own forward) "
                "through a collective, where it would see one rank's part alone; take it outside the split module"
            )
        self.graphs.check()

    def work_alone(self, alone: bool) -> None:
        """Give the calling thread all cores, while the other ranks wait for it, or take them back."""
        together, all_cores = self.intra_op
        if alone != self._alone and all_cores > together:
            torch.set_num_threads(all_cores if alone else together)
            self._alone = alone
            self.changed_threads = True

    def reset(self) -> None:
        """Forget an error and everything that was under way; only while no rank is in here."""
        with self._guard:
            self.error, self.failed, self.standing_by = None, None, None
            self._slots: list[Any] = [None] * self.size
            self._waiting: list[int] = []
            self._gates = [threading.Lock() for _ in self.devices]
            for gate in self._gates:
                gate.acquire()
            children = list(self._children)
        for child in children:
            child.reset()

    def meet(self, rank: int, op: str, joint: Joint, value: Any, *, ordered: bool = True, patient: bool = False) -> Any:
        """Bring `value`, wait for all ranks, take away this rank's result of `joint`.

        ordered: the ranks are in the same grad mode, and autograd counts on from one number in all of them.
        patient: wait without a deadline, for a rank that runs the user's own code.

        Raises:
            CollectiveError: on the last rank to arrive, where the ranks called different things.
            DeadlineError: the others did not come within the deadline (seconds).
            RankError: another rank failed, in `joint` or elsewhere.
        """
        if rank == 0 and self.standing_by is not None:
            go_on, self.standing_by = self.standing_by, None
            go_on()
        order = backward_order() if ordered and torch.is_grad_enabled() else -1
        with self._guard:
            error = self.error
            if error is None:
                self._slots[rank] = (op, value, order)
                self._waiting.append(rank)
                last = len(self._waiting) == self.size
                if last:
                    self._waiting = []
        if error is not None:
            raise self._released(rank) from error
        if last:
            result = self._complete(rank, joint)
        else:
            if not self._gates[rank].acquire(timeout=-1 if patient else self.deadline):
                self._expired(rank, op, value)
            result, self._slots[rank] = self._slots[rank], None
            if self.error is not None:
                raise self._released(rank) from self.error
        if order >= 0:
            align_backward_order(self._order)
        return result

    def abort(self, error: BaseException, rank: int | None = None) -> None:
        """Free every rank that waits or will wait here, and in the subgroups; the first error counts."""
        with self._guard:
            if self.error is None:
                self.error, self.failed = error, rank
            freed, self._waiting = self._waiting, []
            children = list(self._children)
        for waiting in freed:
            self._gates[waiting].release()
        for child in children:
            child.abort(error, rank)

    def child(self, ranks: Sequence[int]) -> Self:
        """A meeting place for some of the ranks that is aborted and reset with this one."""
        made = type(self)([self.devices[rank] for rank in ranks], self.deadline)
        made.threads, made.graphs = self.threads, self.graphs
        made.on_out_of_memory = self.on_out_of_memory
        self._children.add(made)
        return made

    def _complete(self, rank: int, joint: Joint) -> Any:
        entries, self._slots = self._slots, [None] * self.size
        try:
            results = self._run(entries, joint)
            self._slots[:] = results
            result, self._slots[rank] = results[rank], None
            return result
        except BaseException as error:
            self.abort(error, rank)
            raise
        finally:
            for other in range(self.size):
                if other != rank:
                    self._gates[other].release()

    def _run(self, entries: list[Any], joint: Joint) -> Sequence[Any]:
        op, _, order = entries[0]
        orders = [entry[2] for entry in entries]
        if any(entry[0] != op or (entry[2] < 0) != (order < 0) for entry in entries):
            raise CollectiveError(_different(entries))
        align_backward_order(max(orders))
        results = joint([entry[1] for entry in entries])
        self._order = backward_order()
        return results

    def _released(self, rank: int) -> RankError:
        where = "the caller" if self.failed is None else f"rank {self.failed}"
        return RankError(f"rank {rank} was released because {where} failed: {self.error!r}")

    def _expired(self, rank: int, op: str, value: Any) -> None:
        with self._guard:
            waits = rank in self._waiting
            missing = [other for other in range(self.size) if other not in self._waiting]
        if not waits:  # freed this very moment, or the last rank is at work: its result is on the way
            self._gates[rank].acquire()
            return
        error = DeadlineError(
            f"rank {rank} waited {self.deadline:g} s in {describe(op, value)}, and rank "
            f"{', '.join(map(str, missing))} of {self.size} did not come; all ranks must call the same collectives in "
            "the same order, and a longer deadline is needed where one of them works longer than that"
        )
        self.abort(error, rank)
        self._gates[rank].acquire()
        try:
            raise error
        finally:
            del error  # the traceback holds this frame


def _different(entries: list[Any]) -> str:
    calls = [
        f"rank {rank}: {describe(op, value)}{'' if order < 0 else ' with gradients'}"
        for rank, (op, value, order) in enumerate(entries)
    ]
    return f"the ranks called different collectives ({'; '.join(calls)}); all must call the same in the same order"
