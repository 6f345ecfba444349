"""Changes after the split of a model with fused projections, tied embeddings and biases everywhere."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from changed import assert_equal_files, assert_equal_models
from torch import nn
from transformers.pytorch_utils import Conv1D

import tensor_parallel as tp
from tensor_parallel.testing import noisy

RANKS = [2, 3]
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=24, n_layer=3, n_head=6, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return noisy(transformers.GPT2LMHeadModel(config).double().eval())


def pair(ranks):
    reference = gpt2()
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)


def fresh(make, seed=3):
    torch.manual_seed(seed)
    return noisy(make().double().eval())


def logits(model):
    return model(IDS, use_cache=False).logits


class Adapted(nn.Module):
    """A module put around one of the model's own, as LoRA does."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = fresh(lambda: nn.Linear(base.nx, 4, bias=False))
        self.up = fresh(lambda: nn.Linear(4, base.nf, bias=False), 4)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    for block in model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn)


def other_layer(model):
    model.transformer.h[1] = fresh(lambda: gpt2().transformer.h[0])


def cut_layers(model):
    model.transformer.h = model.transformer.h[:2]
    model.config.n_layer = 2


def delete_layer(model):
    del model.transformer.h[0]
    model.config.n_layer = 2


def swap(model):
    h = model.transformer.h
    h[0], h[2] = h[2], h[0]


def append_layer(model):
    model.transformer.h.append(fresh(lambda: gpt2().transformer.h[1]))
    model.config.n_layer = 4


def insert_and_pop(model):
    model.transformer.h.insert(1, fresh(lambda: gpt2().transformer.h[1]))
    model.transformer.h.pop(2)


def other_projection(model):
    model.transformer.h[0].mlp.c_fc = fresh(lambda: Conv1D(96, 24))


def new_head(model):
    model.lm_head = fresh(lambda: nn.Linear(24, 7))


def other_activation(model):
    model.transformer.h[0].mlp.act = nn.ReLU()


def function_as_activation(model):
    del model.transformer.h[1].mlp.act
    model.transformer.h[1].mlp.act = torch.tanh


def lambda_as_activation(model):
    mlp = model.transformer.h[1].mlp
    del mlp.act
    mlp.act = lambda h: torch.relu(h) * mlp.c_proj.bias.sum()


def assign_parameter(model):
    weight = torch.linspace(-1, 1, 24 * 96, dtype=torch.float64).view(24, 96)
    model.transformer.h[0].mlp.c_fc.weight = nn.Parameter(weight)


def add_bias(model):
    model.lm_head.bias = nn.Parameter(torch.linspace(0, 1, 101, dtype=torch.float64))


def bias_none(model):
    model.transformer.ln_f.bias = None
    model.transformer.h[0].ln_2.bias = None


def untie(model):
    model.lm_head.weight = nn.Parameter(model.state_dict()["lm_head.weight"].clone())
    model.config.tie_word_embeddings = False


def untie_and_tie(model):
    untie(model)
    logits(model)
    model.lm_head.weight = model.transformer.wte.weight
    model.config.tie_word_embeddings = True


def set_output(model):
    model.set_output_embeddings(fresh(lambda: nn.Linear(24, 101, bias=False)))
    model.config.tie_word_embeddings = False


def tie_again(model):
    model.set_output_embeddings(fresh(lambda: nn.Linear(24, 101, bias=False)))
    model.tie_weights()


def tie_after_a_call(model):
    set_output(model)
    logits(model)
    model.config.tie_word_embeddings = True
    model.tie_weights()


def resize(model):
    torch.manual_seed(7)
    model.resize_token_embeddings(90, mean_resizing=False)


def set_embeddings(model):
    model.set_input_embeddings(fresh(lambda: nn.Embedding(101, 24)))
    model.config.tie_word_embeddings = False


def attribute(model):
    model.transformer.h[1].attn.scaling = 0.9
    model.transformer.ln_f.eps = 0.3


def buffer(model):
    model.transformer.register_buffer("table", torch.linspace(0, 1, 24, dtype=torch.float64))


def by_dict(model):
    model.transformer.h._modules["1"] = fresh(lambda: gpt2().transformer.h[0])


def train_and_evaluate(model):
    model.transformer.h[1] = fresh(lambda: gpt2().transformer.h[0]).train()
    model.train()
    logits(model)
    model.eval()


def apply_to_all(model):
    def init(module):
        if isinstance(module, Conv1D):
            assert module.weight.shape == (module.nx, module.nf)
            nn.init.normal_(module.weight, std=0.05)

    torch.manual_seed(8)
    model.apply(init)


def write_whole(model):
    with tp.whole_parameters(model), torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[:, 3:17] *= 2
        model.transformer.wpe.weight.data = model.transformer.wpe.weight.data.flip(0)


CHANGES = [
    adapt, other_layer, cut_layers, delete_layer, swap, append_layer, insert_and_pop, other_projection, new_head,
    other_activation, function_as_activation, lambda_as_activation, assign_parameter, add_bias, bias_none, untie,
    untie_and_tie, set_output, tie_again, tie_after_a_call, resize, set_embeddings, attribute, buffer, by_dict,
    train_and_evaluate, apply_to_all, write_whole,
]  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_act_on_all_ranks(change, ranks, tmp_path):
    reference, split = pair(ranks)
    split(IDS)
    change(reference), change(split)
    assert_equal_models(split, reference, logits)
    assert_equal_files(split, reference, tmp_path)


@pytest.mark.parametrize("ranks", RANKS)
def test_dropout_of_new_modules(ranks):
    """A layer put in while the model trains drops what the unsplit one drops."""
    reference, split = pair(ranks)
    for model in (reference, split):
        model.train()
        model(IDS)
        other_layer(model)
        model.transformer.h[1].train()

    def seeded(model):
        torch.manual_seed(5)
        return logits(model)

    assert_equal_models(split, reference, seeded)


@pytest.mark.parametrize("size", [90, 111])
def test_embeddings_resized_while_an_optimiser_with_state_lives(size):
    """Its state keeps the old shape: an error unsplit too, and must not be silent here."""
    reference, split = pair(2)
    for model in (reference, split):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        model.resize_token_embeddings(size, mean_resizing=False)
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        with pytest.raises((RuntimeError, tp.TensorParallelError)):
            optimizer.step()


@pytest.mark.parametrize("ranks", RANKS)
def test_embeddings_resized_while_an_optimiser_without_state_lives(ranks):
    reference, split = pair(ranks)
    for model in (reference, split):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        logits(model).pow(2).mean().backward()
        optimizer.step()
        resize(model)
        optimizer.zero_grad()
        logits(model).pow(2).mean().backward()
        optimizer.step()
    assert_equal_models(split, reference, logits)
