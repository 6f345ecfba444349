"""The thread group: calls that do not fit together, errors, deadlines, objects, subgroups, recording."""

import copy
import pickle
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tensor_parallel.comm import Group, RecordingGroup, ThreadGroup, recorded, thread_groups
from tensor_parallel.errors import CollectiveError, DeadlineError, RankError
from tensor_parallel.layout import DimLayout, Part, Segment, shard, spread
from tensor_parallel.runtime import ThreadTeam

CPU = torch.device("cpu")
COLUMNS = shard(-1, DimLayout((Segment((Part(5, "h"),)),)))


@pytest.fixture(scope="module")
def team() -> ThreadTeam:
    return ThreadTeam([CPU] * 3)


def each_in_a_thread(works: list[Callable[[], object]]) -> list[BaseException | None]:
    """Run bare threads without a team; what each raised."""
    errors: list[BaseException | None] = [None] * len(works)

    def run(index: int) -> None:
        try:
            works[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return errors


def test_different_collectives_are_named_with_what_each_rank_called(team: ThreadTeam) -> None:
    def work(rank: int) -> None:
        group = team.groups[rank]
        if rank == 1:
            group.barrier()
        else:
            group.all_reduce(torch.ones(2, 3))

    with pytest.raises(CollectiveError, match=r"rank 0: all_reduce of a \(2, 3\) float32 tensor.*rank 1: barrier"):
        team.run(work)
    assert team.run(lambda rank: team.groups[rank].all_reduce(torch.ones(1)).item()) == [3, 3, 3]


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(1, 2), torch.ones(2, dtype=torch.float64)])
def test_tensors_that_do_not_fit_together_are_named(team: ThreadTeam, other: torch.Tensor) -> None:
    given = [torch.ones(2), torch.ones(2), other]
    with pytest.raises(CollectiveError, match=r"rank 0: \(2,\) float32.*rank 2:") as caught:
        team.run(lambda rank: team.groups[rank].all_reduce(given[rank]))
    assert str(tuple(other.shape)) in str(caught.value)
    # what does not take part need not fit
    assert team.run(lambda rank: team.groups[rank].all_reduce(given[rank], contributes=rank < 2))[2].eq(2).all()


def test_ranks_in_different_grad_modes_are_refused(team: ThreadTeam) -> None:
    def work(rank: int) -> None:
        with torch.set_grad_enabled(rank != 2):
            team.groups[rank].barrier()

    with pytest.raises(CollectiveError, match="rank 1: barrier with gradients; rank 2: barrier"):
        team.run(work)


def test_an_error_in_the_joint_work_reaches_all_ranks() -> None:
    groups = thread_groups([CPU] * 3)
    errors = each_in_a_thread([lambda g=g: g.all_reduce(torch.ones(g.rank() + 1)) for g in groups])
    assert sorted(type(error).__name__ for error in errors) == ["CollectiveError", "RankError", "RankError"]
    cause = next(error for error in errors if type(error) is CollectiveError)
    assert all(error.__cause__ is cause for error in errors if type(error) is RankError)


def test_abort_frees_who_waits_and_who_comes_later() -> None:
    groups = thread_groups([CPU] * 3)
    failure = ValueError("broken")

    def late() -> None:
        time.sleep(0.2)
        groups[1].barrier()

    start = time.perf_counter()
    errors = each_in_a_thread([groups[0].barrier, late, lambda: (time.sleep(0.1), groups[2].abort(failure))])
    assert time.perf_counter() - start < 2
    assert [type(error) for error in errors] == [RankError, RankError, type(None)]
    for rank in (0, 1):
        assert errors[rank].__cause__ is failure
        assert f"rank {rank} was released because rank 2 failed: ValueError('broken')" in str(errors[rank])


def test_a_rank_that_does_not_come_is_named_after_the_deadline() -> None:
    groups = thread_groups([CPU] * 3, deadline=0.2)
    start = time.perf_counter()
    errors = each_in_a_thread([lambda: groups[0].all_reduce(torch.ones(2)), lambda: None, groups[2].barrier])
    assert 0.15 < time.perf_counter() - start < 2
    late = next(error for error in errors if isinstance(error, DeadlineError))
    assert isinstance(late, TimeoutError)
    assert "waited 0.2 s in" in str(late)
    assert "rank 1 of 3 did not come" in str(late)
    assert sum(type(error) is RankError for error in errors) == 1


def test_slow_joint_work_is_not_a_missing_rank() -> None:
    group = thread_groups([CPU] * 2, deadline=0.1)[0]

    def slow(values: list[int]) -> list[int]:
        time.sleep(0.3)
        return values

    results: list[int] = []
    works = [lambda rank=rank: results.append(group.rendezvous.meet(rank, "slow", slow, rank)) for rank in range(2)]
    assert each_in_a_thread(works) == [None, None]
    assert sorted(results) == [0, 1]


