"""Changes after the split of models other than transformers' Llama: containers, buffers, biases, modes, optimisers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import noisy

RANKS = [2, 3]
X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, 14), nn.Linear(14, 6), F.gelu

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Stack(nn.Module):
    """Blocks in a list, heads in a dict, a buffer that the forward reads."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.heads = nn.ModuleDict({"first": nn.Linear(6, 5), "second": nn.Linear(6, 5)})
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("shift", torch.linspace(0, 1, 6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x + self.shift)
        if "table" in self._buffers:
            x = x * self.table
        return sum(head(x) for head in self.heads.values())


def fresh(make, seed=3):
    torch.manual_seed(seed)
    return noisy(make().double())


def stack():
    return fresh(Stack, 0)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=101, n_embd=24, n_layer=3, n_head=6, n_positions=32)
    return noisy(transformers.GPT2LMHeadModel(config).double().eval())


def delete_bias(model):
    del model.blocks[0].up.bias
    model.blocks[0].up.register_parameter("bias", None)


def bias_none(model):
    model.blocks[1].down.bias = None
    model.blocks[0].up.bias = None


def add_buffer(model):
    model.register_buffer("table", torch.linspace(1, 2, 6, dtype=torch.float64))


def other_buffer(model):
    model.shift = torch.linspace(2, 1, 6, dtype=torch.float64)


def by_dict(model):
    model._modules["blocks"]._modules["1"] = fresh(Block)


def set_item(model):
    model.heads["third"] = fresh(lambda: nn.Linear(6, 5))
    model.heads["first"] = fresh(lambda: nn.Linear(6, 5), 4)


def delete_item(model):
    del model.heads["first"]


def insert(model):
    model.blocks.insert(1, fresh(Block))


def pop(model):
    model.blocks.pop(0)


def extend(model):
    model.blocks.extend([fresh(Block, 5), fresh(Block, 6)])


def new_container(model):
    model.heads = nn.ModuleDict({"only": fresh(lambda: nn.Linear(6, 9))})


def evaluate_one(model):
    model.norm.eval()


def new_norm_in_eval(model):
    model.norm = fresh(lambda: nn.BatchNorm1d(6)).eval()


def function(model):
    model.blocks[1].act = torch.tanh


def method_of_a_module(model):
    model.blocks[1].act = model.blocks[1].down.forward_after = nn.Softplus()


def closure(model):
    factor = 0.3
    model.blocks[0].act = lambda h: torch.relu(h) * factor


def shared_block(model):
    model.blocks[2] = model.blocks[0]


def untie_blocks(model):
    model.blocks[2] = copy.deepcopy(model.blocks[0])


def half_the_model(model):
    model.blocks[0].float()
    model.blocks[0].double()


STACK = [
    delete_bias, bias_none, add_buffer, other_buffer, by_dict, set_item, delete_item, insert, pop, extend,
    new_container, evaluate_one, new_norm_in_eval, function, method_of_a_module, closure, shared_block, untie_blocks,
    half_the_model,
]  # fmt: skip


def cut_layers(model):
    model.transformer.h = model.transformer.h[:2]
    model.config.n_layer = 2


def swap(model):
    h = model.transformer.h
    h[0], h[2] = h[2], h[0]


def other_layer(model):
    model.transformer.h[1] = fresh(lambda: gpt2().transformer.h[0])


def other_projection(model):
    model.transformer.h[0].mlp.c_fc = fresh(lambda: transformers.pytorch_utils.Conv1D(96, 24))


def set_output(model):
    model.set_output_embeddings(fresh(lambda: nn.Linear(24, 101, bias=False)))


def tie_again(model):
    model.set_output_embeddings(fresh(lambda: nn.Linear(24, 101, bias=False)))
    model.config.tie_word_embeddings = True
    model.tie_weights()


def resize(model):
    torch.manual_seed(7)
    model.resize_token_embeddings(90, mean_resizing=False)


def set_embeddings(model):
    model.set_input_embeddings(fresh(lambda: nn.Embedding(101, 24)))


GPT2 = [cut_layers, swap, other_layer, other_projection, set_output, tie_again, resize, set_embeddings]


def assert_equal_models(split, reference, call, steps=2):
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, split)]
    for step in range(steps):
        losses = []
        for model, optimizer in zip((reference, split), optimizers, strict=True):
            optimizer.zero_grad()
            loss = call(model).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(
            losses[1], losses[0], atol=1e-11, rtol=1e-11, msg=lambda text, n=step: f"{n}: {text}"
        )
    state, wanted = split.state_dict(), reference.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            state[name], tensor, atol=1e-8, rtol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("change", STACK, ids=lambda change: change.__name__)
def test_changes_of_a_hand_written_model(change, ranks):
    reference = stack()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=(X,))
    split(X), reference(X)
    change(reference), change(split)
    assert_equal_models(split, reference, lambda model: model(X))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("change", GPT2, ids=lambda change: change.__name__)
def test_changes_of_gpt2(change, ranks, tmp_path):
    reference = gpt2()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)
    split(IDS)
    change(reference), change(split)
    ids = IDS % 90
    assert_equal_models(split, reference, lambda model: model(ids, use_cache=False).logits)
    split.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    wanted, found = (model(ids, use_cache=False).logits for model in (reference, loaded))
    torch.testing.assert_close(found, wanted, atol=1e-8, rtol=1e-8)


def test_one_weights_parts_in_two_optimisers_are_refused():
    split = tp.tensor_parallel(stack(), ["cpu"] * 2, example_inputs=(X,))
    parts = {name: p for name, p in split.named_parameters() if name.startswith("blocks.0.up.weight")}
    assert len(parts) == 2
    split(X).sum().backward()
    first, _ = (torch.optim.AdamW([part], lr=1e-2) for part in parts.values())
    with pytest.raises(tp.TensorParallelError, match=r"blocks\.0\.up\.weight"):
        first.step()


def test_embeddings_resized_while_an_optimiser_lives():
    """Their state keeps the old shape: that is an error unsplit too, and must not be silent here."""
    reference = gpt2()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    ids = IDS % 90
    for model in (reference, split):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        model.resize_token_embeddings(111, mean_resizing=False)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        with pytest.raises((RuntimeError, tp.TensorParallelError)):
            optimizer.step()


class Moving(nn.Module):
    """Cut buffers: one that the forward exchanges, one that it reads."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6)
        self.register_buffer("average", torch.linspace(0, 1, 14))
        self.register_buffer("scale", torch.linspace(1, 2, 14))

    def forward(self, x):
        hidden = self.up(x) * self.scale
        self.average = 0.9 * self.average + 0.1 * hidden.mean(0).detach()
        return self.down(hidden - self.average)


@pytest.mark.parametrize("ranks", RANKS)
def test_cut_buffers_that_the_forward_and_the_user_exchange(ranks):
    reference = fresh(Moving, 0)
    plan = tp.make_plan(reference, ranks, (X,))
    assert plan.tensors["average"].is_cut
    assert plan.tensors["scale"].is_cut
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, plan)
    assert_equal_models(split, reference, lambda model: model(X))
    for name in ("scale", "average"):
        for model in (reference, split):
            setattr(model, name, torch.linspace(3, 4, 14, dtype=torch.float64))
        assert_equal_models(split, reference, lambda model: model(X))
    with tp.whole_parameters(split):
        assert split.average.shape == (14,)
        split.average.zero_()
    reference.average.zero_()
    assert_equal_models(copy.deepcopy(split), copy.deepcopy(reference), lambda model: model(X))
    assert_equal_models(split, reference, lambda model: model(X))
