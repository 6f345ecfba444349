"""Saved-tensor hooks of the caller: checkpointing and offloading around a run."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tensor_parallel.comm import copy_to_ranks
from tensor_parallel.runtime import ThreadTeam

CPU = torch.device("cpu")
WEIGHT = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[2, 3])
def team(request: pytest.FixtureRequest) -> ThreadTeam:
    return ThreadTeam([CPU] * request.param)


def forward(team: ThreadTeam, x: torch.Tensor) -> torch.Tensor:
    copies = copy_to_ranks([x], [range(team.world_size)], team.devices)[0]

    def work(rank: int) -> torch.Tensor:
        mine = x if rank == 0 else copies[rank]
        for _ in range(3):
            mine = torch.tanh(team.groups[rank].all_reduce(torch.sin(mine @ WEIGHT) * (rank + 1)))
        return mine

    return team.run(work)[0]


def gradient(team: ThreadTeam, how: str) -> torch.Tensor:
    x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    if how == "plain":
        out = forward(team, x)
    elif how == "offloaded":
        with save_on_cpu():
            out = forward(team, x)
    else:
        out = checkpoint(lambda given: forward(team, given), x * 1, use_reentrant=how == "reentrant")
    out.sum().backward()
    return x.grad


@pytest.mark.parametrize("how", ["offloaded", "not reentrant", "reentrant"])
def test_gradients_are_the_same_bits(team: ThreadTeam, how: str) -> None:
    expected = gradient(team, "plain")
    for _ in range(5):
        assert torch.equal(gradient(team, how), expected)


def test_a_checkpoint_around_a_run_keeps_no_activations(team: ThreadTeam) -> None:
    runs = []
    counted = ThreadTeam([CPU] * 2)
    run = counted.run
    counted.run = lambda work, **given: runs.append(1) or run(work, **given)
    gradient(counted, "not reentrant")
    assert len(runs) == 2  # once forward, once again for backward


def test_hooks_are_called_in_the_caller_rank_by_rank(team: ThreadTeam) -> None:
    import threading

    seen: list[tuple[int, float]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), tensor.flatten()[0].item()))
        return tensor

    leaf = torch.ones(1, requires_grad=True)
    for _ in range(5):
        seen.clear()
        with saved_tensors_hooks(pack, lambda packed: packed):
            kept = team.run(lambda rank: (leaf * (rank + 10.0)).exp())
        values = [value for _, value in seen]
        assert len(values) == team.world_size
        assert values == sorted(values)
        assert {ident for ident, _ in seen} == {threading.get_ident()}
        assert len(kept) == team.world_size
    seen.clear()
    team.run(lambda rank: (leaf * (rank + 10.0)).exp())
    assert not seen


def test_a_saved_tensor_that_changes_later_is_refused(team: ThreadTeam) -> None:
    leaf = torch.ones(3, requires_grad=True)

    def work(rank: int) -> torch.Tensor:
        hidden = leaf * 2
        out = hidden**2
        hidden.add_(1)
        return out

    with pytest.raises(RuntimeError, match=r"a \(3,\) tensor .* changed in place"), save_on_cpu():
        team.run(work)


def test_hooks_are_not_called_after_an_error(team: ThreadTeam) -> None:
    seen: list[torch.Tensor] = []
    leaf = torch.ones(1, requires_grad=True)
    with (
        pytest.raises(ZeroDivisionError),
        saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda packed: packed),
    ):
        team.run(lambda rank: [leaf.exp(), 1 / 0])
    assert not seen
