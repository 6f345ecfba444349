"""Cases from people who do this job: sizes that do not divide, fused layouts, biases, replicas, norms, ties.

Their names are those of the symptom: what goes wrong where a split is done carelessly.
"""

from __future__ import annotations

import copy

import pytest
import torch
from families import build, padded, pair
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import ConvNet, Gpt, Llama, Mlp, TiedEmbedding, assert_parity, noisy


def split_of(model, ranks):
    """(unsplit, split) of one tiny model, in float64 with noise."""
    reference = noisy(model.double().eval())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=reference.inputs())
    return reference, split


def with_labels(inputs):
    return {**inputs, "labels": inputs["input_ids"]}


# A1: fewer KV heads than ranks
@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 1, 2), (4, 1, 4), (8, 2, 4), (8, 2, 3), (6, 3, 4), (4, 1, 3)]
)
def test_fewer_kv_heads_than_ranks(heads, kv_heads, ranks):
    changes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    reference, split = pair("llama", ranks, **changes)
    assert_parity(reference, split, with_labels(padded()), steps=2)
    saved = tp.full_state_dict(split)["model.layers.0.self_attn.k_proj.weight"]
    assert tuple(saved.shape) == (8 * kv_heads, 8 * heads)


@pytest.mark.parametrize("ranks", [3, 4])
def test_norms_on_kv_heads_that_ranks_share(ranks):
    reference, split = pair("qwen3", ranks, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert_parity(reference, split, with_labels(padded()), steps=3, gradient_tolerance=1e-9)


# A2: heads that the ranks do not divide, a rank may hold none
@pytest.mark.parametrize(
    ("family", "hidden", "heads", "kv_heads", "ranks"),
    [("llama", 56, 7, 1, 2), ("llama", 56, 7, 1, 3), ("qwen2", 112, 14, 2, 4), ("llama", 24, 3, 3, 4)],
)
def test_heads_that_do_not_divide(family, hidden, heads, kv_heads, ranks):
    changes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    reference, split = pair(family, ranks, **changes)
    assert_parity(reference, split, with_labels(padded()), steps=2)
    if heads < ranks:
        report = tp.report(split)
        assert min(report.bytes_per_device) < max(report.bytes_per_device)


# A4: a vocabulary that the ranks do not divide
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_vocabulary_that_does_not_divide(ranks, tied, tmp_path):
    reference, split = pair("llama", ranks, vocab_size=101, tie_word_embeddings=tied)
    inputs = with_labels(padded())
    assert split(**inputs).logits.shape[-1] == 101
    assert_parity(reference, split, inputs, steps=1)
    split.save_pretrained(tmp_path)
    loaded = type(reference).from_pretrained(tmp_path, dtype=torch.float64).eval()
    again = tp.tensor_parallel(copy.deepcopy(loaded), ["cpu"] * (6 - ranks))
    assert_parity(loaded, again, inputs)
    assert torch.equal(again.state_dict()["lm_head.weight"], split.state_dict()["lm_head.weight"])


# A6: odd widths, whose true size is never local x ranks
@pytest.mark.parametrize("widths", [(5, 5, 5), (7, 9, 7), (3, 2, 3, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_odd_widths(widths, ranks):
    reference, split = split_of(Mlp(widths), ranks)
    assert_parity(reference, split, reference.inputs(batch=4, seed=3), steps=3)
    assert [layer.in_features for layer in split.layers] == list(widths[:-1])


# B1: q, k and v in one matrix
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fused_qkv_of_gpt2_with_five_heads(ranks):
    reference, split = pair("gpt2", ranks, n_head=5, n_embd=40)
    assert_parity(reference, split, with_labels(padded()), steps=2)


# B4: Conv1D stores its weight transposed
@pytest.mark.parametrize("ranks", [2, 3])
def test_transposed_weights_of_gpt2(ranks):
    reference, split = pair("gpt2", ranks)
    weight = dict(split.named_parameters())["transformer.h.0.mlp.c_fc.weight"]
    assert weight.shape[0] == 40
    assert weight.shape[1] < 160
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        assert reference.get_parameter(f"transformer.h.0.{name}.bias").abs().min() > 0
    assert_parity(reference, split, with_labels(padded()))


# C1, C2: the bias of a row-split layer is added once, and gets the whole gradient
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_row_split_bias_counts_once(ranks):
    class Row(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(16, 50)
            self.down = nn.Linear(50, 14)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    reference = noisy(Row().double())
    x = torch.randn(5, 16, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs={"x": x[:2]})
    if ranks > 1:
        assert split.down.weight.shape[1] < 50, "the case needs a row split"
    out = split(x)
    assert torch.allclose(out, reference(x), rtol=1e-12, atol=1e-12)
    out.sum().backward()
    assert torch.allclose(tp.full_gradients(split)["down.bias"], torch.full((14,), 5.0, dtype=torch.float64))
    assert_parity(reference, split, {"x": x}, steps=2)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_row_biases_of_real_models_get_the_whole_gradient(family):
    reference, split = pair(family, 3)
    inputs = with_labels(padded())
    for model in (reference, split):
        model(**inputs).loss.backward()
    gradients = tp.full_gradients(split)
    biases = [n for n, p in reference.named_parameters() if n.endswith("bias") and p.grad is not None]
    assert len(biases) > 10
    for name in biases:
        assert torch.allclose(gradients[name], reference.get_parameter(name).grad, rtol=1e-9, atol=1e-12), name


# C3: replicated parameters that work on split heads
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_norms_on_heads_do_not_drift(ranks):
    reference, split = pair("qwen3", ranks)
    norms = [n for n, _ in reference.named_parameters() if "q_norm" in n or "k_norm" in n]
    assert len(norms) == 4
    assert_parity(reference, split, with_labels(padded()), steps=3)
    shown = dict(split.named_parameters())
    for name in norms:
        assert [n for n in shown if n.partition("@")[0] == name] == [name], "one leaf"
        assert torch.allclose(shown[name], reference.get_parameter(name), rtol=1e-9, atol=0)


# C6, C7: stock clipping of parameters()
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stock_clipping_sees_each_parameter_once(ranks, foreach):
    reference, split = pair("llama", ranks)
    inputs = with_labels(padded())
    for max_norm in (0.05, 1e9):
        norms = []
        for model in (reference, split):
            model.zero_grad()
            model(**inputs).loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=foreach))
        assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-12)
        gradients = tp.full_gradients(split)
        for name, parameter in reference.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12), name


# D1: tied embedding and head
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tied_weights_stay_tied_and_are_held_once(family, ranks, tmp_path):
    reference, split = pair(family, ranks, tie_word_embeddings=True)
    assert_parity(reference, split, with_labels(padded()), steps=2)
    assert split.get_input_embeddings().weight is split.get_output_embeddings().weight
    shown = [id(p) for _, p in split.named_parameters(remove_duplicate=False)]
    assert len(set(shown)) < len(shown)
    assert sum(tp.report(split).bytes_per_device) < 1.2 * sum(p.nbytes for p in reference.parameters())
    state = split.state_dict()
    assert list(state) == list(reference.state_dict())
    embedding, head = [n for n, t in state.items() if t.shape[0] == 101]
    assert state[embedding].data_ptr() == state[head].data_ptr()
    split.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len([n for n in file.keys() if file.get_slice(n).get_shape()[0] == 101]) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "model",
    [
        lambda: TiedEmbedding(vocab=51, width=12),
        ConvNet,
        Gpt,
        Llama,
        lambda: Llama(width=32, heads=4, kv_heads=2, qk_norm=True, tied=True),
    ],
    ids=["tied", "conv", "gpt", "llama", "llama-qk-norm-tied"],
)
def test_hand_written_models(model, ranks):
    reference, split = split_of(model(), ranks)
    assert_parity(reference, split, reference.inputs(), steps=3)
    assert_parity(reference, split, reference.inputs(batch=3, length=4, seed=8))
    if ranks > 1:
        assert tp.report(split).split_fraction > 0.6, str(tp.report(split))


