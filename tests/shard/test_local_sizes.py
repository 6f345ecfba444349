"""A split module whose code computes its sizes: call sites and local attributes in the real thing."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from shard_models import dim, noisy, tensor_plans
from torch import nn
from torch.overrides import TorchFunctionMode

import tensor_parallel as tp
from tensor_parallel.layout import DimLayout, Part, Segment, partial, shard
from tensor_parallel.plan import Boundary, CallSite, Factor, LocalSize, ModulePlan, Plan
from tensor_parallel.plan.source import call_position, method_of


class NanoAttention(nn.Module):
    """nanoGPT's attention, its sizes from the input's shape; the heads come together in a method of their own."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        return self.c_proj(self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True), x))

    def joined(self, y, x):
        return y.transpose(1, 2).contiguous().view(*x.shape[:-1], x.shape[-1])


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        if func.__name__ in ("view", "split"):
            self.found.append((func.__name__, method_of(frame, NanoAttention), call_position(frame)))
        return func(*args, **(kwargs or {}))


def plan_of(module, x):
    with Calls() as calls:
        module(x)
    heads, width = module.n_head, module.n_embd
    unit = width // heads
    number, inner = dim(Part(heads, "head")), dim(Part(heads, "head"), Part(unit))
    packed = DimLayout(inner.segments * 3)
    assert isinstance(packed.segments[0], Segment)
    sites = []
    for name, method, position in calls.found:
        if method == "joined":
            sites.append(CallSite(method, position, (-1,), width, inner))
        elif name == "view":
            sites.append(CallSite(method, position, (3,), unit))
    assert len(sites) == 4
    cut = shard(-1, packed)
    return Plan(
        factors={"head": Factor("head", heads)},
        tensors=tensor_plans(
            module,
            {"c_attn.weight": {0: packed}, "c_attn.bias": {0: packed}, "c_proj.weight": {1: inner}},
            {"c_proj.bias"},
        ),
        modules={
            "": ModulePlan(
                attributes=(LocalSize("n_head", number), LocalSize("n_embd", inner)), call_sites=tuple(sites)
            ),
            "c_attn": ModulePlan(outputs=(Boundary("", cut, cut),)),
            "c_proj": ModulePlan(
                inputs=(Boundary("input", shard(-1, inner), shard(-1, inner)),),
                outputs=(Boundary("", partial("head")),),
            ),
        },
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_nano_attention_equals_the_unsplit_one(ranks):
    reference = noisy(NanoAttention().double())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, plan_of(reference, x))
    weight = torch.randn(2, 5, 12, dtype=torch.float64)
    for shape in (x, x[:1, :3], x):
        reference.zero_grad()
        split.zero_grad()
        outputs = [model(shape) for model in (reference, split)]
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-12, rtol=1e-12)
        for output in outputs:
            (output * weight[: shape.shape[0], : shape.shape[1]]).sum().backward()
        gradients = tp.full_gradients(split)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=1e-12, msg=name)
    assert (split.n_head, split.n_embd) == (3, 12)
    assert isinstance(split, NanoAttention)
