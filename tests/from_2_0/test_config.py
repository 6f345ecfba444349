"""Rules by hand, as version 2.0 had them: the split model is the model, at 1, 2, 3 and 5 devices."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tensor_parallel as tp
from tensor_parallel.state_actions import Scale, Split, SplitInChunks, SplitInGroupedChunks
from tensor_parallel.testing import assert_parity, noisy

RANKS = [1, 2, 3, 5]


class Attention(nn.Module):
    def __init__(self, width=20, heads=10):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * heads * 4), nn.Linear(heads * 4, width), heads

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, self.heads * 4))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.attn = nn.Embedding(37, 20), Attention()
        self.up, self.down, self.head = nn.Linear(20, 33), nn.Linear(33, 20), nn.Linear(20, 37)

    def forward(self, ids):
        x = self.emb(ids)
        x = x + self.attn(x)
        return self.head(x + self.down(F.gelu(self.up(x))))


def share(value, *, rank, world_size):
    return len(torch.arange(value).tensor_split(world_size)[rank])


def packed_rules(n, **changes):
    rules = {
        "state_rules": {
            r"emb\.weight": Split(n, 1),
            r"qkv\.(weight|bias)": SplitInGroupedChunks(n, 0, 3, 4),
            r"out\.weight": SplitInChunks(n, 1, 4),
            r"(out|down)\.bias": Scale(n),
            r"up\.(weight|bias)": Split(n, 0),
            r"down\.weight": Split(n, -1),
            r"head\.": Split(n, 0),
        },
        "input_rules": {},
        "output_rules": {
            r"^emb$": {0: "gather -1"},
            r"attn\.out$": {"0": "sum"},
            r"^down$": {0: "sum"},
            r"^head$": {0: "gather -1"},
        },
        "attr_rules": {r"attn$": {"heads": partial(share, world_size=n)}},
    }
    return {**rules, **changes}


IDS = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(0))


def packed():
    torch.manual_seed(0)
    return noisy(Packed().double())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["actions", "functions"])
@pytest.mark.filterwarnings("ignore:state rule:DeprecationWarning")
def test_a_packed_model_by_hand(ranks, kind):
    reference, rules = packed(), packed_rules(ranks)
    if kind == "functions":
        rules["state_rules"] = {
            # An optimiser's step on each part of a scaled bias is not one on the bias: as words it is rank 0's alone.
            p: a if isinstance(a, Scale) else (lambda t, rank, a=a: a(t, rank), a.undo)
            for p, a in rules["state_rules"].items()
        }
    split = tp.TensorParallel(
        copy.deepcopy(reference), ["cpu"] * ranks, tensor_parallel_config=tp.Config(**rules), delay_init=ranks == 2
    )
    assert_parity(reference, split, (IDS,), steps=3)
    if ranks > 1:
        assert split.module_shards[1].up.weight.shape[0] == len(torch.arange(33).tensor_split(ranks)[1])
        assert sum(split.param_fractions) < 1.3
    state = split.state_dict()
    assert list(state) == list(reference.state_dict())
    fresh = tp.tensor_parallel(packed(), ["cpu"] * ranks, tp.Config(**rules))
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh(IDS), split(IDS), atol=1e-12, rtol=0)


def bloom_rules(n, heads, width):
    """As version 2.0 had them for Bloom, and what its users write."""
    size = width // heads

    def alibi(value, *, rank, world_size):
        apart = value.reshape(-1, heads, *value.shape[1:])
        return apart.tensor_split(world_size, dim=1)[rank].reshape(-1, *value.shape[1:])

    return tp.Config(
        state_rules={
            r".*self_attention\.query_key_value\.(weight|bias)$": SplitInChunks(n, 0, 3 * size),
            r".*self_attention\.dense\.weight$": SplitInChunks(n, 1, size),
            r".*self_attention\.dense\.bias$": Scale(n),
            r".*mlp\.dense_h_to_4h\.(weight|bias)$": Split(n, 0),
            r".*mlp\.dense_4h_to_h\.weight$": Split(n, 1),
            r".*mlp\.dense_4h_to_h\.bias$": Scale(n),
            r".*word_embeddings.weight$": Split(n, 1),
        },
        input_rules={
            r".*self_attention$": {"alibi": partial(alibi, world_size=n)},
            r".*self_attention\.dense$|.*mlp\.dense_4h_to_h$": {},
            r".*lm_head$": {0: "split -1"},
        },
        output_rules={
            r".*self_attention\.dense$": {0: "sum"},
            r".*mlp\.dense_4h_to_h$": {0: "sum"},
            r".*word_embeddings$": {0: "gather -1"},
            r".*lm_head$": {0: "sum"},
        },
        attr_rules={r".*self_attention$": {"num_heads": partial(share, world_size=n)}},
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_bloom_by_rules(ranks):
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=61, hidden_size=40, n_head=5, n_layer=2, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False
    )
    reference = noisy(transformers.BloomForCausalLM(config).double().eval())
    split = tp.TensorParallelPreTrainedModel(
        copy.deepcopy(reference), ["cpu"] * ranks, tensor_parallel_config=bloom_rules(ranks, 5, 40)
    )
    assert isinstance(split, tp.TensorParallelPreTrainedModel)
    ids = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(1))
    assert_parity(reference, split, {"input_ids": ids}, steps=3)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(split.generate(ids, **how), reference.generate(ids, **how))


def t5_rules(n, heads, size):
    attention = r".*(Self|EncDec)Attention"
    return tp.Config(
        state_rules={
            rf"{attention}\.[qkv]\.weight$": SplitInChunks(n, 0, size),
            rf"{attention}\.o\.weight$": SplitInChunks(n, 1, size),
            r".*relative_attention_bias\.weight$": Split(n, 1),
            r".*DenseReluDense\.wi\.weight$": Split(n, 0),
            r".*DenseReluDense\.wo\.weight$": Split(n, 1),
            r"shared\.weight$": Split(n, 1),
        },
        input_rules={r".*lm_head$": {0: "split -1"}},
        output_rules={
            rf"{attention}\.o$": {0: "sum"},
            r".*DenseReluDense$": {0: "sum"},
            r"^(shared|encoder\.embed_tokens|decoder\.embed_tokens)$": {0: "gather -1"},
            r".*lm_head$": {0: "sum"},
        },
        attr_rules={
            rf"{attention}$": {
                "n_heads": partial(share, world_size=n),
                "inner_dim": lambda value, rank: share(heads, rank=rank, world_size=n) * size,
            },
        },
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_t5_by_rules(ranks):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=61, d_model=20, d_kv=4, d_ff=33, num_layers=2, num_heads=5, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    reference = noisy(transformers.T5ForConditionalGeneration(config).double().eval())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, t5_rules(ranks, 5, 4))
    ids = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    assert_parity(reference, split, inputs)
    # T5's norms compute in float32, and by hand the parts of a gradient meet them one by one.
    assert_parity(reference, split, inputs, steps=3, tolerance=1e-6)


class Arithmetic(nn.Module):
    """Rules of every kind on positions, keywords and items of outputs."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, factor=None, count=6):
        first, second = self.inner(x, count, factor=factor)
        return first + second["count"]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, x, count, factor=None):
        part = x[..., :count] * self.weight
        part = part if factor is None else part * factor
        return part, {"count": count}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_word(ranks):
    reference = Arithmetic().double()
    config = tp.Config(
        {"weight": Split(ranks, 0)},
        {"inner": {0: "split -1", "1": "scale_int", "factor": "scale"}},
        {"inner": {0: "gather -1", 1: lambda value, rank: {"count": value["count"] * ranks}}},
    )
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, config)
    x = torch.randn(3, 6, dtype=torch.float64)
    if ranks == 1:
        torch.testing.assert_close(split(x), reference(x))
        return
    first = x * reference.inner.weight * (2.0 / ranks)
    inner, rest = split.inner(x, 6, factor=2.0)
    torch.testing.assert_close(inner, first)
    assert rest == {"count": 6}
    torch.testing.assert_close(split(x), reference(x))
    with pytest.raises(tp.PlanError, match=r"scale_int.* met 7, which .* do not divide"):
        split.inner(x, 7)


