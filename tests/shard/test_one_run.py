"""What is kept for one run goes with it, however it ends."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import tensor_parallel as tp
from tensor_parallel.shard import shards_of
from tensor_parallel.testing import assert_parity, noisy

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


class Memory:
    """An object that the root makes for its layers, as a cache is."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, memory):
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"all": nn.ModuleList([Layer(), Layer()])})
        self.head = nn.Linear(6, 12)

    def forward(self, x):
        memory = Memory()
        for layer in self.layers["all"]:
            x = layer(x, memory)
        return self.head(x).log_softmax(-1)


def pair():
    reference = noisy(Net().double())
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs={"x": X})


@pytest.mark.parametrize("where", ["layers.all.1", "layers.all.1.down", "head"])
def test_a_run_that_fails_leaves_nothing(where):
    reference, split = pair()
    shards, seen = shards_of(split), []

    def fail(module, args):
        assert shards.under_way is not None
        raise ValueError("from a hook")

    def keep(module, args):
        seen.append(weakref.ref(args[1]))

    noting = split.layers["all"][0].register_forward_pre_hook(keep)
    failing = split.get_submodule(where).register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        split(X)
    assert shards.under_way is None
    noting.remove()
    failing.remove()
    gc.collect()
    assert [reference() for reference in seen] == [None]
    assert_parity(reference.eval(), split.eval(), {"x": X})


def test_a_run_that_ends_alone_leaves_nothing():
    _, split = pair()
    shards, made = shards_of(split), []
    assert shards.has_tail

    class Watched(Memory):
        def __init__(self):
            made.append(weakref.ref(self))
            assert shards.under_way.ends_alone

    before = Net.forward.__globals__["Memory"]
    Net.forward.__globals__["Memory"] = Watched
    try:
        split(X).sum().backward()
        split(X).sum().backward()
    finally:
        Net.forward.__globals__["Memory"] = before
    gc.collect()
    assert len(made) == 4  # one a rank
    assert [found() for found in made] == [None] * 4
    assert shards.under_way is None
