"""What version 2.0's users reach for: every public name, and what each argument changes."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import tensor_parallel as tp
from tensor_parallel.state_actions import Scale, Split
from tensor_parallel.testing import assert_parity, noisy

TABLE = json.loads((Path(__file__).parent / "names.json").read_text())
X = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mlp():
    torch.manual_seed(0)
    return noisy(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double())


def rules(n):
    return tp.Config(
        {r"0\.": Split(n, 0), r"2\.weight": Split(n, 1), r"2\.bias": Scale(n)}, output_rules={"^2$": {0: "sum"}}
    )


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=6, n_positions=32)
    return noisy(transformers.GPT2LMHeadModel(config).double().eval())


@pytest.mark.parametrize("name", TABLE["names"])
def test_every_name_is_there_with_its_parameters(name):
    found = tp
    for part in name.split("."):
        found = getattr(found, part)
    wanted = TABLE["names"][name]
    if wanted is None or name in TABLE["called_as_classes"]:
        return
    given = list(inspect.signature(found).parameters)
    assert [parameter for parameter in given if parameter in wanted] == wanted


@pytest.mark.parametrize("name", TABLE["attributes"])
def test_every_attribute_of_the_result_is_there(name):
    for model in (tp.tensor_parallel(mlp(), ["cpu"] * 2), tp.tensor_parallel(gpt2(), ["cpu"] * 2)):
        if name != "wrapped_model" or isinstance(model, tp.TensorParallelPreTrainedModel):
            getattr(model, name)


def test_what_the_attributes_say():
    model = tp.TensorParallel(mlp(), ["cpu", "cpu", "cpu"], output_device_index=2, tensor_parallel_config=rules(3))
    assert model.devices == (torch.device("cpu"),) * 3
    assert model.device_ids == [-1, -1, -1]
    assert model.output_device_index == 0  # three times the same device
    assert isinstance(model.tensor_parallel_config, tp.Config)
    assert [shard[0].weight.shape[0] for shard in model.module_shards] == [4, 4, 4]
    assert model.module_shards[0] is model
    assert model.modified_parameters_names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert model.param_fractions[1] == (24 + 4 + 24) / (72 + 12 + 72 + 6)
    assert not model.need_delayed_init
    assert model.preserve_shards_when_saving is False
    assert model.sharding_manager is None
    planned = tp.tensor_parallel(mlp(), ["cpu"] * 2)
    assert isinstance(planned.tensor_parallel_config, tp.Plan)
    pretrained = tp.tensor_parallel(gpt2(), ["cpu"] * 2)
    assert pretrained.wrapped_model is pretrained
    one = tp.tensor_parallel(mlp(), ["cpu"])
    assert one.module_shards == (one,)
    assert one.modified_parameters_names == set()


def test_the_classes_are_called_with_their_own_order():
    reference = mlp()
    split = tp.TensorParallel(copy.deepcopy(reference), ("cpu", "cpu"), "cpu", None, rules(2), True, False, False, None)
    assert isinstance(split, tp.TensorParallel)
    assert split.need_delayed_init
    assert_parity(reference, split, (X,), steps=3)
    assert not split.need_delayed_init
    model = gpt2()
    pretrained = tp.TensorParallelPreTrainedModel(copy.deepcopy(model), device_ids=["cpu"] * 2)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        pretrained.generate(ids, max_new_tokens=5, pad_token_id=0),
        model.generate(ids, max_new_tokens=5, pad_token_id=0),
    )
    assert type(pretrained)(model.config).__class__ is transformers.GPT2LMHeadModel
    default = tp.TensorParallel(mlp())
    assert len(default.module_shards) == max(1, torch.cuda.device_count())


def test_wrong_calls_are_named():
    with pytest.raises(TypeError, match="needs the module"):
        tp.TensorParallel()
    with pytest.raises(TypeError, match="several values for device_ids"):
        tp.TensorParallel(mlp(), ["cpu"], device_ids=["cpu"])
    with pytest.raises(TypeError, match="takes 9 arguments by position: module, device_ids"):
        tp.TensorParallel(*[None] * 10)
    with pytest.raises(TypeError, match=r"is for transformers models, and Sequential is none; use tp\.TensorParallel"):
        tp.TensorParallelPreTrainedModel(mlp(), ["cpu"] * 2)
    with pytest.raises(TypeError, match="unknown keyword 'delay_inti'; did you mean 'delay_init'"):
        tp.TensorParallel(mlp(), ["cpu"] * 2, delay_inti=True)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("delay", [False, True])
def test_parts_wait_on_the_cpu_where_that_is_asked_for(delay, ranks):
    reference = mlp()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, delay_init=delay, example_inputs=(X,))
    assert split.need_delayed_init == delay
    parameters = dict(split.named_parameters())
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-2)
    split(X).sum().backward()
    optimizer.step()
    assert not split.need_delayed_init
    assert all(parameters[name] is parameter for name, parameter in split.named_parameters())


def by_rank(split, prefix="", infix=()):
    """What version 2.0's `state_dict()` gave."""
    found = {}
    for rank, shard in enumerate(split.module_shards):
        for name, value in [*shard.named_parameters(remove_duplicate=False), *shard.named_buffers()]:
            if "@" not in name:
                inside = next(
                    (f"{m}.tp_wrapped_module.{name[len(m) + 1 :]}" for m in infix if name.startswith(m)), name
                )
                found[f"{prefix}module_shards.{rank}.{inside}"] = value.detach().clone()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_state_dicts_of_2_0_are_joined(ranks):
    reference = mlp()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, rules(ranks))
    old = by_rank(split, infix=["2"])
    for rank in range(ranks):
        old[f"module_shards.{rank}.2.tp_wrapped_module.bias"] = reference[2].bias.detach() / ranks
    other = tp.tensor_parallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double(), ["cpu"] * ranks)
    other.load_state_dict(old)
    torch.testing.assert_close(other(X), reference(X), atol=1e-12, rtol=0)
    with pytest.raises(tp.PlanError, match=rf"parts of {ranks} ranks, and the model is split over 5"):
        tp.tensor_parallel(mlp(), ["cpu"] * 5, example_inputs=(X,)).load_state_dict(old)
    del old["module_shards.1.0.weight"]
    with pytest.raises(tp.PlanError, match=r"0\.weight: the state dict has no part of rank 1"):
        other.load_state_dict(old)


def test_state_dicts_of_pretrained_models_of_2_0():
    reference = gpt2()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    old = by_rank(split, "wrapped_model.")
    for name, tensor in tp.full_state_dict(split).items():
        if name.endswith("c_proj.bias"):
            for rank in range(2):
                old[f"wrapped_model.module_shards.{rank}.{name}"] = tensor / 2
    fresh = tp.tensor_parallel(transformers.GPT2LMHeadModel(reference.config).double().eval(), ["cpu"] * 2)
    fresh.load_state_dict(old, strict=False)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(fresh(ids).logits, reference(ids).logits, atol=1e-12, rtol=0)


def test_saving_in_the_words_of_2_0(tmp_path):
    reference = mlp()
    split = tp.TensorParallel(copy.deepcopy(reference), ["cpu"] * 2)
    with tp.save_tensor_parallel(split):
        torch.save(split.state_dict(), tmp_path / "state.pt")
    plain = mlp()
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    torch.testing.assert_close(plain(X), reference(X), atol=0, rtol=0)
    with pytest.raises(tp.TensorParallelError, match="is not split"), tp.save_tensor_parallel(plain):
        pass
