"""A plan for transformers' Llama, made by hand as Megatron would."""

from __future__ import annotations

from shard_models import dim, tensor_plans
from torch import nn

from tensor_parallel.layout import Part, partial, shard
from tensor_parallel.plan import Boundary, Factor, LocalSize, Lookup, ModulePlan, Plan


def llama_plan(model: nn.Module) -> Plan:
    config = model.config
    heads, kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    factors = {"vocab": Factor("vocab", config.vocab_size)}
    rows = dim(Part(config.vocab_size, "vocab"))
    cuts = {"model.embed_tokens.weight": {0: rows}, "lm_head.weight": {0: rows}}
    lookup = ModulePlan(lookups=(Lookup("input", "weight", rows),), outputs=(Boundary("", partial("vocab")),))
    modules = {
        "model.embed_tokens": lookup,
        "lm_head": ModulePlan(outputs=(Boundary("", shard(-1, rows)),)),
    }
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        k, g, f = f"{i}.kv", f"{i}.group", f"{i}.hidden"
        factors |= {k: Factor(k, kv, partner=g), g: Factor(g, heads // kv), f: Factor(f, config.intermediate_size)}
        query, key = dim(Part(kv, k), Part(heads // kv, g), size), dim(Part(kv, k), size)
        hidden = dim(Part(config.intermediate_size, f))
        a, m = f"{layer}.self_attn", f"{layer}.mlp"
        groups = LocalSize("num_key_value_groups", dim(Part(heads // kv, g)))
        modules[a] = ModulePlan(attributes=(groups,))
        cuts |= {
            f"{a}.q_proj.weight": {0: query},
            f"{a}.k_proj.weight": {0: key},
            f"{a}.v_proj.weight": {0: key},
            f"{a}.o_proj.weight": {1: query},
            f"{m}.gate_proj.weight": {0: hidden},
            f"{m}.up_proj.weight": {0: hidden},
            f"{m}.down_proj.weight": {1: hidden},
        }
        for name, layout in (
            (f"{a}.q_proj", query),
            (f"{a}.k_proj", key),
            (f"{a}.v_proj", key),
            (f"{m}.gate_proj", hidden),
            (f"{m}.up_proj", hidden),
        ):
            modules[name] = ModulePlan(outputs=(Boundary("", shard(-1, layout), shard(-1, layout)),))
        for name, layout, of in ((f"{a}.o_proj", query, (k, g)), (f"{m}.down_proj", hidden, (f,))):
            modules[name] = ModulePlan(
                inputs=(Boundary("input", shard(-1, layout), shard(-1, layout)),), outputs=(Boundary("", partial(*of)),)
            )
        modules[f"{m}.act_fn"] = ModulePlan(
            inputs=(Boundary("input", shard(-1, hidden), shard(-1, hidden)),),
            outputs=(Boundary("", shard(-1, hidden), shard(-1, hidden)),),
        )
    return Plan(factors, tensor_plans(model, cuts, set()), modules)
