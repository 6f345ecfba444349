"""Modules, parameters and attributes changed after the split: what the unsplit model, changed alike, gives."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
import transformers
from changed import assert_equal_files, assert_equal_models
from torch import nn

import tensor_parallel as tp
from tensor_parallel.shard import SplitTensor, unsplit
from tensor_parallel.shard.shards import shards_of
from tensor_parallel.shard.unsplit import joining_device
from tensor_parallel.testing import noisy

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])


def llama(tied=False, layers=3):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=44, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return noisy(transformers.LlamaForCausalLM(config).double().eval())


def pair(ranks, **how):
    reference = llama(**how)
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)


def fresh(make, seed=3):
    torch.manual_seed(seed)
    return noisy(make().double())


def test_several_devices_are_joined_on_the_cpu():
    cuda = [torch.device("cuda", index) for index in range(2)]
    assert joining_device(cuda) == torch.device("cpu")
    assert joining_device(cuda[:1] * 2) is None
    assert joining_device([torch.device("cpu")] * 3) is None


def test_everything_is_joined_there(monkeypatch):
    _, model = pair(2)
    model(IDS).logits.sum().backward()
    asked, home = {"whole": set(), "whole_gradient": set()}, torch.device("cpu", 0)  # as if it were another device
    for name, found in asked.items():
        plain = getattr(SplitTensor, name)

        def spied(self, device=None, plain=plain, found=found):
            found.add((self.plan.names[0], device))
            return plain(self, device)

        monkeypatch.setattr(SplitTensor, name, spied)
    monkeypatch.setattr(unsplit, "joining_device", lambda devices: home)
    with tp.whole_parameters(model):
        parameters = {(name, home) for name, _ in model.named_parameters()}
    assert asked["whole"] >= parameters
    assert asked["whole_gradient"] >= parameters


class Adapted(nn.Module):
    """A module put around one of the model's own, as LoRA does."""

    def __init__(self, base):
        super().__init__()
        self.base, width = base, base.in_features
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    torch.manual_seed(5)
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)).double())


def replace_layer(model):
    model.model.layers[1] = fresh(lambda: llama().model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1


def cut_layers(model):
    model.model.layers = model.model.layers[:2]


def delete_layer(model):
    del model.model.layers[0]


def swap_layers(model):
    layers = model.model.layers
    layers[0], layers[2] = layers[2], layers[0]


def append_layer(model):
    model.model.layers.append(fresh(lambda: llama().model.layers[1]))
    model.config.num_hidden_layers = 4


def new_head(model):
    model.lm_head = fresh(lambda: nn.Linear(24, 7, bias=True))


def other_activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def assign_parameter(model):
    torch.manual_seed(6)
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.randn(44, 24, dtype=weight.dtype))


def add_bias(model):
    model.model.layers[0].mlp.down_proj.bias = nn.Parameter(torch.linspace(0, 1, 24, dtype=torch.float64))


def tie_by_hand(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def resize(model):
    torch.manual_seed(7)
    model.resize_token_embeddings(111, mean_resizing=False)


def set_embeddings(model):
    model.set_input_embeddings(fresh(lambda: nn.Embedding(101, 24)))


def attribute(model):
    model.model.layers[1].self_attn.scaling = 0.9


def tensor_attribute(model):
    model.model.norm.variance_epsilon = 0.5


def apply_to_all(model):
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
            assert module.weight.shape == (module.out_features, module.in_features)

    torch.manual_seed(8)
    model.apply(init)


def write_whole(model):
    with tp.whole_parameters(model):
        weight = model.model.layers[0].self_attn.q_proj.weight
        assert weight.shape == (24, 24)
        with torch.no_grad():
            weight[3:17] *= 2
            model.lm_head.weight.data = model.lm_head.weight.data.flip(0)


CHANGES = [
    adapt, replace_layer, cut_layers, delete_layer, swap_layers, append_layer, new_head, other_activation,
    assign_parameter, add_bias, tie_by_hand, resize, set_embeddings, attribute, tensor_attribute, apply_to_all,
    write_whole,
]  # fmt: skip


def logits(model):
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_act_on_all_ranks(change, ranks, tmp_path):
    reference, split = pair(ranks)
    split(IDS)
    change(reference)
    change(split)
    assert_equal_models(split, reference, logits)
    assert_equal_files(split, reference, tmp_path)
    assert isinstance(split, tp.TensorParallelPreTrainedModel)
    assert any(tensor.is_cut for tensor in shards_of(split).tensors.values())


@pytest.mark.parametrize("change", [cut_layers, resize, apply_to_all, write_whole], ids=lambda change: change.__name__)
def test_changes_of_a_tied_model(change):
    reference, split = pair(2, tied=True)
    change(reference)
    change(split)
    assert_equal_models(split, reference, logits)
    assert split.lm_head.weight is split.model.embed_tokens.weight


@pytest.mark.parametrize("change", [cut_layers, swap_layers, write_whole], ids=lambda change: change.__name__)
def test_optimisers_outlive_changes(change):
    reference, split = pair(3)
    optimisers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, split)]
    for step in range(3):
        if step == 1:
            change(reference)
            change(split)
        for model, optimiser in zip((reference, split), optimisers, strict=True):
            optimiser.zero_grad()
            model(IDS, labels=IDS, use_cache=False).loss.backward()
            optimiser.step()
    for (name, mine), theirs in zip(split.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_saved_files_after_a_change(tmp_path):
    reference, split = pair(2)
    for model in (reference, split):
        cut_layers(model)
        model.config.num_hidden_layers = 2
    split(IDS)
    split.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(loaded(IDS).logits, reference(IDS).logits, atol=1e-11, rtol=1e-11)


def test_whole_parameters_keeps_identities_also_after_an_error():
    reference, split = pair(3)
    before = dict(split.named_parameters())

    def change():
        with tp.whole_parameters(split.model.layers[0]):
            assert [name for name, _ in split.named_parameters()] == [name for name, _ in reference.named_parameters()]
            assert type(split) is transformers.LlamaForCausalLM
            torch.testing.assert_close(split(IDS).logits, reference(IDS).logits)
            with tp.whole_parameters(split):
                split.model.norm.weight.data += 1
            raise KeyError

    with pytest.raises(KeyError):
        change()
    with torch.no_grad():
        reference.model.norm.weight += 1
    after = dict(split.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert_equal_models(split, reference, logits)


def test_gradients_are_whole_within_it():
    reference, split = pair(2)
    for model in (reference, split):
        model(IDS).logits.pow(2).mean().backward()
    with tp.whole_parameters(split):
        for mine, theirs in zip(split.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-11, rtol=1e-11)
    mine = tp.full_gradients(split)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, atol=1e-11, rtol=1e-11)


EARLIER = (
    r"computed.* before it was made whole \(tp\.whole_parameters.*call backward before that, or compute the loss again"
)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("change", [swap_layers, add_bias, append_layer], ids=lambda change: change.__name__)
def test_backward_of_a_loss_from_before(change, ranks):
    """Where the parts lie as they did it is right; elsewhere it says what happened."""
    reference, split = pair(ranks)
    losses = [model(IDS).logits.pow(2).mean() for model in (reference, split)]
    with tp.whole_parameters(split):
        pass
    change(reference), change(split)
    split(IDS)
    for loss in losses:
        loss.backward()
    mine = tp.full_gradients(split)
    theirs = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert sorted(mine) == sorted(theirs)
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, atol=1e-11, rtol=1e-11)


