"""Built without values, split, then loaded one checkpoint file after another: version 2.0's recipe."""

from __future__ import annotations

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import set_module_tensor_to_device
from torch import nn

import tensor_parallel as tp
from tensor_parallel.state_actions import Scale, Split, SplitInChunks
from tensor_parallel.testing import assert_parity, noisy

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def build(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=6, n_positions=32)
        return noisy(transformers.GPT2LMHeadModel(config).double().eval())
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=32, tie_word_embeddings=kind == "tied llama",
    )  # fmt: skip
    return noisy(transformers.LlamaForCausalLM(config).double().eval())


def without_values(reference):
    with accelerate.init_empty_weights():
        model = type(reference)(reference.config)
    model = model.double().eval()
    model.tie_weights()
    return model


def files(state):
    """A checkpoint in three files."""
    names = list(state)
    return [{name: state[name] for name in names[start::3]} for start in range(3)]


def load(model, reference, ranks):
    device_map = tp.infer_sharded_device_map(model)
    state = dict(reference.state_dict())
    if reference.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for file in files(state):
        parts = tp.convert_state_dict(file, model.tensor_parallel_config, ranks, for_pretrained=True)
        for name, part in parts.items():
            set_module_tensor_to_device(model, name, device_map[name], value=part)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["llama", "tied llama", "gpt2"])
def test_the_recipe(kind, ranks):
    reference = build(kind)
    model = tp.TensorParallelPreTrainedModel(without_values(reference), ["cpu"] * ranks)
    if ranks > 1:
        with pytest.raises(tp.PlanError, match=r"have no values yet .* load them"):
            model(IDS)
        load(model, reference, ranks)
        assert_parity(reference, model, {"input_ids": IDS}, steps=3)
        assert list(model.state_dict()) == list(reference.state_dict())
        how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(IDS, **how), reference.generate(IDS, **how))


def test_with_rules():
    torch.manual_seed(0)
    reference = noisy(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double())
    rules = tp.Config(
        {r"0\.": Split(3, 0), r"2\.weight": SplitInChunks(3, 1, 2), r"2\.bias": Scale(3)},
        output_rules={"^2$": {0: "sum"}},
    )
    with accelerate.init_empty_weights():
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double()
    model = tp.TensorParallel(model, ["cpu"] * 3, tensor_parallel_config=rules)
    device_map = tp.infer_sharded_device_map(model)
    for file in files(reference.state_dict()):
        for name, part in tp.convert_state_dict(file, model.tensor_parallel_config, 3).items():
            set_module_tensor_to_device(model, name, device_map[name], value=part)
    assert_parity(reference, model, (torch.randn(3, 6, dtype=torch.float64),), steps=3)


def test_what_is_wrong_is_named():
    reference = build("llama")
    model = tp.tensor_parallel(without_values(reference), ["cpu"] * 2)
    with pytest.raises(tp.PlanError, match="other is none of the plan's tensors"):
        tp.convert_state_dict({"other": torch.ones(2)}, model.tensor_parallel_config, 2)
    load(model, reference, 2)
    assert torch.allclose(model(IDS).logits, reference(IDS).logits, atol=1e-12)
    with pytest.raises(AttributeError, match="the ranks are 0 to 1"):
        model.module_shards[0] and getattr(model.module_shards, "2")