WRONG = {
    "two that disagree": ({"state_rules": {"up": Split(2, 0), r"up\.weight": Split(2, 1)}}, r"'up' and .* disagree"),
    "nothing fits": ({"state_rules": {r"upp\.weight": Split(2, 0)}}, r"fits none .* nearest are .*up\.weight"),
    "no such module": ({"output_rules": {"^dwn$": {0: "sum"}}}, r"output rules: '\^dwn\$' fits none of the modules"),
    "other ranks": ({"state_rules": {"up": Split(3, 0)}}, "is for 3 ranks, and the model is split over 2"),
    "no such dim": ({"state_rules": {r"up\.bias": Split(2, 1)}}, "asks for dim 1"),
    "no whole chunks": ({"state_rules": {r"up\.bias": SplitInChunks(2, 0, 5)}}, "no multiple of 5"),
    "too few": ({"state_rules": {r"up\.bias": SplitInChunks(2, 0, 33)}}, "too few for 2 ranks"),
    "no such attribute": ({"attr_rules": {"attn$": {"head": lambda v, rank: v}}}, "has no attribute 'head'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rules_that_are_wrong_are_named_before_anything_is_changed(case):
    rules, message = WRONG[case]
    model = packed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((tp.PlanError, tp.SplitError), match=message):
        tp.tensor_parallel(model, ["cpu"] * 2, tp.Config(**rules))
    assert type(model) is Packed
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rules_in_wrong_words():
    with pytest.raises(tp.PlanError, match=r"output_rules 'down', 0: given 'sums', required one of split, gather"):
        tp.Config(output_rules={"down": {0: "sums"}})
    with pytest.raises(tp.PlanError, match="given 'split', required"):
        tp.Config(input_rules={"down": {0: "split"}})
    with pytest.raises(tp.PlanError, match="required a function"):
        tp.Config(attr_rules={"down": {"heads": "sum"}})
    with pytest.raises(TypeError, match=r"state rule 'up' is 'split 0'; a tp\.StateAction is needed"):
        tp.Config(state_rules={"up": "split 0"})
    with pytest.raises(TypeError, match="a dict is needed"):
        tp.Config(output_rules={"up": "sum"})
    with pytest.warns(DeprecationWarning, match="plain functions are deprecated"):
        tp.Config(state_rules={"up": lambda tensor, rank: tensor})


def test_a_rule_that_fits_nothing_only_warns_where_that_is_asked_for():
    rules = packed_rules(2)
    rules["state_rules"]["elsewhere"] = Split(2, 0)
    with pytest.warns(UserWarning, match="'elsewhere' fits none"):
        split = tp.tensor_parallel(packed(), ["cpu"] * 2, tp.Config(**rules), strict=False)
    torch.testing.assert_close(split(IDS), packed()(IDS), atol=1e-12, rtol=0)


def test_plans_of_rules(tmp_path):
    reference, rules = packed(), packed_rules(2)
    plan = tp.Config(**{**rules, "attr_rules": {}}).plan(reference, 2)
    plan.save(tmp_path / "plan.json")
    assert tp.Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(tp.PlanError, match=r"attribute rule 'heads' of attn is .* a function, and no file can hold it"):
        tp.Config(**rules).plan(reference, 2).to_json()
    with pytest.warns(DeprecationWarning, match="plain functions"):
        config = tp.Config({r"up\.bias": lambda tensor, rank: tensor})
    with pytest.raises(tp.PlanError, match=r"up\.bias is cut by .* a function"):
        config.plan(reference, 2).to_json()


def test_no_way_back_is_said_where_it_is_needed():
    with pytest.warns(DeprecationWarning, match="plain functions"):
        config = tp.Config(
            {r"up\.(weight|bias)": lambda t, rank: t.tensor_split(2)[rank], r"down\.weight": Split(2, 1)},
            output_rules={"down": {0: "sum"}},
        )
    reference = packed()
    with torch.no_grad():
        reference.down.bias.zero_()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, config)
    torch.testing.assert_close(split(IDS), reference(IDS), atol=1e-12, rtol=0)
    with pytest.raises(tp.PlanError, match=r"no way back .* give a pair \(action, undo\)"):
        split.state_dict()


def test_parts_that_no_rule_joins_are_not_taken_for_the_whole():
    rules = packed_rules(2)
    del rules["output_rules"]["^head$"]
    split = tp.tensor_parallel(packed(), ["cpu"] * 2, tp.Config(**rules))
    with pytest.raises(tp.PlanError, match=r"not the same on all ranks: the rules of the tp\.Config leave a part"):
        split(IDS)
    good = tp.tensor_parallel(packed(), ["cpu"] * 2, tp.Config(**packed_rules(2)))
    with pytest.raises(tp.PlanError, match=r"output itself of up is not the same on all ranks"):
        good.up(torch.ones(2, 20, dtype=torch.float64))
    torch.testing.assert_close(good(IDS), packed()(IDS), atol=1e-12, rtol=0)
    torch.testing.assert_close(
        good.attn(torch.ones(1, 2, 20, dtype=torch.float64)), packed().attn(torch.ones(1, 2, 20, dtype=torch.float64))
    )


@pytest.mark.parametrize("action", [Split(3, 1), SplitInChunks(3, 1, 4), SplitInGroupedChunks(3, -2, 3, 2), Scale(3)])
def test_state_actions_undo_what_they_do(action):
    whole = torch.randn(5, 36, 2, dtype=torch.float64)
    parts = [action(whole, rank) for rank in range(3)]
    torch.testing.assert_close(action.undo(parts), whole)
    assert isinstance(action, tp.StateAction)
    assert tp.state_actions.Split is Split


def test_hooks_at_modules_that_get_parts_are_refused_and_elsewhere_see_the_whole():
    reference, split = packed(), tp.tensor_parallel(packed(), ["cpu"] * 3, tp.Config(**packed_rules(3)))
    seen = []
    for model in (reference, split):
        model.attn.register_forward_hook(lambda module, args, output: seen.append(output) or output * 2)
    torch.testing.assert_close(split(IDS), reference(IDS), atol=1e-12, rtol=0)
    torch.testing.assert_close(seen[0], seen[1], atol=1e-12, rtol=0)
    handle = split.down.register_forward_hook(lambda *_: None)
    with pytest.raises(tp.PlanError, match=r"down has a hook .* not the same on all ranks"):
        split(IDS)
    handle.remove()
    torch.testing.assert_close(split(IDS), reference(IDS), atol=1e-12, rtol=0)
