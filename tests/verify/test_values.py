"""Tensors by path, and differences that mean something."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from tensor_parallel.verify.values import difference, mapped, tensors_in, weighted_sum

Pair = namedtuple("Pair", "left right")
INF = float("inf")


@dataclass
class Out:
    logits: torch.Tensor
    cache: object = None


def test_paths_of_nested_outputs():
    t = torch.ones(1)
    value = {"a": t, "b": [t, {"c": t}], "p": Pair(t, None), "d": Out(t, object()), "n": 3}
    assert [path for path, _ in tensors_in(value)] == ["a", "b[0]", "b[1].c", "p.left", "d.logits"]
    assert [path for path, _ in tensors_in(t)] == ["output"]
    assert [path for path, _ in tensors_in((t, t))] == ["[0]", "[1]"]


def test_mapped_keeps_the_nest():
    value = {"a": (torch.ones(1), 2), "p": Pair(torch.ones(1), "x"), "l": [torch.ones(1)]}
    got = mapped(value, lambda t: t * 2)
    assert got["a"][0].item() == got["p"].left.item() == got["l"][0].item() == 2
    assert got["a"][1] == 2
    assert isinstance(got["p"], Pair)


@pytest.mark.parametrize(
    ("given", "expected", "floor", "value"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 0.0, 0.5),
        (torch.tensor([1.0]), torch.tensor([1.5]), 5.0, 0.1),
        (torch.zeros(2), torch.zeros(3), 0.0, INF),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0, INF),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0, 0.0),
        (torch.tensor([INF, 1.0]), torch.tensor([INF, 1.0]), 0.0, 0.0),
        (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]), 0.0, INF),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0]), 0.0, INF),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), 0.0, 0.0),
        (torch.tensor([-1e38, 1.0]), torch.tensor([-1e38, 2.0]), 0.0, 0.5),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), 0.0, 0.5),
        (None, torch.zeros(2), 0.0, 0.0),
        (None, torch.ones(2), 0.0, INF),
        (torch.ones(2), None, 0.0, INF),
        (None, None, 0.0, 0.0),
        (torch.zeros(0), torch.zeros(0), 0.0, 0.0),
    ],
)
def test_differences(given, expected, floor, value):
    assert difference(given, expected, floor) == pytest.approx(value)


def test_the_scalar_reaches_every_element_with_equal_weights_for_equal_seeds():
    a = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    b = torch.ones(4, dtype=torch.float64, requires_grad=True)
    value = {"a": a * 1, "ids": torch.tensor([1]), "masked": torch.where(b > 5, b, torch.tensor(-INF)), "b": b * 2}
    first, again, other = (weighted_sum(value, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    first.backward()
    assert (a.grad != 0).all()
    assert (b.grad != 0).all()
    assert b.grad.isfinite().all()
    assert weighted_sum(torch.ones(3), 0) is None
