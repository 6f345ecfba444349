"""The six families of transformers at 1, 2, 3 and 4 ranks: numbers, training, tokens, files."""

from __future__ import annotations

import copy

import pytest
import torch
from families import CLASSES, DECODERS, FAMILIES, build, padded, pair

import tensor_parallel as tp
from tensor_parallel.testing import assert_parity
from tensor_parallel.verify.values import difference

RANKS = (1, 2, 3, 4)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_gradients_and_a_training_step(family, ranks):
    reference, split = pair(family, ranks)
    inputs = padded()
    assert_parity(reference, split, {**inputs, "labels": inputs["input_ids"]}, steps=1, gradient_tolerance=1e-9)
    assert_parity(reference, split, padded(batch=1, length=5, left=False, seed=9))
    assert isinstance(split, type(reference))
    assert isinstance(split, tp.TensorParallelPreTrainedModel)
    assert type(split).__name__ == type(reference).__name__
    assert [n for n in dict(split.named_parameters()) if "@" not in n] == list(dict(reference.named_parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_rounded_as_the_unsplit_ones(family):
    """transformers' norms compute in float32 whatever the dtype: parts of a gradient that went through them one by one
    would be 1e-7 off."""
    reference, split = pair(family, 3)
    found = tp.verify(split, reference, padded(), tolerance=1e-9)
    assert found.passed, str(found)
    assert max(c.difference for c in found.checks if c.what == "gradient") < 1e-9


def decay_groups(model):
    """transformers' own weight-decay groups, as its Trainer makes them."""
    from transformers import Trainer

    names = Trainer.get_decay_parameter_names(None, model)
    named = dict(model.named_parameters())
    decayed = [p for n, p in named.items() if n in names]
    assert 0 < len(decayed) < len(named)
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.3},
            {"params": [p for n, p in named.items() if n not in names], "weight_decay": 0.0},
        ],
        lr=1e-3,
        foreach=True,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_three_adamw_steps_with_clipping_and_transformers_decay_groups(family, ranks):
    reference, split = pair(family, ranks)
    inputs = padded()
    before = reference.state_dict()[next(iter(reference.state_dict()))].clone()
    assert_parity(
        reference.train(),
        split.train(),
        {**inputs, "labels": inputs["input_ids"]},
        steps=3,
        optimizer=decay_groups,
        max_norm=0.1,
        gradient_tolerance=1e-9,
    )
    assert not torch.equal(before, next(iter(reference.state_dict().values())))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", DECODERS)
def test_greedy_tokens_with_left_padding(family, ranks):
    reference, split = pair(family, ranks)
    inputs = padded()
    settings = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    expected = reference.generate(**inputs, **settings, output_logits=True)
    got = split.generate(**inputs, **settings, output_logits=True)
    assert torch.equal(got.sequences, expected.sequences)
    for mine, theirs in zip(got.logits, expected.logits, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    assert len({tuple(row) for row in expected.sequences[:, -10:].tolist()}) > 1, "all rows alike prove little"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sampled_tokens_are_equal_for_equal_seeds(family, ranks):
    reference, split = pair(family, ranks)
    inputs = padded()
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 20}
    drawn = []
    for seed in (0, 1):
        for model in (reference, split):
            torch.manual_seed(seed)
            drawn.append(model.generate(**inputs, **settings, num_return_sequences=2))
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3]), "the caller's generator was left elsewhere"
    assert torch.equal(drawn[4], drawn[6])
    assert not torch.equal(drawn[0], drawn[4])


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("word", ["cache", "past_key_values"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cached_step_equals_one_long_prefill(family, word):
    reference, split = pair(family, 3)
    ids = padded(left=False)["input_ids"]
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits[:, -1]
        first = split(ids[:, :-1], use_cache=True)
        got = split(ids[:, -1:], use_cache=True, **{word: first.past_key_values}).logits[:, -1]
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_files_are_ordinary_ones(family, ranks, tmp_path):
    reference, split = pair(family, ranks)
    inputs = padded()
    split(**inputs, labels=inputs["input_ids"]).loss.backward()
    reference(**inputs, labels=inputs["input_ids"]).loss.backward()
    for model in (split, reference):
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    split.save_pretrained(tmp_path / "split")
    reference.save_pretrained(tmp_path / "whole")
    assert names(tmp_path / "split") == names(tmp_path / "whole")
    assert (tmp_path / "split" / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
    kind = CLASSES[family]
    loaded = kind.from_pretrained(tmp_path / "split", dtype=torch.float64).eval()
    expected = kind.from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
    assert list(loaded.state_dict()) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert difference(loaded.state_dict()[name], tensor) < 1e-9, name
    again = tp.tensor_parallel(copy.deepcopy(loaded), ["cpu"] * (5 - ranks))
    assert_parity(loaded, again, inputs)
    assert torch.allclose(again(**inputs).logits, split(**inputs).logits, rtol=1e-6, atol=1e-6)


def names(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_nearly_every_byte_is_split(family, ranks):
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4} if family not in ("gpt2", "bert") else {}
    wide = {"gpt2": {"n_embd": 80}, "bert": {"hidden_size": 96, "intermediate_size": 384}}.get(
        family, {"hidden_size": 64}
    )
    split = tp.tensor_parallel(build(family, **changes, **wide), ["cpu"] * ranks)
    report = tp.report(split)
    assert report.split_fraction >= 0.97, str(report)
    assert report.gathered_fraction == 0
    assert len(report.bytes_per_device) == ranks
    assert max(report.bytes_per_device) < (1 / ranks + 0.2) * report.parameter_bytes
    whole = {
        n
        for n, p in build(family, **changes, **wide).named_parameters()
        if dict(split.named_parameters())[n].shape == p.shape
    }
    assert set(report.kept_whole) == whole