def test_a_convolution_net_in_training_mode():
    reference, split = split_of(ConvNet(), 3)
    assert_parity(reference.train(), split.train(), reference.inputs(batch=4), steps=2)
    assert split.stem_norm.num_batches_tracked == reference.stem_norm.num_batches_tracked > 0


# E3: a trained model is saved whole, and loads anywhere
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_trained_model_saves_whole_and_loads_at_another_size(ranks, tmp_path):
    reference, split = split_of(Gpt(), ranks)
    assert_parity(reference, split, reference.inputs(), steps=1)
    torch.save(split.state_dict(), tmp_path / "model.pt")
    fresh = Gpt().double().eval()
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    for (name, mine), (_, theirs) in zip(fresh.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12), name
    other = tp.tensor_parallel(noisy(Gpt().double().eval(), 7), ["cpu"] * 4, example_inputs=fresh.inputs())
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_parity(fresh, other, fresh.inputs())


# Twelve devices: text order would put 10 before 2
def test_twelve_devices_in_the_right_order():
    reference, split = split_of(Mlp((12, 36, 24, 12)), 12)
    weights = [split.layers[0]._parameters["weight" if r == 0 else f"weight@{r}"] for r in range(12)]
    whole = reference.layers[0].weight
    assert torch.equal(torch.cat(weights), whole)
    shown = [n for n, _ in split.named_parameters() if n.startswith("layers.0.weight")]
    assert shown == ["layers.0.weight", *(f"layers.0.weight@{r}" for r in range(1, 12))]
    assert_parity(reference, split, reference.inputs(), steps=2)


