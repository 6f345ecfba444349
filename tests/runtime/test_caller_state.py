"""What torch keeps per thread reaches the ranks, and nothing of it stays there."""

import contextvars
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensor_parallel.runtime import ThreadTeam

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def team() -> ThreadTeam:
    return ThreadTeam([CPU] * 2)


def test_grad_mode(team: ThreadTeam) -> None:
    given = torch.ones(2, requires_grad=True)

    def work(rank: int) -> tuple[bool, bool]:
        found = torch.is_grad_enabled(), (given * 2).requires_grad
        torch._C._set_grad_enabled(not torch.is_grad_enabled())
        return found

    for grad in (True, False, True, True):
        with torch.set_grad_enabled(grad):
            assert team.run(work) == [(grad, grad)] * 2
            assert torch.is_grad_enabled() is grad
    assert torch.is_grad_enabled()


def test_inference_mode(team: ThreadTeam) -> None:
    def work(rank: int) -> tuple[bool, bool, bool]:
        made = team.groups[rank].all_reduce(torch.ones(2))
        return torch.is_inference_mode_enabled(), made.is_inference(), torch.is_grad_enabled()

    with torch.inference_mode():
        assert team.run(work) == [(True, True, False)] * 2
    assert team.run(work) == [(False, False, True)] * 2
    with torch.no_grad():
        assert team.run(work) == [(False, False, False)] * 2


def test_autocast(team: ThreadTeam) -> None:
    given = torch.ones(2, 2)

    def work(rank: int) -> tuple[bool, torch.dtype, bool, torch.dtype]:
        state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        return *state, (given @ given).dtype

    plain = team.run(work)
    assert plain == [(False, torch.bfloat16, True, torch.float32)] * 2
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        assert team.run(work) == [(True, torch.float16, False, torch.float16)] * 2
        with torch.autocast("cpu", enabled=False):
            assert team.run(work)[0][-1] is torch.float32
    with torch.autocast("cpu"), pytest.raises(ZeroDivisionError):
        team.run(lambda rank: 1 / 0)
    assert team.run(work) == plain


def test_autocast_inside_a_rank_leaves_no_cast_behind(team: ThreadTeam) -> None:
    """The cache of casts is shared by all threads: a weight changed between two runs must not be an old cast."""
    weight = torch.ones(2, 2, requires_grad=True)

    def work(rank: int) -> float:
        with torch.autocast("cpu"):
            return (torch.ones(2, 2) @ weight).sum().item()

    assert team.run(work) == [8, 8]
    with torch.no_grad():
        weight.mul_(2)
    assert team.run(work) == [16, 16]


def test_default_device(team: ThreadTeam) -> None:
    with torch.device("meta"):
        assert team.run(lambda rank: torch.ones(2).device.type) == ["meta"] * 2
    assert team.run(lambda rank: torch.ones(2).device.type) == ["cpu"] * 2
    torch.set_default_device("meta")
    try:
        assert team.run(lambda rank: torch.ones(2).device.type) == ["meta"] * 2
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    assert team.run(lambda rank: torch.ones(2).device.type) == ["cpu"] * 2


def test_a_default_device_of_the_ranks_kind_becomes_the_ranks_own() -> None:
    team = ThreadTeam([torch.device("meta", 0), torch.device("meta", 1)])
    with torch.device("meta"):
        made = team.run(lambda rank: torch.get_default_device())
    assert made == list(team.devices)


def test_function_and_dispatch_modes(team: ThreadTeam) -> None:
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.cos else out

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.cos.default:
                Counts.seen += 1
            return func(*args, **(kwargs or {}))

    def work(rank: int) -> float:
        return float(torch.cos(torch.zeros(1)))

    with Counts(), Doubles():
        assert team.run(work) == [2, 2]
    assert Counts.seen == 2
    with Counts(), Doubles(), pytest.raises(ZeroDivisionError):
        team.run(lambda rank: 1 / 0)
    assert team.run(work) == [1, 1]
    assert Counts.seen == 2


def test_context_variables(team: ThreadTeam) -> None:
    variable = contextvars.ContextVar("variable", default="none")

    def work(rank: int) -> str:
        found = variable.get()
        variable.set(f"rank {rank}")
        return found + team.groups[rank].broadcast_object(variable.get(), source=1)

    variable.set("caller")
    assert team.run(work) == ["callerrank 1"] * 2
    assert variable.get() == "caller"
    assert team.run(work) == ["callerrank 1"] * 2


def test_flushing_denormals(team: ThreadTeam) -> None:
    def work(rank: int) -> float:
        return (torch.full((1,), 1e-310, dtype=torch.float64) * 0.5).item()

    plain = work(0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        assert team.run(work) == [0.0, 0.0]
    finally:
        torch.set_flush_denormal(False)
    assert team.run(work) == [plain] * 2
    assert plain > 0
