"""Small modules with plans made by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tensor_parallel.layout import RUNTIME, DimLayout, Part, Segment, TensorLayout, partial, shard
from tensor_parallel.plan import Boundary, Factor, LocalSize, Lookup, ModulePlan, Plan, TensorPlan


def dim(*parts: Part | int) -> DimLayout:
    return DimLayout((Segment(tuple(p if isinstance(p, Part) else Part(p) for p in parts)),))


def tensor_plans(
    module: nn.Module, cuts: dict[str, dict[int, DimLayout]], rank0_only: set[str]
) -> dict[str, TensorPlan]:
    """Plans of every tensor of `module`; `cuts` gives the layouts of the dims that are cut."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[torch.Tensor, bool]] = {}
    for is_buffer, items in (
        (False, module.named_parameters(remove_duplicate=False)),
        (True, module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in items:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor, is_buffer
    plans = {}
    for marker, (tensor, is_buffer) in tensors.items():
        key = names[marker][0]
        dims = [cuts.get(key, {}).get(d, DimLayout.whole(size)) for d, size in enumerate(tensor.shape)]
        plans[key] = TensorPlan(
            tuple(names[marker]), TensorLayout(tuple(dims)), tensor.nbytes, is_buffer, rank0_only=key in rank0_only
        )
    return plans


class MLP(nn.Module):
    def __init__(self, hidden: int = 6, width: int = 5, out: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.act = nn.GELU()
        self.down = nn.Linear(width, out)
        self.norm = nn.LayerNorm(out)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """A column-split layer, then a row-split one."""
        return self.norm(self.down(self.act(self.up(x))) * scale)


def mlp_plan(module: MLP) -> Plan:
    width = module.up.out_features
    hidden = dim(Part(width, "hidden"))
    cut = shard(-1, hidden)
    return Plan(
        factors={"hidden": Factor("hidden", width)},
        tensors=tensor_plans(
            module, {"up.weight": {0: hidden}, "up.bias": {0: hidden}, "down.weight": {1: hidden}}, {"down.bias"}
        ),
        modules={
            "up": ModulePlan(outputs=(Boundary("", cut, cut),)),
            "act": ModulePlan(inputs=(Boundary("input", cut, cut),), outputs=(Boundary("", cut, cut),)),
            "down": ModulePlan(inputs=(Boundary("input", cut, cut),), outputs=(Boundary("", partial("hidden")),)),
        },
    )


class TiedLM(nn.Module):
    """Embedding, a norm, and a head tied to the embedding; returns a dict."""

    def __init__(self, vocabulary: int = 11, width: int = 4, padding_idx: int | None = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=padding_idx)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(0.0, 1.0, width))

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        hidden = self.norm(self.embed(ids) + self.offset)
        return {"logits": self.head(hidden), "hidden": [hidden]}


def tied_plan(module: TiedLM) -> Plan:
    rows = dim(Part(module.embed.num_embeddings, "vocab"))
    return Plan(
        factors={"vocab": Factor("vocab", module.embed.num_embeddings)},
        tensors=tensor_plans(module, {"embed.weight": {0: rows}}, set()),
        modules={
            "embed": ModulePlan(lookups=(Lookup("input", "weight", rows),), outputs=(Boundary("", partial("vocab")),)),
            "head": ModulePlan(outputs=(Boundary("", shard(-1, rows)),)),
        },
    )


class Attention(nn.Module):
    """Grouped-query attention with a per-head norm, sizes read from attributes."""

    def __init__(self, hidden: int = 12, heads: int = 3, kv_heads: int = 3, head_dim: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q = nn.Linear(hidden, heads * head_dim)
        self.kv = nn.Linear(hidden, 2 * kv_heads * head_dim)
        self.q_norm = nn.LayerNorm(head_dim)
        self.o = nn.Linear(heads * head_dim, hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        k = k.view(batch, length, -1, self.head_dim).transpose(1, 2)
        v = v.view(batch, length, -1, self.head_dim).transpose(1, 2)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1)), x


def attention_plan(module: Attention) -> Plan:
    size, kv, groups = module.head_dim, module.kv_heads, module.heads // module.kv_heads
    heads = dim(Part(kv, "kv"), Part(groups, "group"), size)
    one = Segment((Part(kv, "kv"), Part(size)))
    packed = DimLayout((one, one))
    by_head = shard(-1, heads)
    split_heads = shard(-2, dim(Part(kv, "kv"), Part(groups, "group")))
    return Plan(
        factors={"kv": Factor("kv", kv, partner="group"), "group": Factor("group", groups)},
        tensors=tensor_plans(
            module,
            {
                "q.weight": {0: heads},
                "q.bias": {0: heads},
                "kv.weight": {0: packed},
                "kv.bias": {0: packed},
                "o.weight": {1: heads},
            },
            {"o.bias"},
        ),
        modules={
            "q": ModulePlan(outputs=(Boundary("", by_head, by_head),)),
            "kv": ModulePlan(outputs=(Boundary("", shard(-1, packed), shard(-1, packed)),)),
            "q_norm": ModulePlan(
                inputs=(Boundary("input", split_heads, split_heads),), outputs=(Boundary("", split_heads, split_heads),)
            ),
            "o": ModulePlan(
                inputs=(Boundary("input", by_head, by_head),), outputs=(Boundary("", partial("kv", "group")),)
            ),
        },
    )


def noisy(module: nn.Module, seed: int = 0) -> nn.Module:
    """`module` in float64 with noise on every parameter."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


__all__ = [
    "MLP",
    "RUNTIME",
    "Attention",
    "LocalSize",
    "TiedLM",
    "attention_plan",
    "dim",
    "mlp_plan",
    "noisy",
    "tensor_plans",
    "tied_plan",
]