def test_more_ranks_than_units():
    reference, split = split_of(Gpt(heads=5), 12)
    assert_parity(reference, split, reference.inputs(), steps=1)


def test_a_llama_on_twelve_devices():
    reference, split = pair("llama", 12)
    assert_parity(reference, split, with_labels(padded()), steps=1)


def test_without_example_inputs_each_layer_is_split_and_gathered():
    reference = noisy(ConvNet().double().eval())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3)
    assert_parity(reference, split, reference.inputs(), steps=2)
    report = tp.report(split)
    assert report.gathered_fraction > 0.5, str(report)
    assert report.split_fraction == 0


@pytest.mark.parametrize("reach", ["model", "inner", "weight"])
def test_freezing(reach):
    reference, split = split_of(Gpt(), 3)
    for model in (reference, split):
        {"model": lambda m: m, "inner": lambda m: m.h[0], "weight": lambda m: m.h[0].c_fc.weight}[reach](
            model
        ).requires_grad_(False)
    inputs = reference.inputs()
    if reach == "model":
        assert not split(**inputs).requires_grad
        return
    assert_parity(reference, split, inputs, steps=2)
    assert tp.full_gradients(split).get("h.0.c_fc.weight") is None


def test_the_callers_input_gets_the_whole_gradient():
    reference, split = split_of(Mlp((6, 10, 6)), 3)
    inputs = reference.inputs()
    inputs["x"].requires_grad_()
    assert_parity(reference, split, inputs)


def test_a_saved_plan_splits_like_the_one_it_was_made_from(tmp_path):
    reference = build("qwen3")
    plan = tp.make_plan(reference, 2)
    plan.save(tmp_path / "plan.json")
    loaded = tp.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    for ranks in (2, 3):
        split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, loaded)
        assert_parity(reference, split, padded())
    with pytest.raises(tp.PlanError, match="the plan is for shape"):
        tp.tensor_parallel(build("qwen3", intermediate_size=64), ["cpu"] * 2, loaded)
