"""Without example inputs and without rules: layer by layer, as version 2.0's automatic configuration did it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import assert_parity, noisy

RANKS = [1, 2, 3, 5]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_and_linear_layers(table, ranks):
    torch.manual_seed(0)
    reference = noisy(
        nn.Sequential(table(1337, 64), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).double()
    )
    split = tp.TensorParallel(copy.deepcopy(reference), ["cpu"] * ranks)
    ids = torch.randint(1, 1000, (2, 10))
    assert_parity(reference, split, (ids,), steps=3)
    split.zero_grad(), reference.zero_grad()
    for model in (reference, split):
        model(ids).norm().backward()
    found = torch.cat([next(shard[0].parameters()).grad for shard in split.module_shards], dim=1)
    torch.testing.assert_close(found, reference[0].weight.grad, atol=1e-10, rtol=0)
    assert (split.modified_parameters_names >= {"0.weight", "2.weight"}) == (ranks > 1)


CONVS = [
    (nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d),
    (nn.ConvTranspose1d, nn.BatchNorm1d), (nn.ConvTranspose2d, nn.BatchNorm2d), (nn.ConvTranspose3d, nn.BatchNorm3d),
]  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("extra", [{}, {"padding": "same"}, {"stride": 2}, {"dilation": 2}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("conv", [conv for conv, _ in CONVS], ids=lambda conv: conv.__name__)
def test_convolutions(conv, extra, ranks):
    norm, dims = dict(CONVS)[conv], int(conv.__name__[-2])
    if "Transpose" in conv.__name__ and "padding" in extra:
        extra = {"padding": 1, "output_padding": 1, "stride": 2}
    torch.manual_seed(0)
    kernel = (3,) * dims
    reference = noisy(
        nn.Sequential(conv(6, 10, kernel, **extra), norm(10), nn.ReLU(), conv(10, 6, kernel, **extra)).double().train()
    )
    split = tp.TensorParallel(copy.deepcopy(reference), ["cpu"] * ranks)
    size = 10 if dims < 3 else 9
    x = torch.randn(2, 6, *[size] * dims, dtype=torch.float64, requires_grad=True)
    assert_parity(reference, split, (x,), steps=3)
    cut = ranks > 1 and "groups" not in extra
    assert (min(split.param_fractions) < 1) == cut
