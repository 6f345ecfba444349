"""sharded=True: what the plan leaves whole is kept in pieces, and the model is the model."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensor_parallel as tp
from tensor_parallel.shard.shards import shards_of
from tensor_parallel.testing import assert_parity, noisy

RANKS = [2, 3, 4]
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
COMMON = {"vocab_size": 101, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 5}
"""Five heads: uneven over 2, 3 and 4 ranks. With fewer heads than ranks the stand-ins of those without come on top of
the bytes that are levelled here."""


def build(kind):
    torch.manual_seed(0)
    mlp, wide = {"intermediate_size": 44}, {"max_position_embeddings": 32}
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**COMMON, **mlp, **wide, num_key_value_heads=5)
        ),
        "tied llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**COMMON, **mlp, **wide, num_key_value_heads=5, tie_word_embeddings=True)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**COMMON, **mlp, **wide, num_key_value_heads=5, head_dim=8)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=101, n_embd=40, n_layer=2, n_head=5, n_positions=32)
        ),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**COMMON, **mlp, **wide)),
        "opt": lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(**COMMON, ffn_dim=44, max_position_embeddings=32, word_embed_proj_dim=40)
        ),
        "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**COMMON, **mlp, **wide)),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**COMMON, **mlp, **wide, num_key_value_heads=5, head_dim=8)
        ),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(hidden_size=40, num_hidden_layers=2, num_attention_heads=5, **mlp, image_size=16,
                                   patch_size=8, num_labels=8)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**COMMON, **mlp, **wide, num_key_value_heads=5, num_local_experts=3,
                                       experts_implementation="eager")
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=101, d_model=40, d_kv=4, d_ff=44, num_layers=2, num_heads=5,
                                  decoder_start_token_id=0, dropout_rate=0.0)
        ),
    }  # fmt: skip
    return noisy(made[kind]().double().eval())


KINDS = ["llama", "tied llama", "qwen3", "gpt2", "bert", "opt", "neox", "gemma2", "mixtral", "t5"]


def inputs_of(kind):
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64)}
    return {"input_ids": IDS, **({"decoder_input_ids": IDS[:, :3]} if kind == "t5" else {})}


def pair(kind, ranks, **how):
    reference = build(kind)
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, sharded=True, **how)


def reachable(model):
    """Bytes of parameters reachable from each rank's modules, each storage once a rank."""
    found = []
    for shard in model.module_shards:
        held = {}
        for name, parameter in shard.named_parameters(remove_duplicate=False):
            if "@" not in name:
                held[parameter.untyped_storage().data_ptr()] = parameter.untyped_storage().nbytes()
        found.append(sum(held.values()))
    return found


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, ranks) for kind in KINDS for ranks in (2, 4)), ("vit", 2)])
def test_it_is_the_model_and_no_rank_holds_much_more_than_its_share(kind, ranks):
    reference, split = pair(kind, ranks)
    total = sum({p.data_ptr(): p.nbytes for p in reference.parameters()}.values())
    alone = reachable_cut(kind, ranks)
    assert max(reachable(split)) <= max(total * (1 / ranks + 0.02), *alone)
    tolerance = {"tolerance": 1e-9, "gradient_tolerance": None}
    assert_parity(reference, split, inputs_of(kind), **tolerance)


def reachable_cut(kind, ranks):
    """What tensor parallelism alone has each rank hold of the parameters that it cuts."""
    model = tp.tensor_parallel(build(kind), ["cpu"] * ranks)
    tensors = shards_of(model).tensors.values()
    cut = {t.plan.names[0] for t in tensors if not t.plan.is_buffer and (t.is_cut or t.plan.rank0_only)}
    return [sum(p.nbytes for name, p in shard.named_parameters() if name in cut) for shard in model.module_shards]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["llama", "tied llama", "gpt2"])
def test_training_saving_loading_generating(kind, ranks, tmp_path):
    reference, split = pair(kind, ranks)
    assert_parity(reference, split, {"input_ids": IDS}, steps=3)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(split.generate(IDS, **how), reference.generate(IDS, **how))
    assert list(split.state_dict()) == list(reference.state_dict())
    split.save_pretrained(tmp_path)
    loaded = type(reference).from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(loaded(IDS).logits, reference(IDS).logits, atol=1e-8, rtol=1e-8)
    _, fresh = pair(kind, ranks)
    fresh.load_state_dict(reference.state_dict())
    torch.testing.assert_close(fresh(IDS).logits, reference(IDS).logits, atol=1e-11, rtol=0)


