"""What is chosen where several splits are exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensor_parallel as tp


class Packed(nn.Module):
    """Five heads of 12: cutting inside the heads would be more even on two ranks, with attention computed whole."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.n_head = nn.Linear(60, 180), nn.Linear(60, 60), 5

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_head, c // self.n_head).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class OtherName(Packed):
    def forward(this, x):
        b, t, c = x.shape
        q, k, v = this.qkv(x).split(c, dim=2)
        q, k, v = (z.view(b, t, this.n_head, c // this.n_head).transpose(1, 2) for z in (q, k, v))
        return this.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


@pytest.mark.parametrize("kind", [Packed, OtherName])
def test_attention_is_cut_by_heads_with_one_all_reduce(kind):
    plan = tp.make_plan(kind(), 2, (torch.randn(2, 16, 60),))
    assert [(t.op, t.module) for t in plan.traffic] == [("all_reduce", "proj")]
    assert all(t.is_cut for key, t in plan.tensors.items() if key != "proj.bias")
