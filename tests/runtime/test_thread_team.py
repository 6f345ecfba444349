"""The team of threads: results, errors, life."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from tensor_parallel.errors import DeadlineError, RankError
from tensor_parallel.runtime import ThreadTeam

CPU = torch.device("cpu")
SIZE = 3


@pytest.fixture(scope="module")
def team() -> ThreadTeam:
    return ThreadTeam([CPU] * SIZE)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.perf_counter() + 5
    while not condition() and time.perf_counter() < end:
        time.sleep(0.005)
    return condition()


def meets(team: ThreadTeam) -> bool:
    """Whether the next run works, collectives included."""
    return team.run(lambda rank: team.groups[rank].all_reduce(torch.tensor(rank)).item()) == [3] * SIZE


def test_each_rank_works_in_its_own_persistent_thread(team: ThreadTeam) -> None:
    def work(rank: int) -> tuple[int | None, int]:
        return team.rank_here(), threading.get_ident()

    first, second = team.run(work), team.run(work)
    assert [rank for rank, _ in first] == [0, 1, 2]
    assert first == second
    assert len({ident for _, ident in first}) == SIZE
    assert team.rank_here() is None
    assert team.world_size == SIZE
    assert team.devices == (CPU,) * SIZE


@pytest.mark.parametrize("failing", range(SIZE))
@pytest.mark.parametrize("meetings", range(3))
@pytest.mark.parametrize("where", ["before", "inside"])
def test_an_error_frees_the_others_at_once(team: ThreadTeam, failing: int, meetings: int, where: str) -> None:
    """Rank `failing` raises after some collectives, between two or inside the next one."""
    error = KeyError("the very object")
    freed: list[BaseException | None] = []

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object, **__: object) -> None:
            raise error

    def work(rank: int) -> None:
        group = team.groups[rank]
        for _ in range(meetings):
            group.barrier()
        given = torch.ones(2)
        if rank == failing and where == "before":
            time.sleep(0.03)  # the others sleep by now
            raise error
        if rank == failing:
            given = given.as_subclass(Refuses)
        try:
            group.all_reduce(given)
        except RankError as released:
            freed.append(released.__cause__)
            raise

    start = time.perf_counter()
    with pytest.raises(KeyError) as caught:
        team.run(work)
    assert time.perf_counter() - start < 2
    assert caught.value is error
    assert len(freed) == SIZE - 1
    assert all(cause is error for cause in freed)
    (note,) = error.__notes__
    assert note in {f"raised on rank {rank} (cpu)" for rank in ([failing] if where == "before" else range(SIZE))}
    assert meets(team)


def test_an_error_after_the_last_collective(team: ThreadTeam) -> None:
    def work(rank: int) -> None:
        team.groups[rank].barrier()
        if rank == 1:
            raise SystemExit("stop")

    with pytest.raises(SystemExit, match="stop") as caught:
        team.run(work)
    assert caught.value.__notes__ == ["raised on rank 1 (cpu)"]
    assert meets(team)


def test_the_traceback_shows_where_the_rank_failed(team: ThreadTeam) -> None:
    def breaks_here(rank: int) -> None:
        raise ArithmeticError(rank)

    with pytest.raises(ArithmeticError) as caught:
        team.run(breaks_here)
    assert caught.traceback[-1].name == "breaks_here"


def test_one_error_object_raised_twice_has_one_note(team: ThreadTeam) -> None:
    error = ValueError("again")

    def work(rank: int) -> None:
        if rank == 2:
            raise error

    for _ in range(2):
        with pytest.raises(ValueError, match="again"):
            team.run(work)
    assert error.__notes__ == ["raised on rank 2 (cpu)"]


def test_an_error_that_every_rank_swallows_does_not_stick(team: ThreadTeam) -> None:
    def work(rank: int) -> str:
        try:
            team.groups[rank].all_reduce(torch.ones(rank))
        except Exception:
            return "swallowed"
        return "missed"

    assert team.run(work) == ["swallowed"] * SIZE
    assert meets(team)


def test_a_rank_that_returns_early_is_named_after_the_deadline() -> None:
    team = ThreadTeam([CPU] * 2, deadline=0.2)

    def work(rank: int) -> None:
        if rank == 0:
            team.groups[rank].barrier()

    with pytest.raises(DeadlineError, match=r"rank 0 waited 0\.2 s in barrier, and rank 1 of 2 did not come"):
        team.run(work)
    assert team.run(lambda rank: team.groups[rank].all_reduce(torch.ones(1)).item()) == [2, 2]


def test_a_rank_cannot_run_its_own_team(team: ThreadTeam) -> None:
    with pytest.raises(RuntimeError, match="asked its own team"):
        team.run(lambda rank: team.run(lambda inner: inner))
    assert meets(team)


def test_a_rank_can_run_another_team(team: ThreadTeam) -> None:
    inner = ThreadTeam([CPU] * 2)
    weight = torch.ones(2, requires_grad=True)

    def work(rank: int) -> torch.Tensor:
        parts = inner.run(lambda r: inner.groups[r].all_reduce(weight * (rank + 1.0)))
        assert inner.rank_here() is None
        return team.groups[rank].all_reduce(parts[0])

    out = team.run(work)
    assert out[0].eq(2 * (1 + 2 + 3)).all()
    out[0].sum().backward()
    assert weight.grad.eq(12).all()


def test_callers_in_several_threads_take_turns(team: ThreadTeam) -> None:
    wrong: list[object] = []

    def caller(number: int) -> None:
        for step in range(25):
            given = torch.tensor([float(number * 100 + step)], requires_grad=number % 2 == 0)
            with torch.set_grad_enabled(number % 2 == 0):
                out = team.run(lambda rank, t=given: team.groups[rank].all_reduce(t))
            if any(t.item() != given.item() * SIZE or t.requires_grad != (number % 2 == 0) for t in out):
                wrong.append((number, step, out))
            if number % 2 == 0:
                out[0].backward()
                if given.grad.item() != SIZE:
                    wrong.append((number, step, given.grad))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not wrong


def test_dropping_a_team_ends_its_threads(without_collector: None) -> None:
    team = ThreadTeam([CPU] * 2)
    threads = list(team._threads)
    kept = torch.ones(3)
    team.run(lambda rank: kept * 2)
    with pytest.raises(ZeroDivisionError):
        team.run(lambda rank: 1 / rank)
    ref = weakref.ref(team)
    del team
    assert ref() is None
    assert eventually(lambda: not any(thread.is_alive() for thread in threads))


def test_a_run_keeps_nothing_alive(team: ThreadTeam, without_collector: None) -> None:
    class Thing:
        pass

    refs: list[weakref.ref[object]] = []

    def worker(given: Thing) -> Callable[[int], list[Thing]]:
        def work(rank: int) -> list[Thing]:
            made = Thing()
            refs.append(weakref.ref(made))
            return [made, given]

        return work

    given = Thing()
    work = worker(given)

    refs.append(weakref.ref(given))
    refs.append(weakref.ref(work))
    team.run(work)
    del given, work
    assert [ref() for ref in refs] == [None] * (SIZE + 2)


def test_an_error_keeps_nothing_alive_once_it_is_dropped(team: ThreadTeam, without_collector: None) -> None:
    class Thing:
        pass

    def attempt(work: Callable[[int, Thing], None]) -> weakref.ref[Thing]:
        given = Thing()
        try:
            team.run(lambda rank: work(rank, given))
        except Exception:
            return weakref.ref(given)
        raise AssertionError("nothing was raised")

    def divides(rank: int, _: Thing) -> None:
        if rank == 1:
            raise ZeroDivisionError
        team.groups[rank].barrier()

    def differs(rank: int, _: Thing) -> None:
        team.groups[rank].all_reduce(torch.ones(rank))

    for work in (divides, differs):
        ref = attempt(work)
        assert eventually(lambda r=ref: r() is None)


def test_a_closed_team_says_so() -> None:
    team = ThreadTeam([CPU] * 2)
    threads = list(team._threads)
    team.close()
    team.close()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="closed"):
        team.run(lambda rank: rank)


def test_ctrl_c_reaches_the_caller_and_the_team_goes_on(team: ThreadTeam) -> None:
    def work(rank: int) -> None:
        if rank == 0:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10_000):
            team.groups[rank].barrier()
            time.sleep(0.001)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        team.run(work)
    assert time.perf_counter() - start < 2
    assert meets(team)


def test_a_second_ctrl_c_leaves_and_the_next_run_waits(team: ThreadTeam) -> None:
    ended = []

    def work(rank: int) -> None:
        if rank == 0:
            for _ in range(2):
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.4)
        ended.append(rank)

    with pytest.raises(KeyboardInterrupt):
        team.run(work)
    assert len(ended) < SIZE
    assert meets(team)
    assert sorted(ended) == [0, 1, 2]


def test_threads_of_torch_are_shared_out_and_the_callers_are_kept() -> None:
    torch.set_num_threads(4)
    for size, each in ((2, 2), (3, 1), (8, 1)):
        team = ThreadTeam([CPU] * size)
        assert torch.get_num_threads() == 4
        for _ in range(2):
            assert team.run(lambda rank: torch.get_num_threads()) == [each] * size
        assert torch.get_num_threads() == 4


def test_a_device_that_does_not_exist_is_an_error_and_leaves_no_thread() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    # Not their number: threads of earlier teams may end meanwhile.
    before = set(threading.enumerate())
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        ThreadTeam([torch.device("cuda", 0)] * 2)
    assert eventually(lambda: set(threading.enumerate()) <= before)


def script(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_that_the_threads_are_gone() -> None:
    done = script(
        """
        import os, sys, torch
        from tensor_parallel.runtime import ThreadTeam
        torch.set_num_threads(1)
        team = ThreadTeam([torch.device("cpu")] * 2)
        team.run(lambda rank: torch.ones(2) * rank)
        if os.fork() == 0:
            try:
                team.run(lambda rank: rank)
            except RuntimeError as error:
                os._exit(7 if "forked process" in str(error) and "spawn" in str(error) else 8)
            os._exit(9)
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status), team.run(lambda rank: rank))
        """
    )
    assert done.stdout.strip() == "7 [0, 1]", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_ends_and_can_make_its_own_team() -> None:
    done = script(
        """
        import os, torch
        from tensor_parallel.runtime import ThreadTeam
        torch.set_num_threads(1)
        team = ThreadTeam([torch.device("cpu")] * 2)
        pid = os.fork()
        if pid == 0:
            team.close()
            del team
            print(ThreadTeam([torch.device("cpu")] * 2).run(lambda rank: rank), flush=True)
            raise SystemExit(5)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), team.run(lambda rank: rank))
        """
    )
    assert done.stdout.splitlines() == ["[0, 1]", "5 [0, 1]"], done.stderr


def test_the_interpreter_ends_with_a_team_alive_and_with_a_rank_at_work() -> None:
    done = script(
        """
        import threading, time, torch
        from tensor_parallel.runtime import ThreadTeam
        team = ThreadTeam([torch.device("cpu")] * 2)
        threading.Thread(target=lambda: team.run(lambda rank: time.sleep(60)), daemon=True).start()
        time.sleep(0.2)
        print("end")
        """
    )
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "end", "")
