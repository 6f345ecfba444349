"""Ranks as threads of one process: one persistent thread a rank, and a caller that hands them work and waits."""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tensor_parallel.comm.draws import Layouts
from tensor_parallel.comm.failures import Owner, note_rank
from tensor_parallel.comm.joint import align_backward_order, backward_order
from tensor_parallel.comm.rendezvous import Graphs, Rendezvous
from tensor_parallel.comm.threads import ThreadGroup, thread_groups
from tensor_parallel.runtime.caller_state import CallerState, forget_casts
from tensor_parallel.runtime.joint_random import JointRandom
from tensor_parallel.runtime.nested import NestedRuns
from tensor_parallel.runtime.saved_tensors import SavedTensors

T = TypeVar("T")

_SLICE = 0.5
"""Seconds after which a waiting caller looks up for signals."""

_FARTHEST_ORDER = 1_000_000
"""How far two threads' counts of autograd nodes may lie apart to be aligned (0.1 us a node)."""


class _Job:
    """One run: what the ranks share of it. A rank takes it once, however often it is handed over."""

    def __init__(self, work: Callable[[int], Any], state: CallerState, meeting: Rendezvous, order: int) -> None:
        ranks = range(meeting.size)
        self.work: Callable[[int], Any] | None = work
        self.state: CallerState | None = state
        self.contexts = [contextvars.copy_context() for _ in ranks]
        self.results: list[Any] = [None for _ in ranks]
        self.meeting = meeting
        self.first_order = order
        self.last_order = order
        self.failed = False
        self.over = False
        self._taken = [False for _ in ranks]
        self._left = meeting.size
        self._guard = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def serve(self, rank: int) -> None:
        """Do `rank`'s share, in its thread."""
        with self._guard:
            if self._taken[rank]:
                return
            self._taken[rank] = True
        self._work(rank)
        with self._guard:
            self.last_order = max(self.last_order, backward_order())
            self._left -= 1
            self.over = self._left == 0
        if self.over:
            self._done.release()

    def _work(self, rank: int) -> None:
        meeting, state, work = self.meeting, self.state, self.work
        if meeting.error is not None or state is None or work is None:  # failed before this rank began
            self.failed = True
            return
        try:
            if state.grad:
                align_backward_order(self.first_order)
            self.results[rank] = self.contexts[rank].run(state.call, work, rank, meeting.devices[rank])
        except BaseException as error:
            self.failed = True
            meeting.abort(error, rank)
            if rank == 0:
                meeting.work_alone(False)

    def wait(self) -> None:
        # In slices: a signal that comes just before the wait begins does not end it.
        while not (self.over or self._done.acquire(timeout=_SLICE)):
            pass

    def clear(self) -> list[Any]:
        """The results; lets go of everything, which a rank's thread may still hold by this job for a moment."""
        results, self.results = self.results, []
        self.work = self.state = None
        self.contexts = []
        return results


_Queue = SimpleQueue[_Job | None]


