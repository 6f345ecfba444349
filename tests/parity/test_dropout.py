"""Dropout in split models: the unsplit model's masks for the same seed, on whole and on cut tensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from families import CLASSES, config, padded
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensor_parallel as tp
from tensor_parallel.testing import noisy

DROPOUT = {
    "llama": {"attention_dropout": 0.3},
    "llama nine heads": {
        "attention_dropout": 0.3, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8
    },
    "qwen3": {"attention_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
}  # fmt: skip


def build(family, implementation):
    torch.manual_seed(0)
    name = family.partition(" ")[0]
    return noisy(CLASSES[name](config(name, **DROPOUT[family], attn_implementation=implementation)).double().train())


def gradients(model):
    if isinstance(model, tp.TensorParallel):
        return tp.full_gradients(model)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(reference, split, inputs, loss_of, steps=1, tolerance=1e-11):
    ends = []
    for model in (reference, split):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(7)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(**inputs))
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        ends.append((torch.stack(losses), torch.get_rng_state()))
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=1e-12, atol=1e-12)
    assert torch.equal(ends[1][1], ends[0][1]), "the generator ends elsewhere"
    mine, theirs = gradients(split), gradients(reference)
    assert list(mine) == list(theirs)
    for name in theirs:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", DROPOUT)
def test_families_train_as_unsplit(family, ranks, implementation):
    reference = build(family, implementation)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)
    inputs = padded(left=False)
    inputs["labels"] = inputs["input_ids"]
    steps = 3 if ranks == 3 else 1
    assert_same_training(reference, split, inputs, lambda output: output.loss, steps, 1e-7 if steps > 1 else 1e-11)


def test_an_encoder_decoder_trains_as_unsplit():
    settings = transformers.T5Config(
        vocab_size=101,
        d_model=24,
        d_kv=4,
        d_ff=20,
        num_layers=2,
        num_heads=6,
        dropout_rate=0.2,
        decoder_start_token_id=0,
    )
    reference = noisy(transformers.T5ForConditionalGeneration(settings).double().train())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3)
    inputs = padded(left=False)
    inputs["labels"] = inputs["input_ids"]
    assert_same_training(reference, split, inputs, lambda output: output.loss)


class Cut(nn.Module):
    """Random calls of many kinds on hidden units, which are cut."""

    def __init__(self, how):
        super().__init__()
        self.how, self.up, self.down, self.drop = how, nn.Linear(6, 10), nn.Linear(10, 6), nn.Dropout(0.4)

    def forward(self, x):
        hidden = KINDS[self.how](self, self.up(x))
        if self.how == "partial":
            return self.drop(self.down(torch.tanh(hidden)))
        return self.down(torch.tanh(hidden))


KINDS = {
    "module": lambda m, h: m.drop(h),
    "in place": lambda m, h: F.dropout(h * 1, 0.4, m.training, True),
    "twice": lambda m, h: F.dropout(m.drop(torch.tanh(h)), p=0.2, training=m.training),
    "keyword": lambda m, h: F.dropout(input=h, p=0.2, training=m.training),
    "transposed": lambda m, h: F.dropout(h.transpose(0, 1), 0.4, m.training).transpose(0, 1),
    "noise": lambda m, h: h + torch.randn_like(h),
    "function": lambda m, h: torch.dropout(h, 0.3, m.training),
    "alpha": lambda m, h: F.alpha_dropout(h, 0.3, m.training),
    "alpha in place": lambda m, h: F.alpha_dropout(h * 1, 0.3, m.training, True),
    "feature alpha": lambda m, h: F.feature_alpha_dropout(h, 0.3, m.training),
    "feature": lambda m, h: F.dropout1d(h[..., None], 0.3, m.training)[..., 0],
    "bernoulli": lambda m, h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "bernoulli in place": lambda m, h: h * torch.empty_like(h).bernoulli_(torch.sigmoid(h.detach())),
    "gumbel": lambda m, h: F.gumbel_softmax(h, 0.7, dim=0),
    "hard gumbel": lambda m, h: F.gumbel_softmax(h, 0.7, hard=True, dim=0),
    "partial": lambda m, h: h,
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", KINDS)
def test_random_calls_on_cut_units(how, ranks):
    reference = noisy(Cut(how).double().train())
    x = torch.randn(4, 6, dtype=torch.float64)
    plan = tp.make_plan(reference, ranks, {"x": x})
    assert plan.tensors["up.weight"].is_cut
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, plan)
    assert_same_training(reference, split, {"x": x}, lambda output: output.pow(2).sum(), 2)


def test_equal_values_on_two_ranks_do_not_share_a_mask():
    """What the ranks hold cannot say how it lies: here both halves are the same numbers."""
    reference = Cut("module").double().train()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.fill_(0.5)
    x = torch.ones(4, 6, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs={"x": x})
    assert_same_training(reference, split, {"x": x}, lambda output: output.sum())


def test_a_call_that_the_plan_does_not_know_draws_reproducibly():
    class Hidden(Cut):
        def forward(self, x):
            if self.training:
                return self.down(F.dropout(torch.tanh(self.up(x)), 0.4, True))
            return self.down(torch.tanh(self.up(x)))

    reference = noisy(Hidden("").double().eval())
    x = torch.randn(4, 6, dtype=torch.float64)
    split = tp.tensor_parallel(reference, ["cpu"] * 2, example_inputs={"x": x}).train()
    found = []
    for _ in range(3):
        torch.manual_seed(1)
        found.append(split(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_model_that_draws_in_eval_mode():
    class Noisy(Cut):
        def forward(self, x):
            return self.down(torch.tanh(self.up(x) + torch.rand_like(self.up(x)))) + torch.rand_like(x)

    reference = noisy(Noisy("").double().eval())
    x = torch.randn(4, 6, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3, example_inputs={"x": x})
    for _ in range(2):
        ends = []
        for model in (reference, split):
            torch.manual_seed(5)
            ends.append((model(x), torch.rand(3)))
        torch.testing.assert_close(ends[1], ends[0], rtol=1e-12, atol=1e-12)


def test_the_plan_says_how_draws_lie_and_keeps_it_as_json():
    plan = tp.make_plan(build("llama", "sdpa"), 2)
    (draw,) = plan.modules["model.layers.0.self_attn"].draws
    assert (draw.index, draw.function, draw.placement.kind) == (0, "scaled_dot_product_attention", "shard")
    assert [dim for dim, _ in draw.placement.dims] == [-3]
    assert tp.Plan.from_json(plan.to_json()).modules == plan.modules


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "how",
    [
        {"is_causal": True},
        {"scale": 0.3, "is_causal": True},
        {"enable_gqa": True},
        {"mask": "bool", "enable_gqa": True},
        {"mask": "rows"},
        {"mask": "float", "scale": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attention_drops_what_it_drops_unsplit(how, ranks, dtype):
    """The weights of heads that are cut, in every way to call torch's own attention."""
    given = dict(how)
    kind = given.pop("mask", None)
    if kind is not None:
        allowed = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) > 0.4
        allowed[torch.arange(5), torch.arange(5)] = True
        if kind == "rows":
            allowed[2] = False
        given["attn_mask"] = torch.randn(5, 5, dtype=dtype) if kind == "float" else allowed

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 24), nn.Linear(6, 12), nn.Linear(6, 12)
            self.out, self.heads, self.groups = nn.Linear(24, 6), 6, 3

        def forward(self, x):
            q, k, v = (
                f(x).view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)
                for f, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
            )
            if not given.get("enable_gqa"):
                k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, **given)
            return self.out(found.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    reference = noisy(Attention().to(dtype).train())
    x = torch.randn(2, 5, 6, dtype=dtype)
    plan = tp.make_plan(reference, ranks, {"x": x})
    assert plan.tensors["q.weight"].is_cut
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, plan)
    ends = []
    for model in (reference, split):
        torch.manual_seed(3)
        out = model(x)
        out.float().square().sum().backward()
        ends.append((out, gradients(model), torch.get_rng_state()))
    near = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=near, atol=near)
    assert torch.equal(ends[1][2], ends[0][2])
    for name, theirs in ends[0][1].items():
        largest = theirs.abs().max().clamp(min=1)
        torch.testing.assert_close(ends[1][1][name] / largest, theirs / largest, rtol=near, atol=near, msg=name)