class Net(nn.Module):
    """Norms, a frozen part, a module called twice, weights read from outside of their module."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.BatchNorm1d(6), nn.Linear(10, 6)
        self.frozen, self.scale = nn.LayerNorm(6), nn.Parameter(torch.linspace(1, 2, 6))
        self.frozen.requires_grad_(False)
        self.odd = nn.Parameter(torch.linspace(0, 1, 7))

    def forward(self, x):
        x = self.frozen(self.norm(x)) * self.norm.weight + self.scale * self.odd.sum()
        for _ in range(2):
            x = x + self.down(torch.relu(self.up(self.frozen(x))))
        return x @ x.T * self.odd[2:3]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("names", [None, ["scale", "norm.weight", "odd"]], ids=["all", "named"])
def test_odd_modules(ranks, names):
    reference = noisy(Net().double())
    split = tp.tensor_parallel(
        copy.deepcopy(reference), ["cpu"] * ranks, sharded=True, sharded_param_names=names, example_inputs=(X,)
    )
    wanted = {"norm.weight", "norm.bias", "frozen.weight", "frozen.bias", "scale", "odd"} if names is None else {*names}
    assert set(split.sharding_manager.parameters) == wanted
    assert_parity(reference, split, (X,), steps=3)
    assert split.frozen.weight.grad is None
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-3)
    split(X).sum().backward()
    optimizer.step()
    held = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    assert held == sum(p.numel() for p in reference.parameters() if p.requires_grad)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_hooks_inner_calls_and_dropout(ranks, reentrant):
    torch.manual_seed(0)
    settings = {**COMMON, "intermediate_size": 44, "num_key_value_heads": 5, "attention_dropout": 0.2}
    reference = noisy(transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).double().train())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, sharded=True)
    found = []
    for model in (reference, split):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        seen = []
        model.model.norm.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.detach()) or out * 1.5)
        torch.manual_seed(1)
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        gradients = tp.full_gradients(model) if model is split else {n: p.grad for n, p in model.named_parameters()}
        found.append((loss.detach(), seen[0], gradients))
    torch.testing.assert_close(found[1][:2], found[0][:2], atol=1e-11, rtol=0)
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], gradient, atol=1e-10, rtol=0, msg=name)
    x = torch.randn(1, 3, 40, dtype=torch.float64)
    torch.testing.assert_close(
        split.model.layers[0].input_layernorm(x), reference.model.layers[0].input_layernorm(x), atol=1e-12, rtol=0
    )
    both = [checkpoint(m, IDS, use_reentrant=False).logits for m in (reference.eval(), split.eval())]
    torch.testing.assert_close(both[1], both[0], atol=1e-11, rtol=0)


def test_autograd_keeps_no_assembled_weight(monkeypatch):
    reference = build("mixtral")  # whose experts stay whole: most of it is sharded
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, sharded=True)
    from tensor_parallel.shard import assembly

    alive, plain = [], assembly._assembled

    def spied(module, name):
        whole = plain(module, name)
        alive.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(assembly, "_assembled", spied)
    loss = split(IDS).logits.square().sum()
    gc.collect()
    assert len(alive) > 10
    assert not [reference for reference in alive if reference() is not None]
    loss.backward()
    reference(IDS).logits.square().sum().backward()
    for name, gradient in tp.full_gradients(split).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, atol=1e-9, rtol=1e-9, msg=name)


def test_a_step_between_forward_and_backward_is_noticed():
    _, split = pair("llama", 2)
    loss = split(IDS).logits.sum()
    with torch.no_grad():
        for parameter in split.parameters():
            parameter.mul_(1.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("ranks", RANKS)
def test_sharded_later_changed_and_copied(ranks):
    reference = build("llama")
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)
    assert split.sharding_manager is None
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
    assert tp.Sharded(split) is split
    del optimizer
    assert "model.norm.weight" in split.sharding_manager.parameters
    assert_parity(reference, split, {"input_ids": IDS}, steps=2)
    for model in (reference, split):
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
    assert_parity(reference, split, {"input_ids": IDS})
    assert split.sharding_manager is not None
    copied = copy.deepcopy(split)
    assert copied.sharding_manager.parameters == split.sharding_manager.parameters
    assert_parity(reference, copied, {"input_ids": IDS})
    with tp.whole_parameters(split):
        assert split.model.norm.weight.shape == (40,)
        split.model.norm.weight.data.mul_(2)
    reference.model.norm.weight.data.mul_(2)
    assert_parity(reference, split, {"input_ids": IDS}, steps=2)


def test_wrong_calls_are_named_before_anything_is_changed():
    model = build("llama")
    with pytest.raises(
        tp.PlanError, match=r"no parameter 'model\.nrom\.weight'; the nearest are .*model\.norm\.weight"
    ):
        tp.tensor_parallel(model, ["cpu"] * 2, sharded=True, sharded_param_names=["model.nrom.weight"])
    with pytest.raises(tp.PlanError, match=r"q_proj\.weight is cut by the plan already"):
        tp.tensor_parallel(model, ["cpu"] * 2, sharded_param_names=["model.layers.0.self_attn.q_proj.weight"])
    with pytest.raises(ValueError, match="sharded is False"):
        tp.tensor_parallel(model, ["cpu"] * 2, sharded=False, sharded_param_names=["model.norm.weight"])
    with pytest.raises(TypeError, match="give a list of names"):
        tp.tensor_parallel(model, ["cpu"] * 2, sharded_param_names="model.norm.weight")
    with pytest.raises(TypeError, match="shards split models"):
        tp.Sharded(model)
    assert type(model) is transformers.LlamaForCausalLM
    split = tp.tensor_parallel(model, ["cpu"] * 2, sharded=True)
    with pytest.raises(tp.PlanError, match="sharded already"):
        split.apply_sharding()
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(build("llama").config)
    with pytest.raises(tp.PlanError, match=r"without values \(meta device\): load it"):
        tp.tensor_parallel(empty, ["cpu"] * 2, sharded=True)
    one = tp.tensor_parallel(build("llama"), ["cpu"], sharded=True)
    assert_parity(build("llama"), one, {"input_ids": IDS})
