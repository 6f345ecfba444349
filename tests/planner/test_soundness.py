"""Models made to break a planner, end to end: what is split must be exact, with every gradient."""

import copy

import pytest
import torch
from hard_models import CASES

import tensor_parallel as tp
from tensor_parallel.planner import Exchange, make_plan
from tensor_parallel.testing import assert_parity, noisy

FREE = Exchange(call=0.0, byte=0.0)
"""Collectives for nothing: tiny models are split wherever they can be."""


def built(name, train=False):
    torch.manual_seed(3)
    build, inputs = CASES[name]
    return noisy(build().double().train(train)), inputs


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_split_is_exact(name, train):
    model, inputs = built(name, train)
    plan = make_plan(model, 2, [as_example(inputs(2, 5, 1))], exchange=FREE)
    for ranks in (2, 3, 4):
        reference = copy.deepcopy(model)
        split = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * ranks, plan)
        assert_parity(reference, split, inputs(2, 5, 1))
        assert_parity(reference, split, inputs(3, 4, 2))
        with torch.no_grad():
            assert_parity(reference, split, inputs(1, 7, 3))


def as_example(inputs):
    return inputs