def test_attention_refuses_a_mask_beside_is_causal_as_unsplit():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.causal = nn.Linear(6, 24), nn.Linear(24, 6), False

        def forward(self, x):
            h = self.up(x).view(2, 5, 6, 4).transpose(1, 2)
            mask = torch.zeros(5, 5, dtype=x.dtype)
            h = F.scaled_dot_product_attention(h, h, h, mask, 0.4, x.sum().item() > 0)
            return self.down(h.transpose(1, 2).reshape(2, 5, 24))

    reference = noisy(Attention().double().train())
    split = tp.tensor_parallel(
        copy.deepcopy(reference), ["cpu"] * 2, example_inputs=(-torch.ones(2, 5, 6, dtype=torch.float64),)
    )
    for model in (reference, split):
        with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
            model(torch.ones(2, 5, 6, dtype=torch.float64))


class Shared(nn.Module):
    """One Dropout for a cut tensor and for whole ones."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 24), nn.Linear(24, 6), nn.Dropout(0.5)
        self.checkpointed = checkpointed

    def block(self, x):
        return self.drop(self.down(self.drop(self.up(x).relu())))

    def forward(self, x):
        x = self.drop(x)
        for _ in range(2):
            x = x + (checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x))
        return x


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_dropout_on_cut_and_on_whole_tensors(checkpointed, ranks):
    reference = noisy(Shared(checkpointed).double().train())
    x = torch.randn(3, 6, dtype=torch.float64)
    plan = tp.make_plan(reference, ranks, {"x": x})
    assert plan.tensors["up.weight"].is_cut
    assert len({draw.call for draw in plan.modules["drop"].draws}) > 1
    assert tp.Plan.from_json(plan.to_json()) == plan
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, plan)
    assert_same_training(reference, split, {"x": x}, lambda output: output.pow(2).sum(), 3, 1e-9)
