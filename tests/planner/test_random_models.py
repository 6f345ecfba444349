"""Random programs, split wherever they can be: exact, and mostly split."""

import copy

import pytest
import torch
from random_models import Program

import tensor_parallel as tp
from tensor_parallel.planner import Exchange, make_plan
from tensor_parallel.testing import assert_parity, noisy

FOUND = (256,)
"""Seeds of programs that were split wrongly once."""


def inputs(seed, batch, length):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(batch, length, 12, dtype=torch.float64, generator=generator)}


@pytest.mark.parametrize("exchange", [Exchange(0.0, 0.0), Exchange(20.0, 1 / 64)], ids=["free", "priced"])
@pytest.mark.parametrize("seed", [*range(24), *FOUND])
def test_random_programs_are_exact(seed, exchange):
    model = noisy(Program(seed)).eval()
    plan = make_plan(model, 2, [inputs(seed, 2, 5)], exchange=exchange)
    assert any(tensor.is_cut for tensor in plan.tensors.values())
    for ranks in (2, 3):
        split = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * ranks, plan)
        assert_parity(copy.deepcopy(model), split, inputs(seed, 2, 5))
        assert_parity(copy.deepcopy(model), split, inputs(seed + 1, 3, 4))
