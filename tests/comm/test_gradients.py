"""Values, gradients and second derivatives through joint nodes, against plain torch in float64."""

import random
import time
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

from tensor_parallel.comm import ThreadGroup, copy_to_ranks
from tensor_parallel.layout import DimLayout, Part, Segment, shard, spread
from tensor_parallel.runtime import ThreadTeam

CPU = torch.device("cpu")
HIDDEN, WIDTH = 7, 3


@pytest.fixture(scope="module", params=[2, 3, 4])
def team(request: pytest.FixtureRequest) -> ThreadTeam:
    return ThreadTeam([CPU] * request.param)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.requires_grad_()


def tensors() -> list[torch.Tensor]:
    """Input, first weight, second weight, a replicated scale used inside and outside the split stretch."""
    return [noise(2, WIDTH), noise(WIDTH, HIDDEN), noise(HIDDEN, WIDTH, seed=1), noise(WIDTH, seed=2)]


def whole(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh((x * scale) @ up) * scale.sum()
    x = x * scale + hidden @ down
    return torch.sin(torch.tanh(x @ up) * hidden.sum()) @ down * scale


def split(team: ThreadTeam, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same with `up` cut by columns and `down` by rows, an all-reduce after each stretch and a gather between."""
    n = team.world_size
    cuts = {"h": spread(HIDDEN, n)}
    hidden_dim = shard(-1, DimLayout((Segment((Part(HIDDEN, "h"),)),)))
    copies = copy_to_ranks([x, scale], [range(n), range(n)], team.devices)
    parts = [slice(*cuts["h"][rank]) for rank in range(n)]
    ups, downs = [up[:, part].clone() for part in parts], [down[part].clone() for part in parts]

    def work(rank: int) -> torch.Tensor:
        group = team.groups[rank]
        mine, factor = (x, scale) if rank == 0 else (copies[0][rank], copies[1][rank])
        hidden = torch.tanh((mine * factor) @ ups[rank]) * factor.sum()
        mine = mine * factor + group.all_reduce(hidden @ downs[rank])
        gathered = group.all_gather(hidden, hidden_dim, cuts)
        inner = torch.sin(torch.tanh(mine @ ups[rank]) * gathered.sum())
        return group.all_reduce(inner @ downs[rank]) * factor

    return team.run(work)[0]


def test_value_gradients_and_second_derivatives_are_those_of_plain_torch(team: ThreadTeam) -> None:
    upstream = noise(2, WIDTH, seed=5).detach()
    found = []
    for forward in (whole, lambda *given: split(team, *given)):
        given = tensors()
        out = forward(*given)
        grads = torch.autograd.grad((out * upstream).sum(), given, create_graph=True)
        seconds = torch.autograd.grad(sum((g * g).sum() for g in grads), given)
        found.append([out, *grads, *seconds])
    for reference, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


def test_gradcheck_and_gradgradcheck(team: ThreadTeam) -> None:
    assert torch.autograd.gradcheck(lambda *given: split(team, *given), tensors())
    small = [tensors()[0][:1].detach().requires_grad_(), *tensors()[1:]]
    assert torch.autograd.gradgradcheck(lambda *given: split(team, *given), small)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own tables of formulas
def test_forward_mode_gives_what_plain_torch_gives(team: ThreadTeam) -> None:
    found = []
    for forward in (whole, lambda *given: split(team, *given)):
        with forward_ad.dual_level():
            given = [forward_ad.make_dual(t, noise(*t.shape, seed=9).detach()) for t in tensors()]
            found.append(forward_ad.unpack_dual(forward(*given)).tangent)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_only_rank_0_carries_the_gradient_and_each_rank_that_contributes_gets_it(team: ThreadTeam) -> None:
    mine = [noise(3, seed=rank) for rank in range(team.world_size)]
    out = team.run(lambda rank: team.groups[rank].all_reduce(mine[rank], contributes=rank != 1))
    expected = sum(tensor for rank, tensor in enumerate(mine) if rank != 1)
    for result in out:
        torch.testing.assert_close(result, expected)
    (out[0] * 2).sum().backward()
    for rank, tensor in enumerate(mine):
        if rank == 1:
            assert tensor.grad is None
        else:
            assert tensor.grad.eq(2).all()


def test_outputs_can_be_changed_in_place_and_share_nothing(team: ThreadTeam) -> None:
    def work(rank: int) -> torch.Tensor:
        out = team.groups[rank].all_reduce(mine[rank])
        out += rank
        return out

    for grad in (True, False):
        mine = [torch.ones(3, requires_grad=grad) for _ in range(team.world_size)]
        with torch.set_grad_enabled(grad):
            for rank, result in enumerate(team.run(work)):
                assert result.eq(team.world_size + rank).all()
                assert result.requires_grad is grad
        assert all(t.eq(1).all() for t in mine)


def test_nobody_contributes(team: ThreadTeam) -> None:
    given = noise(3)
    for result in team.run(lambda rank: team.groups[rank].all_reduce(given, contributes=False)):
        assert result.eq(0).all()
        assert not result.requires_grad


def test_integers_and_half_precision_are_summed(team: ThreadTeam) -> None:
    n = team.world_size
    for result in team.run(lambda rank: team.groups[rank].all_reduce(torch.tensor([rank]))):
        assert result.tolist() == [n * (n - 1) // 2]
    # 256 + 1 is 256 in bfloat16: added one by one the ones would be lost
    given = [torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16) for rank in range(n)]
    exact = torch.tensor([256.0 + n - 1]).to(torch.bfloat16)
    for result in team.run(lambda rank: team.groups[rank].all_reduce(given[rank])):
        assert torch.equal(result, exact)


@pytest.mark.parametrize("uneven", [True, False])
def test_gradients_have_one_bit_pattern_in_30_runs(uneven: bool) -> None:
    """Whether or not the ranks make different numbers of nodes."""
    team = ThreadTeam([CPU] * 4)
    chance = random.Random(0)
    given = [tensor.detach().float().requires_grad_() for tensor in tensors()]
    patterns = set()
    for _ in range(30):
        skew = [chance.randrange(40) for _ in range(4)]  # what else the threads did in between
        team.run(lambda rank, nodes=skew: [torch._C._functions.UndefinedGrad() for _ in range(nodes[rank])])
        out = _many_uses(team, *given, uneven=uneven, pause=lambda: time.sleep(chance.random() * 4e-4))
        grads = torch.autograd.grad(out.sum(), given)
        patterns.add(b"".join(grad.numpy().tobytes() for grad in grads))
    assert len(patterns) == 1


def _many_uses(team: ThreadTeam, *given: torch.Tensor, uneven: bool, pause: Callable[[], None]) -> torch.Tensor:
    """Every tensor is used several times, beside and behind collectives, and ranks come in any order."""
    copies = copy_to_ranks(given, [range(team.world_size)] * len(given), team.devices)

    def work(rank: int) -> torch.Tensor:
        group: ThreadGroup = team.groups[rank]
        x, up, down, scale = given if rank == 0 else [copy[rank] for copy in copies]
        for step in range(3):
            pause()
            hidden = torch.tanh(x * scale @ up)
            for _ in range(rank * uneven):
                hidden = hidden * 1.01
            early = [hidden.exp() * 1e-3, hidden * hidden * 1e3, hidden.cos()]
            summed = group.all_reduce(hidden * (rank + 1.3))
            pause()
            x = x * 0.3 + (summed * sum(early)) @ down + torch.sin(summed) @ down * scale + hidden @ down + step
        return x

    return team.run(work)[0]


def test_copies_share_memory_on_one_device_and_a_leaf_gets_one_sum() -> None:
    leaf, frozen, lonely = torch.nn.Parameter(torch.ones(3)), torch.ones(2), torch.nn.Parameter(torch.ones(2))
    copies = copy_to_ranks([leaf, frozen, lonely], [[1, 2, 3], [0, 1], [2]], [CPU] * 4)
    assert [sorted(copy) for copy in copies] == [[2, 3], [1], []]
    assert copies[0][2].data_ptr() == leaf.data_ptr()
    assert copies[0][2].requires_grad
    assert not copies[1][1].requires_grad
    calls: list[torch.Tensor] = []
    leaf.register_hook(calls.append)
    (leaf * 1 + copies[0][2] * 2 + copies[0][3] * 4).sum().backward()
    assert leaf.grad.eq(7).all()
    assert len(calls) == 1
    with torch.no_grad():
        assert not copy_to_ranks([leaf], [[0, 1]], [CPU] * 2)[0][1].requires_grad


def test_a_leaf_adds_its_owners_gradients_first() -> None:
    leaf = torch.nn.Parameter(torch.ones(1))
    large = leaf * 1e8 + leaf * -1e8
    copied = copy_to_ranks([leaf], [[0, 1]], [CPU] * 2)[0][1]  # younger than the owner's uses, and yet added last
    (large + copied).sum().backward()
    assert leaf.grad.item() == 1


def test_unused_copies_count_as_zeros() -> None:
    leaf, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    copies = copy_to_ranks([leaf, other], [[0, 1, 2]] * 2, [CPU] * 3)
    (copies[0][2] * 2).sum().backward()
    assert leaf.grad.eq(2).all()
    assert other.grad is None


def test_a_gradient_taken_inside_a_rank_through_a_collective_is_refused(team: ThreadTeam) -> None:
    given = noise(3)

    def work(rank: int) -> None:
        out = team.groups[rank].all_reduce(given * 2)
        torch.autograd.grad(out.sum(), given)

    with pytest.raises(NotImplementedError, match="inside a rank"):
        team.run(work)


def test_copies_and_results_lie_on_each_ranks_device() -> None:
    """The meta device stands for a second one: places and shapes; nothing comes back from it."""
    team = ThreadTeam([CPU, torch.device("meta")])
    leaf = noise(3)
    copies = copy_to_ranks([leaf], [[0, 1]], team.devices)[0]
    assert copies[1].device.type == "meta"
    assert copies[1].requires_grad
    out = team.run(lambda rank: team.groups[rank].all_reduce(leaf if rank == 0 else copies[1], contributes=rank == 0))
    assert [t.device.type for t in out] == ["cpu", "meta"]
    columns = shard(-1, DimLayout((Segment((Part(3, "h"),)),)))
    cuts = {"h": ((0, 3), (0, 0))}
    whole = team.run(lambda rank: team.groups[rank].all_gather(out[rank] * 2, columns, cuts))
    assert [t.device.type for t in whole] == ["cpu", "meta"]
    whole[0].sum().backward()
    assert leaf.grad.eq(2).all()


def test_a_broadcast_gives_rank_0_the_whole_gradient_and_the_others_none(team: ThreadTeam) -> None:
    leaves = [noise(3) for _ in range(team.world_size)]

    def work(rank: int) -> torch.Tensor:
        shared = team.groups[rank].broadcast(leaves[rank] * 1)
        assert torch.equal(shared, leaves[0])
        return (shared**2 * (rank + 1)).sum()

    factor = sum(range(1, team.world_size + 1))
    (first,) = torch.autograd.grad(sum(team.run(work)), leaves[0], create_graph=True)
    assert torch.allclose(first, 2.0 * factor * leaves[0], rtol=1e-14)
    (second,) = torch.autograd.grad(first.sum(), leaves[0])
    assert torch.equal(second, torch.full_like(second, 2.0 * factor))
    sum(team.run(work)).backward()
    assert [leaf.grad is None for leaf in leaves] == [False] + [True] * (team.world_size - 1)
    with torch.no_grad():
        assert team.run(lambda rank: team.groups[rank].broadcast(leaves[rank]) is leaves[rank]) == [True] * len(leaves)


def test_a_broadcast_among_holders_of_one_piece_keeps_to_them() -> None:
    team = ThreadTeam([CPU] * 5)
    leaves = [noise(3, seed=rank // 2) for rank in range(5)]
    holders = [[0, 1], [2, 3]]
    out = team.run(lambda rank: (team.groups[rank].broadcast(leaves[rank] * 1, holders) * (rank + 1)).sum())
    sum(out).backward()
    team.close()
    sums = [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]
    assert sums == [[3.0] * 3, None, [7.0] * 3, None, [5.0] * 3]