class ThreadTeam:
    """`len(devices)` ranks, each in a persistent thread with its device current.

    devices: one a rank; a device may be named several times.
    deadline: seconds that a rank waits for the others in one collective.
    """

    def __init__(self, devices: Sequence[torch.device], deadline: float = 600.0) -> None:
        self.devices = tuple(
            torch.device("cpu") if device.type == "cpu" else device for device in map(torch.device, devices)
        )
        self.groups: list[ThreadGroup] = thread_groups(self.devices, deadline)
        self._meeting = self.groups[0].rendezvous
        types = dict.fromkeys(["cpu", *(device.type for device in self.devices)])
        self._nested = NestedRuns(self._meeting)
        self._types = tuple(filter(torch.amp.is_autocast_available, types))
        self._cuda = tuple(dict.fromkeys(device for device in self.devices if device.type == "cuda"))
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._order = 0
        self._unfinished: _Job | None = None
        self._queues: list[_Queue] = [SimpleQueue() for _ in self.devices]
        self._stop = weakref.finalize(self, _stop, self._queues)
        self._threads = self._start()

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def graphs(self) -> Graphs:
        """What autograd made of its runs."""
        return self._meeting.graphs

    @property
    def owner(self) -> Owner:
        """What joint nodes made outside of the ranks' threads belong to."""
        return self._meeting

    def rank_here(self) -> int | None:
        """The rank that runs in the calling thread; None in any other thread."""
        return self._meeting.threads.get(threading.get_ident())

    def run(self, work: Callable[[int], T], *, joint_random: bool | Layouts = False) -> list[T]:
        """`work(rank)` in every rank's thread, under the caller's own state (grad mode, autocast, modes, saved-tensor
        hooks, context variables); the results by rank. Callers in several threads take turns; rank 0 acting as the
        caller (`as_caller`) is served inside the run under way.

        joint_random: the ranks make their random calls together and get those of the unsplit model (see
            joint_random.py), best with what is known of how their tensors lie; without it ranks race for the generator.

        Raises:
            BaseException: the first one that a rank raised, itself, with a note that names the rank; the other ranks
                are freed first, and the team can be used again.
            RuntimeError: called by one of the ranks, after close(), or in a forked process.
        """
        self._check_usable()
        nested, inside = self._nested, self._nested.acts_here()
        state = CallerState.capture(self._types, self._cuda)
        saved = SavedTensors.of_caller(self.world_size) if not inside or nested.changed_saving() else None
        if saved is not None:
            work = saved.around(work)
        if inside:
            joint_before = nested.joint_random
            if joint_random and not joint_before:
                work = self._drawing_jointly(work, joint_random)
            results = nested.run(work, state, bool(joint_random) or joint_before)
        else:
            if joint_random:
                work = self._drawing_jointly(work, joint_random)
            with self._lock:
                nested.joint_random = bool(joint_random)
                results = self._run(work, state)
        if saved is not None:
            saved.hand_over()
        return results

    def as_caller(self, rank: int, work: Callable[[list[Any]], T], value: Any) -> T:
        """All ranks call it, each with its `value`: rank 0 does `work(values)`, which may run things on the team as the
        caller may, while the others serve; all get the very result. See nested.py."""
        return self._nested.as_caller(rank, work, value)

    def acts_as_caller(self) -> bool:
        """Whether the calling thread is rank 0's, within `as_caller`."""
        return self._nested.acts_here()

    def close(self) -> None:
        """End the threads. A team that is dropped is closed."""
        self._stop()
        if self.rank_here() is None and os.getpid() == self._pid:
            for thread in self._threads:
                thread.join()

    def _drawing_jointly(self, work: Callable[[int], T], known: bool | Layouts) -> Callable[[int], T]:
        groups, layouts = self.groups, None if isinstance(known, bool) else known

        def together(rank: int) -> T:
            with JointRandom(groups[rank], layouts):
                return work(rank)

        return together

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this model's ranks are threads of the process that split it, and a forked process has none of them; "
                "split the model in the process that runs it, or start processes by 'spawn'"
            )
        if not self._stop.alive:
            raise RuntimeError("this team of threads was closed")
        rank = self.rank_here()
        if rank is not None:
            raise RuntimeError(f"rank {rank} asked its own team to run something; all ranks are at work already")

    def _run(self, work: Callable[[int], T], state: CallerState) -> list[T]:
        if self._unfinished is not None:
            self._unfinished.wait()
            self._settle(self._unfinished)
        self._meeting.intra_op = (self._each, torch.get_num_threads())
        job = _Job(work, state, self._meeting, self._first_order(state))
        self._unfinished = job
        try:
            self._hand_over(job)
            if job.failed:
                self._raise_first()
            return job.clear()
        finally:
            if job.over:
                self._settle(job)

    def _hand_over(self, job: _Job) -> None:
        try:
            for queue in self._queues:
                queue.put(job)
            job.wait()
        except BaseException as error:  # the caller was interrupted, perhaps between two ranks
            self._meeting.abort(error)
            for queue in self._queues:
                queue.put(job)
            job.wait()
            raise

    def _settle(self, job: _Job) -> None:
        self._order = job.last_order
        if torch.is_grad_enabled() and job.last_order - backward_order() < _FARTHEST_ORDER:
            align_backward_order(job.last_order)
        job.clear()
        forget_casts()
        if self._meeting.changed_threads:
            self._meeting.changed_threads = False
            torch.set_num_threads(self._meeting.intra_op[1])
        if self._meeting.error is not None:
            self._meeting.reset()
        self._unfinished = None

    def _first_order(self, state: CallerState) -> int:
        """Nodes of the ranks come after the caller's earlier ones, and before its later ones (see _settle)."""
        here = backward_order() if state.grad else 0
        return max(self._order, here) if here - self._order < _FARTHEST_ORDER else self._order

    def _raise_first(self) -> None:
        error, rank = self._meeting.error, self._meeting.failed
        try:
            if error is None:
                raise RuntimeError("a rank failed and left no error")
            if rank is not None:
                note_rank(error, rank, self.devices[rank])
            raise error
        finally:
            del error  # the traceback holds this frame

    def _start(self) -> list[threading.Thread]:
        own = torch.get_num_threads()
        each = max(1, own // self.world_size)
        self._each = each
        ready: SimpleQueue[BaseException | None] = SimpleQueue()
        threads = []
        try:
            for rank, queue in enumerate(self._queues):
                arguments = (queue, rank, self._meeting, each, ready)
                thread = threading.Thread(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                thread.start()
                threads.append(thread)
                error = ready.get()
                if error is not None:
                    self._stop()
                    raise error
        finally:
            torch.set_num_threads(own)
        return threads


def _serve(
    queue: _Queue,
    rank: int,
    meeting: Rendezvous,
    threads: int,
    ready: SimpleQueue[BaseException | None],
) -> None:
    """A rank's thread: knows its queue and what the ranks share, never the team."""
    try:
        torch.get_num_threads()  # the first read in a thread sets the thread's own number back
        torch.set_num_threads(threads)
        device = meeting.devices[rank]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        meeting.threads[threading.get_ident()] = rank
    except BaseException as error:
        ready.put(error)
        return
    ready.put(None)
    while (job := queue.get()) is not None:
        job.serve(rank)
        del job
    meeting.threads.pop(threading.get_ident(), None)


def _stop(queues: Sequence[_Queue]) -> None:
    for queue in queues:
        queue.put(None)
