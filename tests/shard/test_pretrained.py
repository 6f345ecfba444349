"""A transformers model split by a plan made by hand: generation, caches, saving, loading."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from llama_plan import llama_plan
from shard_models import noisy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

import tensor_parallel as tp
from tensor_parallel.pretrained_model import device_names
from tensor_parallel.shard import shards_of

RANKS = [1, 2, 3, 4]


def build(tied=False, heads=4, kv=2):
    config = LlamaConfig(
        hidden_size=heads * 4, intermediate_size=20, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=101, head_dim=4, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return noisy(LlamaForCausalLM(config)).eval()


def pair(ranks, **kwargs):
    reference = build(**kwargs)
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, llama_plan(reference))


def batch():
    ids = torch.randint(3, 101, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2], ids[0, :2] = 0, 0
    return ids, mask


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_logits_and_gradients(ranks, tied):
    reference, split = pair(ranks, tied=tied)
    assert isinstance(split, (LlamaForCausalLM, tp.TensorParallelPreTrainedModel))
    assert isinstance(split, PreTrainedModel)
    ids, mask = batch()
    found = []
    for model in (reference, split):
        logits = model(ids, attention_mask=mask).logits
        logits.square().mean().backward()
        found.append(logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-12)
    gradients = tp.full_gradients(split)
    # transformers' norms compute in float32, and so do their gradients
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-6, msg=name)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_generated_tokens(ranks, way):
    reference, split = pair(ranks)
    ids, mask = batch()
    if way == "lookup":
        ids, mask = ids[1:], mask[1:]
    found = []
    for model in (reference, split):
        torch.manual_seed(5)
        found.append(model.generate(ids, attention_mask=mask, min_new_tokens=12, max_new_tokens=12, **WAYS[way]))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
@pytest.mark.parametrize("make", [lambda c: None, lambda c: DynamicCache(config=c), lambda c: DynamicCache()])
def test_a_cache_goes_on_where_it_stopped(argument, make):
    reference, split = pair(3)
    ids, _ = batch()
    ids = ids[1:]
    found = []
    for model in (reference, split):
        given = make(model.config)
        with torch.no_grad():
            first = model(ids[:, :5], use_cache=True, **{argument: given})
            cache = first.past_key_values
            assert given is None or cache is given
            branch = copy.deepcopy(cache)
            steps = [model(ids[:, 5:], **{argument: cache}).logits, model(ids[:, 6:], **{argument: branch}).logits]
            cache.crop(-2)
            steps.append(model(ids[:, 5:6], **{argument: cache}).logits)
            cache.batch_repeat_interleave(2)
            steps.append(model(ids[:, 6:].repeat(2, 1), **{argument: cache}).logits)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.reset()
            steps.append(model(ids.repeat(2, 1), **{argument: cache}).logits)
        found.append(steps)
        assert cache.get_seq_length() == 7
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, atol=1e-12, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_static_cache_that_has_its_room_already():
    reference, split = pair(2)
    ids, _ = batch()
    found = []
    for model in (reference, split):
        cache = StaticCache(config=model.config, max_cache_len=16)
        cache.early_initialization(2, 2, 4, torch.float64, torch.device("cpu"))
        with torch.no_grad():
            model(ids, past_key_values=cache)
            found.append(model(ids[:, :1], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_cache_filled_by_another_model_is_refused():
    reference, split = pair(2)
    ids, _ = batch()
    cache = reference(ids, use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="unsplit"):
        split(ids, past_key_values=cache)
    _, other = pair(3)
    cache = other(ids, use_cache=True).past_key_values
    with pytest.raises(tp.TensorParallelError, match="3 ranks"):
        split(ids, past_key_values=cache)


@pytest.mark.parametrize("ranks", [2, 3])
def test_hidden_states_are_whole(ranks):
    reference, split = pair(ranks)
    ids, mask = batch()
    a, b = (model(ids, attention_mask=mask, output_hidden_states=True).hidden_states for model in (reference, split))
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(y, x, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_files_are_the_unsplit_models(tied, tmp_path):
    from safetensors.torch import load_file

    reference, split = pair(3, tied=tied)
    reference.save_pretrained(tmp_path / "whole")
    split.save_pretrained(tmp_path / "split")
    whole, own = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "split"))
    assert list(own) == list(whole)
    for name, tensor in whole.items():
        assert torch.equal(own[name], tensor), name
    files = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "split")]
    assert files[0] == files[1]
    ids, _ = batch()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "split", dtype=torch.float64).eval()
    torch.testing.assert_close(again(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_load_state_dict(tied, assign):
    reference, split = pair(3, tied=tied)
    state = {k: torch.randn_like(v) for k, v in reference.state_dict().items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    leaves = [id(p) for p in split.parameters()]
    for model in (reference, split):
        result = model.load_state_dict(state, assign=assign and model is split)
        assert not result.missing_keys
        assert not result.unexpected_keys
    assert [id(p) for p in split.parameters()] == leaves
    ids, _ = batch()
    torch.testing.assert_close(split(ids).logits, reference(ids).logits)
    own = split.state_dict()
    assert not [name for name in own if "@" in name]
    assert (own["lm_head.weight"].data_ptr() == own["model.embed_tokens.weight"].data_ptr()) is tied


def test_state_dicts_that_do_not_fit_are_refused_in_torchs_words():
    _, split = pair(2)
    state = split.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"model.norm.weight"'):
        split.load_state_dict({k: v for k, v in state.items() if k != "model.norm.weight"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"lm_head.weight@1"'):
        split.load_state_dict({**state, "lm_head.weight@1": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"lm_head.weight.*torch.Size\(\[101, 16\]\)"):
        split.load_state_dict({**state, "lm_head.weight": torch.ones(3, 3)})


def test_parameters_count_as_the_unsplit_models():
    reference, split = pair(3, tied=True)
    for only in (False, True):
        for exclude in (False, True):
            assert split.num_parameters(only, exclude) == reference.num_parameters(only, exclude)
    split.model.requires_grad_(False)
    assert split.num_parameters(only_trainable=True) == 0


def test_parts_of_the_model_called_from_outside():
    reference, split = pair(4)
    ids, mask = batch()
    hidden = reference.model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(split.model(ids, attention_mask=mask).last_hidden_state, hidden)
    torch.testing.assert_close(split.lm_head(hidden), reference.lm_head(hidden))
    positions = reference.model.rotary_emb(hidden, torch.arange(7)[None])
    a, b = (
        m.model.layers[0].self_attn(hidden, position_embeddings=positions, attention_mask=None)[0]
        for m in (reference, split)
    )
    torch.testing.assert_close(b, a, atol=1e-12, rtol=1e-12)
    o = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(split.model.layers[0].self_attn.o_proj(o), reference.model.layers[0].self_attn.o_proj(o))


def test_integers_are_whole_outside_and_local_inside():
    _, split = pair(4, heads=8, kv=2)
    attention = split.model.layers[0].self_attn
    assert attention.num_key_value_groups == 4
    assert attention.config is split.config
    seen = shards_of(split).team.run(
        lambda rank: shards_of(split).module(rank, "model.layers.0.self_attn").num_key_value_groups
    )
    assert seen == [2, 2, 2, 2]


def test_the_class_makes_ordinary_models():
    _, split = pair(2)
    assert type(type(split)(split.config)) is LlamaForCausalLM
    assert split.generate.__func__ is LlamaForCausalLM.generate


def test_copies_are_split_again():
    reference, split = pair(2, tied=True)
    ids, _ = batch()
    twin = copy.deepcopy(split)
    assert isinstance(twin, tp.TensorParallelPreTrainedModel)
    with torch.no_grad():
        split.model.norm.weight.zero_()
    torch.testing.assert_close(twin(ids).logits, reference(ids).logits)


def test_a_device_map_names_the_ranks_own_devices():
    names = [torch.device("cuda:2"), torch.device("cuda:3")]
    assert device_names(names) == ["cuda:2", "cuda:3"]
    assert device_names([torch.device("cpu")] * 2) == ["cpu:0", "cpu:1"]
    _, model = pair(2)
    assert len(set(model.hf_device_map.values())) == 2
