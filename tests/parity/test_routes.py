"""Attributes and settings that lead a forward, set after the split: the plan follows them, and only them."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import transformers
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import noisy

RANKS = [2, 3]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.mode, self.scale, self.threshold, self.activation = "relu", 1.5, 0.1, torch.tanh
        self.settings = Settings()
        self.unread = 0

    def forward(self, x):
        h = self.up(x) * self.scale
        if self.threshold * 2 > 1:
            h = h.cumsum(-1)
        if self.mode == "norm":
            h = h / h.norm(dim=-1, keepdim=True)
        elif self.mode == "gradient":
            (h,) = torch.autograd.grad((h.softmax(-1) * h).sum(), h, create_graph=True)
        elif getattr(self, "mean", False):
            h = h - h.mean(-1, keepdim=True)
        if self.settings.sort[0]:
            h = h.sort(-1).values
        return self.down(self.activation(h)) + self.settings.shift


class Settings:
    def __init__(self):
        self.sort, self.shift = [False], 0.25


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].settings = self.blocks[0].settings
        self.reverse = False

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.flip(-1) if self.reverse else x


X = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pair(ranks, **given):
    torch.manual_seed(0)
    reference = noisy(Net().double())
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=(X,), **given)


def assert_equal(reference, model):
    found = []
    for one in (reference, model):
        one.zero_grad()
        x = X.clone().requires_grad_()
        out = one(x)
        out.square().sum().backward()
        found.append((out, x.grad))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    with tp.whole_parameters(model):
        for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=0, atol=1e-12), name


def set_on(model, path, value):
    *holders, last = path.split(".")
    for name in holders:
        model = getattr(model, name)
    if isinstance(model, list):
        model[int(last)] = value
    else:
        setattr(model, last, value)


CHANGES = {
    "a word": ("blocks.1.mode", "norm"),
    "a word that asks for gradients inside": ("blocks.0.mode", "gradient"),
    "an attribute that was not there": ("blocks.0.mean", True),
    "a float that is compared": ("blocks.1.threshold", 0.7),
    "a function": ("blocks.0.activation", lambda h: h.softmax(-1)),
    "an item of a list in an object": ("blocks.0.settings.sort.0", True),
    "a float in an object": ("blocks.0.settings.shift", 0.5),
    "another object": ("blocks.1.settings", None),
    "of the root": ("reverse", True),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_leads_the_forward_is_followed(change, ranks):
    reference, model = pair(ranks)
    assert_equal(reference, model)
    path, value = CHANGES[change]
    if value is None:
        value = Settings()
        value.sort = [True]
    for one in (reference, model):
        set_on(one, path, value)
    assert_equal(reference, model)


def planned(caplog):
    return sum("anew" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("path", "value"),
    [("blocks.0.scale", 0.5), ("blocks.1.unread", 7), ("blocks.0.mode", "relu"), ("blocks.0.other", object())],
)
def test_what_cannot_lead_it_costs_no_plan(path, value, caplog):
    reference, model = pair(2)
    with caplog.at_level(logging.INFO):
        for one in (reference, model):
            set_on(one, path, value)
        assert_equal(reference, model)
    assert planned(caplog) == 0


def test_a_change_taken_back_costs_no_plan(caplog):
    reference, model = pair(2)
    with caplog.at_level(logging.INFO):
        model.blocks[0].mode = "norm"
        model.blocks[0].settings.sort[0] = True
        model.blocks[0].settings.sort[0] = False
        model.blocks[0].mode = "relu"
        assert_equal(reference, model)
    assert planned(caplog) == 0


def test_what_the_model_writes_itself_costs_no_plan(caplog):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.seen = nn.Linear(6, 6), 0, {"last": None}

        def forward(self, x):
            self.calls += 1
            self.seen["last"] = self.calls
            return self.layer(x) * (1 if self.seen["last"] else 0)

    model = tp.tensor_parallel(Counting().double(), ["cpu"] * 2, example_inputs=(X,))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            model(X)
    assert planned(caplog) == 0
    assert model.calls == 3


@pytest.mark.parametrize("ranks", RANKS)
def test_set_on_the_joined_model(ranks):
    reference, model = pair(ranks)
    with tp.whole_parameters(model):
        model.blocks[0].mode = "norm"
    reference.blocks[0].mode = "norm"
    assert_equal(reference, model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_of_a_changed_model(copied):
    reference, model = pair(2)
    for one in (reference, model):
        one.blocks[0].mode = "norm"
    made = copied(model)
    assert_equal(reference, made)
    for one in (reference, made):
        one.blocks[1].mode = "gradient"
    assert_equal(reference, made)


def test_a_given_plan_is_replaced_where_it_does_not_hold(caplog, tmp_path):
    reference, model = pair(2)
    plan = tp.make_plan(reference, 2, (X,))
    plan.save(tmp_path / "plan.json")
    model = tp.tensor_parallel(
        copy.deepcopy(reference), ["cpu"] * 2, tp.Plan.load(tmp_path / "plan.json"), example_inputs=(X,)
    )
    for one in (reference, model):
        one.blocks[0].mode = "norm"
    with caplog.at_level(logging.WARNING):
        assert_equal(reference, model)
    assert "in place of the given plan: blocks.0.mode was 'relu' and is 'norm'" in caplog.text


def test_a_hook_that_sets_it_in_the_middle_is_refused():
    _, model = pair(2)
    model.blocks[0].register_forward_hook(lambda *_: setattr(model.blocks[1], "mode", "norm"))
    with pytest.raises(NotImplementedError, match=r"mode of blocks\.1 was set by a hook"):
        model(X)


def test_a_hook_may_keep_what_it_saw():
    reference, model = pair(2)
    model.blocks[0].register_forward_hook(lambda module, _, out: setattr(module, "seen", out.sum().item()))
    assert_equal(reference, model)
    assert isinstance(model.blocks[0].seen, float)


@pytest.mark.parametrize("setting", ["_attn_implementation", "output_hidden_states", "num_hidden_layers"])
def test_the_config_of_a_transformers_model(setting):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=32,
    )  # fmt: skip
    reference = noisy(transformers.LlamaForCausalLM(config).double().eval())
    model = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    ids = torch.tensor([[5, 6, 7, 8]])
    model(ids)
    value = {"_attn_implementation": "eager", "output_hidden_states": True, "num_hidden_layers": 2}[setting]
    for one in (reference, model):
        setattr(one.config, setting, value)
    wanted, found = reference(ids), model(ids)
    assert torch.allclose(wanted.logits, found.logits, rtol=0, atol=1e-12)
    assert (wanted.hidden_states is None) == (found.hidden_states is None)
    for a, b in zip(wanted.hidden_states or (), found.hidden_states or (), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["inference", "autocast", "saved tensors"])
def test_the_call_after_a_change_leaves_nothing_of_its_modes(mode):
    reference, model = pair(2)
    for one in (reference, model):
        one.blocks[0].mode = "norm"
    seen = []
    modes = {
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "saved tensors": torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t),
    }
    with modes[mode]:
        model(X)
    first = len(seen)
    assert_equal(reference, model)
    if mode == "saved tensors":
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            model(X)
        assert len(seen) == first > 0


def test_a_patched_forward_stays_where_it_is():
    reference, model = pair(2)
    calls = []
    for one in (reference, model):
        own = one.blocks[1].forward
        one.blocks[1].forward = lambda x, own=own: calls.append(x.shape) or own(x) * 2
        one.blocks[0].mode = "norm"
    assert_equal(reference, model)
    with tp.whole_parameters(model):
        model.blocks[0].mode = "relu"
        inside = model(X)
    reference.blocks[0].mode = "relu"
    assert torch.allclose(inside, reference(X), rtol=0, atol=1e-12)
    assert_equal(reference, model)
    assert len(calls) == 6
