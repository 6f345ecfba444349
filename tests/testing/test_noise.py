"""Noise leaves nothing constant."""

import pytest
import torch
from torch import nn

from tensor_parallel.testing import ConvNet, Gpt, Llama, Mlp, TiedEmbedding, noisy

MODELS = [Mlp, ConvNet, TiedEmbedding, Gpt, Llama]


def constant(tensor):
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_learned_stays_constant(kind):
    model = kind()
    fresh = {n for n, t in model.state_dict().items() if t.is_floating_point() and constant(t)}
    assert noisy(model) is model
    left = [n for n, t in model.state_dict().items() if t.is_floating_point() and (constant(t) or not t.all())]
    assert left == []
    if kind is not Mlp:
        assert fresh


def test_variances_stay_positive_and_counters_untouched():
    model = noisy(ConvNet(), seed=3)
    assert (model.stem_norm.running_var > 0.4).all()
    assert model.stem_norm.running_mean.abs().max() > 0
    assert model.stem_norm.num_batches_tracked == 0


def test_computed_buffers_are_left_alone():
    model = Llama()
    before = model.inv_freq.clone()
    noisy(model)
    assert torch.equal(model.inv_freq, before)


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a, b, c = (noisy(nn.Linear(3, 3).requires_grad_(False).float(), seed) for seed in (1, 1, 2))
    torch.manual_seed(5)
    noisy(nn.Identity())
    assert torch.equal(torch.rand(3), expected)
    for module in (a, b, c):
        assert not constant(module.bias)


def test_ties_stay_and_get_noise_once():
    model = TiedEmbedding()
    before = model.embed.weight.detach().clone()
    noisy(model)
    assert model.head.weight is model.embed.weight
    assert (model.embed.weight - before).abs().max() < 0.6


@pytest.mark.parametrize("kind", MODELS)
def test_each_model_runs_on_its_own_inputs(kind):
    model = noisy(kind().double())
    for inputs in (model.inputs(), model.inputs(batch=1, length=4, seed=9)):
        out = model(**inputs)
        assert out.isfinite().all()
        assert out.dtype == torch.float64
    model(**model.inputs()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