def test_backward_of_a_loss_from_before_while_the_model_is_whole():
    _, split = pair(2)
    loss = split(IDS).logits.sum()
    with tp.whole_parameters(split), pytest.raises(tp.TensorParallelError, match=EARLIER):
        loss.backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in split.parameters())
    loss.backward()


@pytest.mark.parametrize("change", [new_head, cut_layers], ids=lambda change: change.__name__)
def test_backward_through_parts_that_are_gone(change):
    _, split = pair(2)
    loss = split(IDS).logits.sum()
    with tp.whole_parameters(split):
        pass
    change(split)
    split(IDS)
    with pytest.raises(tp.TensorParallelError, match="before its modules, parameters or settings were changed"):
        loss.backward()
    split(IDS).logits.sum().backward()


def test_backward_with_checkpoints_from_before():
    _, split = pair(2)
    split.train().activation_checkpointing_enable()
    loss = split(IDS, use_cache=False).logits.sum()
    with tp.whole_parameters(split):
        pass
    with pytest.raises(tp.TensorParallelError, match=EARLIER):
        loss.backward()
    split(IDS, use_cache=False).logits.sum().backward()


def test_a_plan_made_without_a_trace_is_logged(caplog):
    torch.manual_seed(0)
    reference = noisy(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double())
    inputs = (torch.randn(4, 6, dtype=torch.float64),)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs=inputs)
    other = torch.randn(4, 8, dtype=torch.float64)
    for model in (reference, split):
        model[0] = fresh(lambda: nn.Linear(8, 12))
    with caplog.at_level(logging.WARNING, logger="tensor_parallel"):
        torch.testing.assert_close(split(other), reference(other))
    said = [record.getMessage() for record in caplog.records]
    assert any("Sequential was changed, and its new plan was made without a trace" in text for text in said)
    assert any("mat1" in text for text in said)


def test_freezing_one_name_freezes_all_parts():
    _, split = pair(3)
    split.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    split(IDS).logits.sum().backward()
    parts = [p for name, p in split.named_parameters() if name.startswith("model.layers.0.mlp.up_proj.weight")]
    assert len(parts) == 3
    assert not any(part.requires_grad for part in parts)
    assert all(part.grad is None for part in parts)


def test_an_optimiser_that_holds_some_parts_raises_at_its_first_step():
    _, split = pair(2)
    by_name = [p for name, p in split.named_parameters() if name.endswith("up_proj.weight")]
    optimiser = torch.optim.SGD(by_name, lr=0.1)
    split(IDS).logits.sum().backward()
    before = split.state_dict()
    with pytest.raises(tp.TensorParallelError, match=r"up_proj.weight.*rank 1.*named_parameters"):
        optimiser.step()
    for name, tensor in split.state_dict().items():
        assert torch.equal(tensor, before[name])
    torch.optim.SGD(split.parameters(), lr=0.1).step()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    frozen = [p for name, p in split.named_parameters() if "norm" in name]
    torch.optim.SGD(frozen, lr=0.1).step()


def test_a_local_integer_is_not_set_in_silence():
    _, split = pair(2)
    attention = split.model.layers[0].self_attn
    with pytest.raises(tp.PlanError, match="num_key_value_groups"):
        attention.num_key_value_groups = 1
    attention.num_key_value_groups = 2
    split(IDS)


def test_a_changed_model_with_a_plan_by_hand_is_refused_by_name():
    reference = llama()
    plan = tp.make_plan(reference, 2)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, plan)
    new_head(split)
    with pytest.raises(tp.PlanError, match="given by hand"):
        split(IDS)
    new_head(reference)
    torch.testing.assert_close(split(IDS).logits, reference(IDS).logits)


def test_a_model_that_was_changed_is_freed_without_the_garbage_collector():
    import weakref

    _, split = pair(2)
    cut_layers(split)
    split(IDS)
    gone = weakref.ref(split)
    gc.disable()
    try:
        del split
        assert gone() is None
    finally:
        gc.enable()