def test_nothing_is_kept_between_meetings(team: ThreadTeam) -> None:
    import weakref

    refs: list[weakref.ref[torch.Tensor]] = []

    def work(rank: int) -> None:
        given = torch.ones(2)
        result = team.groups[rank].all_reduce(given)
        refs.extend([weakref.ref(given), weakref.ref(result)])

    team.run(work)
    assert len(refs) == 6
    assert [ref() for ref in refs] == [None] * 6


def test_objects_are_broadcast(team: ThreadTeam) -> None:
    assert team.run(lambda rank: team.groups[rank].broadcast_object({"rank": rank}, source=2)) == [{"rank": 2}] * 3
    with pytest.raises(CollectiveError, match=r"different ranks: \[0, 1, 2\]"):
        team.run(lambda rank: team.groups[rank].broadcast_object(None, source=rank))
    with pytest.raises(ValueError, match="source is 3"):
        team.run(lambda rank: team.groups[rank].broadcast_object(None, source=3))


def test_subgroups_talk_among_themselves_and_are_freed_with_the_whole(team: ThreadTeam) -> None:
    def work(rank: int) -> tuple[int, int, float] | None:
        group = team.groups[rank].subgroup([2, 0])
        return (
            None if group is None else (group.rank(), group.size(), group.all_reduce(torch.tensor(rank + 1.0)).item())
        )

    assert team.run(work) == [(1, 2, 4.0), None, (0, 2, 4.0)]

    def failing(rank: int) -> None:
        group = team.groups[rank].subgroup([2, 0])
        if rank == 1:
            time.sleep(0.05)
            raise LookupError("rank 1")
        if rank == 0:
            group.barrier()

    start = time.perf_counter()
    with pytest.raises(LookupError):
        team.run(failing)
    assert time.perf_counter() - start < 2
    assert team.run(work)[0] == (1, 2, 4.0)
    for ranks in ([], [0, 0], [3]):
        with pytest.raises(ValueError, match="different ranks from 0 to 2"):
            team.groups[0].subgroup(ranks)


def test_subgroups_of_different_ranks_are_refused(team: ThreadTeam) -> None:
    with pytest.raises(CollectiveError, match="every rank must name the same"):
        team.run(lambda rank: team.groups[rank].subgroup([rank]))


def test_a_group_is_copied_as_itself_and_not_pickled() -> None:
    group = thread_groups([CPU])[0]
    assert copy.copy(group) is group
    assert copy.deepcopy([group])[0] is group
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(group)


@pytest.mark.parametrize(("devices", "deadline"), [([], 1.0), ([CPU], 0.0)])
def test_impossible_groups_are_refused(devices: list[torch.device], deadline: float) -> None:
    with pytest.raises(ValueError, match="a device and a deadline above 0"):
        thread_groups(devices, deadline)


def test_a_real_group_lists_its_calls(team: ThreadTeam) -> None:
    cuts = {"h": spread(5, 3)}

    def work(rank: int) -> None:
        group = team.groups[rank]
        group.all_reduce(torch.ones(2, 3), contributes=rank == 1)
        group.all_gather(torch.ones(1, 2 if rank < 2 else 1), COLUMNS, cuts)

    with recorded(team.groups[0]) as calls:
        team.run(work)
    team.run(work)
    assert calls == [("all_reduce", 24), ("all_gather", 20)]


@pytest.mark.parametrize("make", [lambda: RecordingGroup(3, 1), lambda: thread_groups([CPU])[0]])
def test_groups_follow_the_protocol(make: Callable[[], Group]) -> None:
    group: Group = make()
    names = [name for name in vars(Group) if not name.startswith("_")]
    assert len(names) == 15
    assert all(callable(getattr(group, name)) for name in names)


def test_a_recording_group_counts_and_moves_nothing() -> None:
    group, cuts = RecordingGroup(3, rank=1), {"h": spread(5, 3)}
    given = torch.ones(2, 2, requires_grad=True)
    assert torch.equal(group.all_reduce(given), given)
    assert group.all_reduce(given, contributes=False).eq(0).all()
    whole = group.all_gather(given, COLUMNS, cuts)
    assert whole.tolist() == [[0, 0, 1, 1, 0]] * 2
    whole.sum().backward()
    assert given.grad.eq(1).all()
    assert RecordingGroup(6, rank=5).all_gather(given.detach()[:, :1], COLUMNS, {"h": spread(5, 6)}).eq(0).all()
    inner = group.subgroup([1, 2])
    inner.barrier()
    assert group.subgroup([0]) is None
    assert (inner.rank(), inner.size()) == (0, 2)
    assert group.broadcast_object("x") == "x"
    names = [("all_reduce", 16), ("all_reduce", 16), ("all_gather", 40), ("barrier", 0), ("broadcast_object", 0)]
    assert group.calls == names
    with pytest.raises(ValueError, match="ranks 0 to 2"):
        RecordingGroup(3, 3)


def test_a_group_knows_its_place() -> None:
    groups = thread_groups([CPU, torch.device("meta")])
    assert [(g.rank(), g.size(), g.device.type) for g in groups] == [(0, 2, "cpu"), (1, 2, "meta")]
    assert isinstance(groups[0], ThreadGroup)
    assert repr(groups[1]) == "<ThreadGroup rank 1 of 2 on meta>"
