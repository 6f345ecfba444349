"""Random draws of all ranks together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensor_parallel.errors import CollectiveError
from tensor_parallel.runtime import ThreadTeam

CPU = torch.device("cpu")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module", params=[2, 3])
def team(request: pytest.FixtureRequest) -> ThreadTeam:
    return ThreadTeam([CPU] * request.param)


def attention() -> torch.Tensor:
    weight, bias = X.new_ones(18, 6), X.new_ones(18)
    out = F.multi_head_attention_forward(
        X[:, None], X[:, None], X[:, None], 6, 2, weight, bias, None, None, False, 0.5, weight[:6], bias[:6]
    )
    return out[0]


def lstm() -> torch.Tensor:
    out, _ = torch.nn.LSTM(6, 2, 2, dropout=0.5)(X)
    return out.detach()


DRAWS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "module": lambda: torch.nn.Dropout(0.3)(X),
    "in place": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "sdpa": lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.5),
    "multi-head attention": attention,
    "rand": partial(torch.rand, 3),
    "randn_like": partial(torch.randn_like, X),
    "randint": partial(torch.randint, 0, 100, (5,)),
    "randperm": partial(torch.randperm, 9),
    "multinomial": lambda: torch.multinomial(X.abs(), 2),
    "method": lambda: torch.empty(7).uniform_(),
    "bernoulli": X.sigmoid().bernoulli,
    "gumbel": partial(F.gumbel_softmax, X),
    "rrelu": partial(F.rrelu, X, training=True),
    "lstm": lstm,
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_rank_draws_what_one_process_draws(team: ThreadTeam, name: str) -> None:
    """Twice, so that the generator's state in between counts too."""
    draw = DRAWS[name]
    torch.manual_seed(3)
    expected = [draw(), draw(), torch.rand(1)]
    torch.manual_seed(3)
    found = team.run(lambda rank: [draw(), draw()], joint_random=True)
    after = torch.rand(1)
    for results in found:
        assert torch.equal(results[0], expected[0])
        assert torch.equal(results[1], expected[1])
    assert torch.equal(after, expected[2])
    assert not torch.equal(expected[0], expected[1])


def test_parts_of_a_split_tensor_get_draws_of_their_own(team: ThreadTeam) -> None:
    parts = [torch.full((64,), rank + 1.0) for rank in range(team.world_size)]
    torch.manual_seed(3)
    expected = [F.dropout(part) for part in parts]
    for _ in range(3):
        torch.manual_seed(3)
        for result, one in zip(team.run(lambda r: F.dropout(parts[r]), joint_random=True), expected, strict=True):
            assert torch.equal(result, one)
    assert not torch.equal(expected[0] == 0, expected[1] == 0)


def test_a_users_own_generator_moves_on_once(team: ThreadTeam) -> None:
    def draw(generator: torch.Generator) -> torch.Tensor:
        return torch.rand(4, generator=generator)

    reference, mine = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(2):
        expected = draw(reference)
        assert all(torch.equal(found, expected) for found in team.run(lambda rank: draw(mine), joint_random=True))


def test_gradients_pass_through_joint_dropout(team: ThreadTeam) -> None:
    leaf = X.clone().requires_grad_()
    torch.manual_seed(3)
    F.dropout(leaf * 2, 0.5).sum().backward()
    expected, leaf.grad = leaf.grad, None
    torch.manual_seed(3)
    team.run(lambda rank: F.dropout(leaf * 2, 0.5), joint_random=True)[0].sum().backward()
    assert torch.equal(leaf.grad, expected)


def test_calls_that_draw_nothing_do_not_meet(team: ThreadTeam) -> None:
    def work(rank: int) -> None:
        if rank == 0:  # a meeting would wait for the others
            F.dropout(X, 0.5, training=False)
            F.dropout(X, 0.5, False)
            F.dropout(X, p=0.0)
            torch.nn.Dropout(0.5).eval()(X)
            F.scaled_dot_product_attention(Q, Q, Q)
            F.rrelu(X)

    state = torch.get_rng_state()
    team.run(work, joint_random=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_different_draws_are_named(team: ThreadTeam) -> None:
    with pytest.raises(CollectiveError, match=r"\['rand', 'randn'"):
        team.run(lambda rank: torch.randn(2) if rank else torch.rand(2), joint_random=True)
    assert len(team.run(lambda rank: torch.rand(2), joint_random=True)) == team.world_size
