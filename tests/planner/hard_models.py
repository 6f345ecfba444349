"""Models that were made to break a planner: each is a plain module with something in it that careless splits get wrong.

`CASES`: name -> (how to build it, how to make its inputs from (batch, length, seed)).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Inputs = dict[str, Any] | tuple[Any, ...]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, int], Inputs]]] = {}
WIDTH, VOCAB = 12, 13


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sequence(batch, length, seed, width=WIDTH):
    return {"x": draw(batch, length, width, seed=seed)}


def tokens(batch, length, seed, vocab=VOCAB):
    return {"ids": torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))}


def images(batch, length, seed):
    return {"x": draw(batch, 3, length + 4, length + 4, seed=seed)}


def case(inputs=sequence, build=None):
    """Register a module class under its name."""

    def add(cls):
        CASES[cls.__name__] = (build or cls, inputs)
        return cls

    return add


class Heads(nn.Module):
    """q, k, v and o of an attention, for subclasses that write the middle."""

    def __init__(self, heads=6, width=WIDTH, bias=True):
        super().__init__()
        self.n_head, self.head_dim, self.width = heads, width // heads, width
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.o = nn.Linear(width, width, bias=bias)

    def heads(self, x):
        b, t, _ = x.shape
        return [f(x).view(b, t, self.n_head, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v)]

    def merged(self, y):
        return self.o(y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1))

    def forward(self, x):
        return self.merged(self.attend(*self.heads(x)))


# --- heads ------------------------------------------------------------------------------------------------------------


@case()
class GramOfHeads(Heads):
    def forward(self, x):
        q, k, v = (h.transpose(1, 2) for h in self.heads(x))  # (b, t, h, d)
        gram = torch.softmax(q @ k.transpose(-1, -2), -1)  # heads against heads
        return self.o((gram @ v).flatten(2))


@case()
class SymmetricGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def forward(self, x):
        h = self.up(x)
        return self.down(torch.tanh(h.transpose(1, 2) @ h))


@case()
class GramOfWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def forward(self, x):
        w = self.up.weight
        return self.down(self.up(x)) + (w @ w.t()).square().mean() + (w.t() @ w).diagonal().sum()


@case()
class Squeezed(Heads):
    """As many heads as ranks: a local head dim of one unit must not vanish."""

    def __init__(self):
        super().__init__(heads=4)

    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        return y.unsqueeze(0).squeeze() if len(y) > 1 else y


@case()
class SqueezedOne(Heads):
    def __init__(self):
        super().__init__(heads=3)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v).squeeze(1)


@case()
class Mqa(Heads):
    """q | k | v in one matrix, the one k and v shared by all heads."""

    def __init__(self, heads=6):
        super().__init__(heads)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * self.head_dim)
        del self.q, self.k, self.v

    def heads(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).split([self.width, self.head_dim, self.head_dim], -1)
        q = q.view(b, t, self.n_head, self.head_dim).transpose(1, 2)
        return q, k.unsqueeze(1), v.unsqueeze(1)

    def attend(self, q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2) / self.head_dim**0.5, -1) @ v


@case()
class MqaSdpa(Heads):
    def __init__(self):
        super().__init__(6)
        self.k, self.v = nn.Linear(WIDTH, self.head_dim), nn.Linear(WIDTH, self.head_dim)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.n_head, -1).transpose(1, 2)
        k, v = self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)
        return self.merged(F.scaled_dot_product_attention(q, k.expand_as(q), v.expand(-1, self.n_head, -1, -1)))


@case()
class GqaEnabled(Heads):
    def __init__(self):
        super().__init__(6)
        self.k, self.v = nn.Linear(WIDTH, 2 * self.head_dim), nn.Linear(WIDTH, 2 * self.head_dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


@case()
class GroupedByRepeat(Heads):
    """Tiled keys (h % kv), not the usual repeated ones (h // groups)."""

    def __init__(self):
        super().__init__(6)
        self.k, self.v = nn.Linear(WIDTH, 2 * self.head_dim), nn.Linear(WIDTH, 2 * self.head_dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.merged(F.scaled_dot_product_attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)))


@case()
class IntegerMaths(nn.Module):
    def __init__(self, heads=6):
        super().__init__()
        self.n_head, self.n_embd = heads, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv.select(0, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.n_head)
        scores = scores * (1.0 / self.n_head) + 0.5 * self.n_head
        y = scores.softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)) * (2.0 * self.n_head)


@case()
class FloatOfHeads(Heads):
    """Numbers of the heads that Python's ints do not see leave."""

    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0 / self.n_head)
        return y * (0.5 * self.n_head) / len(range(self.n_head))


@case()
class FloatOfShape(Heads):
    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        return y * (3.0 / y.shape[1]) + 1.0 / y.size(1)


def slopes(count):
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / count) for i in range(count)], dtype=torch.float64)


@case()
class AlibiInside(Heads):
    def attend(self, q, k, v):
        t = q.shape[-2]
        places = torch.arange(t)
        bias = slopes(self.n_head).view(self.n_head, 1, 1) * (places[None] - places[:, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q))


@case()
class AlibiByArange(Heads):
    def attend(self, q, k, v):
        t = q.shape[-2]
        places = torch.arange(t)
        slope = torch.pow(0.5, torch.arange(1, self.n_head + 1)).view(-1, 1, 1)
        bias = slope * (places[None] - places[:, None])
        return ((q @ k.transpose(-1, -2) + bias).softmax(-1)) @ v


class AlibiBlock(Heads):
    def forward(self, x, bias):
        b, t, _ = x.shape
        q, k, v = self.heads(x)
        q, k, v = (h.reshape(b * self.n_head, t, self.head_dim) for h in (q, k, v))
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.3)
        y = (scores.softmax(-1) @ v).view(b, self.n_head, t, self.head_dim)
        return x + self.merged(y)


@case()
class AlibiPassedIn(nn.Module):
    """Bloom's way: (batch * heads) slopes made by the parent, the same for every layer."""

    def __init__(self, heads=6):
        super().__init__()
        self.n_head = heads
        self.layers = nn.ModuleList(AlibiBlock(heads) for _ in range(2))

    def forward(self, x):
        b, t, _ = x.shape
        bias = slopes(self.n_head)[None, :, None] * torch.arange(t)[None, None]
        bias = bias.expand(b, self.n_head, t).reshape(b * self.n_head, 1, t)
        for layer in self.layers:
            x = layer(x, bias)
        return x


class MaskedBlock(Heads):
    def forward(self, x, mask):
        return x + self.merged(F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask))


@case()
class HeadMaskForAllLayers(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.layers = nn.ModuleList(MaskedBlock(heads) for _ in range(3))
        self.heads = heads

    def forward(self, x):
        mask = torch.arange(self.heads)[None, :, None, None] * torch.arange(x.shape[1]).to(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x


@case()
class RelativeBias(Heads):
    """T5's: a table of heads, looked up and permuted into the scores."""

    def __init__(self):
        super().__init__(6)
        self.table = nn.Embedding(5, 6)

    def attend(self, q, k, v):
        t = q.shape[-2]
        distance = (torch.arange(t)[None] - torch.arange(t)[:, None]).clamp(-2, 2) + 2
        bias = self.table(distance).permute(2, 0, 1).unsqueeze(0)
        return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


@case()
class HeadScales(Heads):
    """Bare parameters per head, per-head norms."""

    def __init__(self):
        super().__init__(6)
        self.scale = nn.Parameter(torch.ones(6, 1, 1, dtype=torch.float64))
        self.flat = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.norm = nn.LayerNorm(2)
        self.group = nn.GroupNorm(6, WIDTH)
        self.sink = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def attend(self, q, k, v):
        b, _, t, _ = q.shape
        scores = self.norm(q) @ self.norm(k).transpose(-1, -2) * self.scale.exp()
        sink = self.sink.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        y = weights @ v * self.flat[None, :, None, None]
        return self.group(y.transpose(2, 3).flatten(1, 2)).unflatten(1, (self.n_head, -1)).transpose(2, 3)


@case()
class EinsumAttention(nn.Module):
    def __init__(self, heads=3):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, heads, 4, dtype=torch.float64)) for _ in range(3))
        self.o = nn.Parameter(torch.randn(heads, 4, WIDTH, dtype=torch.float64))

    def forward(self, x):
        q, k, v = (torch.einsum("btc,chd->bhtd", x, w) for w in (self.q, self.k, self.v))
        a = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
        return torch.einsum("bhts,bhsd,hdc->btc", a, v, self.o)


@case()
class ComplexRotary(Heads):
    def __init__(self):
        super().__init__(3)

    def attend(self, q, k, v):
        b, h, t, d = q.shape
        angle = torch.outer(torch.arange(t).double(), 0.3 ** torch.arange(d // 2).double())
        turn = torch.polar(torch.ones_like(angle), angle)

        def rotated(y):
            pairs = torch.view_as_complex(y.float().double().reshape(b, h, t, -1, 2))
            return torch.view_as_real(pairs * turn).flatten(3)

        return F.scaled_dot_product_attention(rotated(q), rotated(k), v)


@case()
class ParentsHeads(nn.Module):
    """The layers in a loop of the parent, with the parent's own n_head."""

    def __init__(self, heads=6):
        super().__init__()
        self.n_head = heads
        self.q, self.k, self.v, self.o = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(4))

    def forward(self, x):
        for q, k, v, o in zip(self.q, self.k, self.v, self.o, strict=True):
            y = F.scaled_dot_product_attention(self.split(q(x)), self.split(k(x)), self.split(v(x)))
            x = x + o(y.transpose(1, 2).flatten(2))
        return x

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.n_head, -1).transpose(1, 2)


@case()
class HeadLoop(Heads):
    def attend(self, q, k, v):
        found = [(q[:, i] @ k[:, i].transpose(-1, -2)).softmax(-1) @ v[:, i] for i in range(self.n_head)]
        return torch.stack(found, 1)


@case()
class HeadList(Heads):
    def attend(self, q, k, v):
        return torch.stack(
            [(a @ b.mT).softmax(-1) @ c for a, b, c in zip(*(h.unbind(1) for h in (q, k, v)), strict=True)], 1
        )


@case()
class NumberOfElements(Heads):
    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        return y / y.numel() + len(y[0]) + y[0, :, 0, 0].nelement()


@case()
class SizeAsWhole(Heads):
    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        return y * q.size().numel() * math.prod(k.shape) / y[0].shape.numel()


@case()
class RepeatedPerHead(Heads):
    def __init__(self):
        super().__init__(6)
        self.gain = nn.Parameter(torch.ones(1, 1, 1, 2, dtype=torch.float64))

    def attend(self, q, k, v):
        gain = self.gain.repeat(1, self.n_head, 1, 1) + torch.ones(1, 1, 1, 1).to(q).repeat(1, self.n_head, 1, 1)
        tile = torch.ones(1, 1, 2).to(q).tile(self.n_head, 1, 1)
        return F.scaled_dot_product_attention(q * gain, k * tile, v)


@case()
class OneHotHeads(Heads):
    def attend(self, q, k, v):
        hot = F.one_hot(torch.arange(self.n_head) % 3, 3).to(q).sum(1) + torch.eye(self.n_head).to(q).sum(0)
        return F.scaled_dot_product_attention(q, k, v) * hot[:, None, None]


# --- sums -------------------------------------------------------------------------------------------------------------


class Hidden(nn.Module):
    """up (WIDTH -> 9) and down (9 -> WIDTH)."""

    def __init__(self, hidden=9):
        super().__init__()
        self.hidden = hidden
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@case()
class CatIntoLinear(nn.Module):
    """cat(split, whole) into a linear."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8 + WIDTH, 6)

    def forward(self, x):
        return self.b(torch.cat([F.relu(self.a(x)), x], -1))


@case()
class CatOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 6), nn.Linear(14, 6)

    def forward(self, x):
        return self.c(torch.cat([self.a(x).tanh(), self.b(x).sigmoid()], -1))


@case()
class PartialNonlinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.w1 = nn.Parameter(torch.randn(9, 7, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(7, dtype=torch.float64))

    def forward(self, x):
        return torch.relu(self.up(x) @ self.w1 + self.b) * (self.up(x) @ self.w1)


@case()
class BiasTwice(Hidden):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x):
        y = F.linear(F.gelu(self.up(x)), self.down.weight)
        return torch.tanh(y + self.extra + self.extra) + (F.linear(F.relu(self.up(x)), self.down.weight) + self.extra)


@case()
class BiasUsedElsewhere(Hidden):
    def forward(self, x):
        return super().forward(x) * self.down.bias


@case()
class BiasIsASum(nn.Module):
    """A partial sum as the bias of a product of whole tensors."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.other = Hidden().up, nn.Linear(9, 7, bias=False), nn.Linear(WIDTH, 7, bias=False)

    def forward(self, x):
        y = x.flatten(0, 1)
        part = F.linear(torch.tanh(self.up(y)), self.down.weight)
        return torch.addmm(part, y, self.other.weight.t(), beta=0.5)


@case()
class BiasOfBatchedProduct(Heads):
    def forward(self, x):
        q, k, _ = self.heads(x)
        scores = (q @ k.transpose(-1, -2)).sum(1)
        return torch.baddbmm(scores, x, x.transpose(1, 2), alpha=0.1) @ self.o(x)


@case()
class SumPlusNumber(Hidden):
    def forward(self, x):
        y = F.linear(F.gelu(self.up(x)), self.down.weight)
        return (y + 1.5) * 2 - (3 - y) / 4 + y.mean(-1, keepdim=True) + y.sum(1, keepdim=True)


@case()
class SumCompared(Hidden):
    def forward(self, x):
        y = F.linear(F.gelu(self.up(x)), self.down.weight)
        z = torch.where(y > 0, y, 0.1 * y).masked_fill(y > 1, 7.0)
        return z + y.masked_fill(x > 0, 0.0) + y.masked_fill(x < 0, 2.0) + torch.where(x > 0, y, x)


@case()
class SumCast(Hidden):
    def forward(self, x):
        y = F.linear(F.gelu(self.up(x)), self.down.weight) * 4
        return y + y.long() + y.bool() + y.to(torch.int32)


@case()
class HiddenTimesSum(Hidden):
    def forward(self, x):
        h = F.gelu(self.up(x))
        return (h * h.sum(-1, keepdim=True)) @ self.down.weight.t() / h.norm(dim=-1, keepdim=True)


@case()
class SplitReductions(Hidden):
    def forward(self, x):
        h = self.up(x)
        h = h - h.mean(-1, keepdim=True) + h.std(-1, keepdim=True) + h.amax(-1, keepdim=True)
        h = h + h.cumsum(-1) + h.softmax(-1) + h.sort(-1).values + h.flip(-1) + h.roll(1, -1)
        values, places = h.topk(3, -1)
        return self.down(h) + values.sum(-1, keepdim=True) + places.sum(-1, keepdim=True) + h.argmax(-1, keepdim=True)


@case()
class SplitIndexing(Hidden):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.tensor([3, 1, 4, 0, 2, 5, 8, 7, 6]))

    def forward(self, x):
        h = F.gelu(self.up(x))
        g = h[..., self.order] + h.index_select(-1, self.order) + h.gather(-1, self.order.expand_as(h))
        g = g + torch.zeros_like(h).scatter(-1, self.order.expand_as(h), h) + torch.take_along_dim(h, h.argsort(-1), -1)
        g = g.index_add(-1, self.order[:2], h[..., :2])
        return self.down(g + h[..., [0, 1, 2, 3, 4, 5, 6, 7, 8]])


@case()
class SplitRows(Hidden):
    """Indexing of other dims while the hidden dim is cut."""

    def forward(self, x):
        h = F.gelu(self.up(x))
        last = h[torch.arange(h.shape[0]), h.shape[1] - 1]
        first = h.gather(1, torch.zeros(h.shape[0], 1, h.shape[2], dtype=torch.long))
        h = h.index_add(1, torch.tensor([0, 1]), h[:, :2])
        return self.down(h + last[:, None] + first) + self.down(h[:, ::2])[:, :1] + self.down(h[:, 1:-1]).sum()


@case()
class Strided(Hidden):
    def __init__(self):
        super().__init__(8)

    def forward(self, x):
        h = self.up(x)
        return F.linear(F.silu(h[..., ::2]) * h[..., 1::2], self.down.weight[:, :4]) + h[..., ::3].sum(-1, True)


@case()
class StridedPairs(nn.Module):
    """Interleaved pairs read twice: cutting the pair itself must not pass for a cut of the pairs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, 6, 2, dtype=torch.float64))
        self.down = nn.Linear(6, WIDTH)

    def forward(self, x):
        h = (x @ self.w.view(WIDTH, 12)).tanh()
        return self.down(h[..., ::2] * h[..., 1::2])


@case()
class ShiftedUnits(Hidden):
    def forward(self, x):
        h = self.up(x)
        return self.down(F.pad(h, (1, -1)) + F.pad(h, (0, 0, 1, -1)) + F.pad(h, (1, 0))[..., :-1])


@case()
class InPlace(Hidden):
    def forward(self, x):
        h = self.up(x)
        h.mul_(2).add_(1)
        h[..., :3] = 0
        view = h[:, 1:]
        view.mul_(3)
        h[:, 0].add_(5)
        out = self.down(h)
        out += 1
        out[:, 0] = x[:, 0]
        return out


@case()
class InPlaceOnSum(Hidden):
    def forward(self, x):
        y = F.linear(self.up(x).relu_(), self.down.weight)
        y.add_(1)
        y[:, :1] += x[:, :1]
        z = torch.zeros_like(y)
        z.copy_(y)
        z.fill_diagonal_(0) if z.dim() == 2 else z[..., 0].fill_(3)
        return z + y


@case()
class OutArgument(Hidden):
    def forward(self, x):
        with torch.no_grad():
            h = self.up(x)
            place = torch.empty_like(h)
            torch.add(h, 1, out=place)
            return F.linear(place, self.down.weight)


@case()
class CopyInto(Hidden):
    def forward(self, x):
        h = F.gelu(self.up(x))
        cache = h.new_zeros(h.shape[0], 4 + h.shape[1], self.hidden)
        cache[:, 2 : 2 + h.shape[1]] = h
        return self.down(cache).sum(1)


@case()
class Buffers(Hidden):
    """Statistics that the forward keeps in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("ema", torch.zeros(9, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("assigned", torch.zeros(9, dtype=torch.float64))

    def forward(self, x):
        h = F.gelu(self.up(x))
        with torch.no_grad():
            self.total.add_(h.sum())
            self.ema.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
            self.calls += 1
            self.assigned = self.assigned * 0.5 + h.mean((0, 1))
        return self.down(h) + self.total


@case()
class KeptAside(Hidden):
    """An attribute that the forward leaves behind, read by the model's output in the next module."""

    def forward(self, x):
        h = F.gelu(self.up(x))
        self.aux = h.detach().square().sum()
        self.kept = [h.detach()]
        return self.down(h) + self.aux * self.kept[0].mean()


@case()
class SplitWhere(Hidden):
    def forward(self, x):
        h = self.up(x)
        h = torch.where(h > 0, h, h.new_full((self.hidden,), 0.5)).masked_fill(h.abs() < 0.1, 3.0)
        return self.down(h.clamp(min=-1).lerp(h.neg(), 0.3).nan_to_num())


@case()
class Glu(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(7, WIDTH)
        self.slope = nn.PReLU(7)

    def forward(self, x):
        h = F.glu(self.up(x)) + self.slope(self.up(x)[..., :7].transpose(1, 2)).transpose(1, 2)
        a, b = self.up(x).chunk(2, -1)
        return self.down(h + a * b)


@case()
class ThreeSegments(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(5, WIDTH)

    def forward(self, x):
        a, b, c = self.up(x).tensor_split(3, -1)
        d, e = self.up(x).split([5, 10], -1)
        return self.down(a * b + c * d + e[..., 5:])


@case()
class NoisySegments(nn.Module):
    """Segments of other sizes than the units' own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(5, WIDTH)

    def forward(self, x):
        a, b, c = self.up(x).split([5, 1, 5], -1)
        d = self.up(x)[..., 3:8]
        return self.down(a * b + c + d)


@case()
class LoraLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, 8)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.out(self.base(x) + self.b(self.a(x)))


@case()
class SumIntoSplit(nn.Module):
    """One partial sum into weights that another unit cuts."""

    def __init__(self):
        super().__init__()
        sizes = ((12, 8), (8, 6), (6, 10), (10, 12))
        self.w = nn.ParameterList(torch.randn(a, b, dtype=torch.float64) for a, b in sizes)

    def forward(self, x):
        for w in self.w:
            x = x @ w
        return x


@case()
class Experts(nn.Module):
    """Batched experts, a soft router."""

    def __init__(self, experts=4, hidden=6):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, hidden, dtype=torch.float64))
        self.up_bias = nn.Parameter(torch.randn(experts, hidden, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(experts, hidden, WIDTH, dtype=torch.float64))
        self.down_bias = nn.Parameter(torch.randn(experts, WIDTH, dtype=torch.float64))

    def forward(self, x):
        weight = self.router(x).softmax(-1).flatten(0, 1)
        y = x.flatten(0, 1).repeat(self.router.out_features, 1).view(self.router.out_features, -1, WIDTH)
        y = torch.bmm(y, self.up) + self.up_bias[:, None]
        y = torch.bmm(F.silu(y), self.down) + self.down_bias[:, None]
        return (y * weight.t()[..., None]).sum(0).view(x.shape)


@case()
class TopTwo(nn.Module):
    """A data-dependent loop over experts."""

    def __init__(self, experts=3):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Hidden(6) for _ in range(experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, column = torch.where(chosen == index)
            if row.numel():
                out.index_add_(0, row, expert(flat[row]) * weight[row, column, None])
        return out.view(x.shape)


@case()
class UntilConverged(Hidden):
    def forward(self, x):
        steps = 0
        while x.square().mean() > 0.05 and steps < 4:
            x = 0.3 * self.down(torch.tanh(self.up(x)))
            steps += 1
        return x * steps


# --- modules ----------------------------------------------------------------------------------------------------------


@case()
class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.norm = Hidden(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.mlp(self.norm(self.mlp(x)) + x)


@case()
class SharedInTwoPlaces(nn.Module):
    """A linear that once ends an island and once begins one."""

    def __init__(self):
        super().__init__()
        self.square, self.up, self.down = nn.Linear(8, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.down(F.relu(self.square(F.relu(self.square(F.relu(self.up(x)))))))


@case()
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.w, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h = torch.tanh(self.u(x[:, t]) + self.w(h))
        return self.out(h)


@case()
class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.lstm, self.gru, self.head = (
            nn.Linear(WIDTH, 6),
            nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True),
            nn.GRU(10, 4),
            nn.Linear(4, 3),
        )
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x):
        y, (h, _) = self.lstm(self.up(x))
        z, _ = self.gru(y)
        return self.head(z + self.cell(z[:, 0])[:, None]) + h.sum()


@case()
class Torchs(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 10, 0.0, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.down = nn.Linear(8, 3)

    def forward(self, x):
        y = self.encoder(self.up(x))
        return self.down(y + self.attention(y, y, y)[0])


@case()
class WholeTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Transformer(WIDTH, 4, 1, 1, 14, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.model(x, x * 2))


@case()
class FunctionalAttention(nn.Module):
    """torch's fused attention function, called with a module's own weights."""

    def __init__(self):
        super().__init__()
        self.n = 3
        self.w, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            y, y, y, WIDTH, self.n, self.w.weight, self.w.bias, None, None, False, 0.0, self.o.weight, self.o.bias
        )
        return y.transpose(0, 1)


@case()
class WeightReadElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.reader = Hidden(), nn.Linear(WIDTH, 9, bias=False)
        self.reader.weight = self.mlp.up.weight
        self.other = Hidden()

    def forward(self, x):
        y = self.mlp(x) + F.linear(self.reader(x), self.other.down.weight)
        return y + self.other(x) + self.mlp.up.weight.sum()


@case(tokens)
class TiedThroughT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, 8), nn.LayerNorm(8)
        self.bias = nn.Parameter(torch.randn(VOCAB, dtype=torch.float64))

    def forward(self, ids):
        return self.norm(self.embed(ids)) @ self.embed.weight.t() + self.bias


@case(tokens)
class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.padded = nn.Embedding(VOCAB, 40, padding_idx=3)
        self.often = nn.Embedding(VOCAB, 40, scale_grad_by_freq=True)
        self.places = nn.Embedding(40, 40)
        self.head = nn.Linear(40, 3)

    def forward(self, ids):
        x = self.padded(ids) + self.often(ids)
        return self.head(torch.tanh(x + self.places(torch.arange(ids.shape[1]) + 2)))


@case(lambda b, t, s: tokens(b, t, s, 200))
class FunctionalLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(200, 9, dtype=torch.float64))
        self.rows = nn.Parameter(torch.randn(200, 9, dtype=torch.float64))

    def forward(self, ids):
        return F.embedding(ids, self.table, padding_idx=1).tanh() + self.rows[ids].tanh() + self.rows[ids + 0]


class OffsetEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 2)


@case(lambda b, t, s: tokens(b, t, s, 200))
class IdsArithmetic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = OffsetEmbedding(202, 8), nn.Linear(8, 202)
        self.types = nn.Embedding(150, 8, padding_idx=0)

    def forward(self, ids):
        return self.head(self.embed(ids) + self.types(ids % 150) + self.types.weight[0])


@case(lambda b, t, s: tokens(b, t, s, 200))
class EmbeddingThenNonlinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.scale = nn.Embedding(200, 8, padding_idx=5), 8**0.5
        self.up = nn.Linear(8, 200)

    def forward(self, ids):
        return F.log_softmax(self.up(F.gelu(self.embed(ids) * self.scale)), -1)


@case(lambda b, t, s: {**tokens(b, t, s, 200), "labels": tokens(b, t, s + 1, 200)["ids"]})
class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 8), nn.Linear(8, 200, bias=False)

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        chosen = logits.gather(-1, labels[..., None])
        return {"loss": loss, "chosen": chosen, "nested": [(logits.argmax(-1), logits)]}


# --- convolutions -----------------------------------------------------------------------------------------------------


@case(images)
class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.grouped, self.norm2 = nn.Conv2d(12, 8, 1, groups=4), nn.BatchNorm2d(8, affine=False)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.up_grouped = nn.ConvTranspose2d(6, 9, 2, groups=3)
        self.groups_norm, self.instance = nn.GroupNorm(3, 9), nn.InstanceNorm2d(9, affine=True)
        self.head = nn.Linear(9, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.norm2(self.grouped(self.depthwise(x))))
        x = self.groups_norm(self.up_grouped(F.max_pool2d(self.up(x), 2)))
        return self.head(self.instance(x).mean((2, 3)))


@case(images)
class Depthwise(nn.Module):
    def __init__(self, kind=nn.ConvTranspose2d):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 12, 1), kind(12, 12, 2, groups=12), nn.Conv2d(12, 3, 1)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


@case(images)
class MultiplierDepthwise(Depthwise):
    def __init__(self):
        super().__init__()
        self.b, self.c = nn.Conv2d(12, 24, 3, groups=12), nn.Conv2d(24, 3, 1)


@case()
class OneDimensional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv1d(WIDTH, 10, 3, padding=1), nn.BatchNorm1d(10)
        self.b = nn.Conv1d(10, 10, 3, padding=2, groups=10, bias=False)
        self.w = nn.Parameter(torch.randn(10, 1, 3, dtype=torch.float64))
        self.pool, self.c = nn.AvgPool1d(2, 1), nn.Conv1d(10, 4, 1)

    def forward(self, x):
        y = self.norm(self.a(x.transpose(1, 2)))
        y = F.silu(self.b(y)[..., : x.shape[1]]) + F.conv1d(y, self.w, padding=1, groups=y.shape[1])
        return self.c(self.pool(y)).transpose(1, 2)


@case(images)
class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 2, stride=2)
        self.cls = nn.Parameter(torch.randn(1, 1, 12, dtype=torch.float64))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 7)

    def forward(self, x):
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.cls.expand(len(y), -1, -1), y], 1)
        return self.head(self.norm(y)[:, 0])


@case(images)
class Shuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 1), nn.Conv2d(3, 5, 1)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)

    def forward(self, x):
        y = F.relu(self.a(x))
        b, c, h, w = y.shape
        y = y.view(b, 3, c // 3, h, w).transpose(1, 2).reshape(b, c, h, w)
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        y = self.b(y).roll((1, 2), (2, 3))
        return self.c(F.interpolate(F.pixel_shuffle(y, 2), scale_factor=0.5, mode="nearest"))


# --- autograd ---------------------------------------------------------------------------------------------------------


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        # Not linear over units: shares of the units would give another gradient.
        return grad @ weight / weight.shape[0], (grad.flatten(0, 1).t() @ x.flatten(0, 1)) * grad.sum()


@case()
class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.down(Halved.apply(x, self.up.weight)) + self.down(self.up(x))


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.abs().sum()


@case()
class NormalisedGradient(Hidden):
    def forward(self, x):
        return self.down(Identity.apply(F.gelu(self.up(x))))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x, x + 1

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        return (2 * x * a + b) / x.abs().max()


@case()
class TwoOutputsFunction(Hidden):
    def forward(self, x):
        a, b = Squared.apply(self.up(x))
        return self.down(a) + self.down(a * b)


@case()
class Detached(Hidden):
    def forward(self, x):
        h = F.gelu(self.up(x))
        with torch.no_grad():
            scale = self.down(h).abs().amax(-1, keepdim=True)
        return self.down(h - h.detach() * 0.5) / (scale + 1)


# --- inputs and outputs -----------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Any
    hidden: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


@case()
class Outputs(Hidden):
    def forward(self, x):
        h = F.gelu(self.up(x))
        return {"out": Output(self.down(h), [h, x]), "pair": Pair(h[..., :3], (h.sum(), x)), "none": None, "n": 3}


class Holder:
    def __init__(self, value):
        self.value = value


@case()
class PassedInObject(nn.Module):
    """Between modules in an object that nobody looks into."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.second(Holder(F.gelu(self.first(x))).value)


@case()
class InputIsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip, self.mlp = nn.Identity(), Hidden()

    def forward(self, x):
        y = self.skip(x)
        return y, self.mlp(y), x


@case(lambda b, t, s: {"x": draw(b, t, WIDTH, seed=s), "scale": draw(WIDTH, seed=s + 1)})
class KeywordsOnly(Hidden):
    def forward(self, *, x, scale=None, **others):
        return super().forward(x * scale)


@case(lambda b, t, s: (draw(b, t, WIDTH, seed=s), draw(b, t, WIDTH, seed=s + 1)))
class PositionalOnly(Hidden):
    def forward(self, *tensors):
        return sum(super(PositionalOnly, self).forward(x) for x in tensors)


@case(lambda b, t, s: ({"x": [draw(b, t, WIDTH, seed=s)]}, Pair(draw(b, t, 9, seed=s + 1), 2)))
class NestedInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, first, second):
        return self.down(self.up(first["x"][0]).tanh() * second.first * second.second)


@case(lambda b, t, s: {"x": draw(b, t, WIDTH, seed=s), "mask": draw(b, t, seed=s) > 0})
class BooleanIndexing(Hidden):
    def forward(self, x, mask):
        h = F.gelu(self.up(x))
        h = h * mask[..., None]
        out = self.down(h)
        out = out.masked_fill(~mask[..., None], 2.0)
        return out.masked_select(mask[..., None]).sum() + out[mask].mean() + h[mask].sum()


@case()
class Listed(Hidden):
    """Values that go to Python and back."""

    def forward(self, x):
        h = F.gelu(self.up(x))
        numbers = h.detach().sum((0, 1)).tolist()
        top = float(h.detach().max()) + self.down(h).detach().sum().item() + h.detach().numpy().max()
        return self.down(h) * top + torch.tensor(numbers).to(x).sum()


@case()
class ClosureOverModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.run = lambda x: self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return self.run(x)


@case()
class WeightsInAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.all = [self.up.weight, self.down.weight]
        self.kept = {"bias": self.up.bias}

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.all[0], self.kept["bias"])), self.all[1])


@case()
class BoundMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.steps = [self.first, self.down.forward]

    def first(self, x):
        return F.gelu(self.up(x))

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


@case()
class HalfDead(Hidden):
    """What nobody reads runs all the same."""

    def forward(self, x):
        h = F.gelu(self.up(x))
        _unused = h + h.new_ones(self.hidden) * torch.arange(self.hidden)
        _also = h @ torch.ones(self.hidden, 2).to(h)
        return self.down(h)


@case()
class SpectralLike(nn.Module):
    """A weight made from another one."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(9, WIDTH, dtype=torch.float64))
        self.g = nn.Parameter(torch.randn(9, 1, dtype=torch.float64))
        self.down = nn.Linear(9, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 9))

    def forward(self, x):
        w = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return self.down(x @ w.t()) + self.down(self.normed(x).relu())


@case()
class NormOverUnits(Hidden):
    def __init__(self):
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(9), nn.RMSNorm(9)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x))) + self.rms(self.up(x)))


@case()
class BareParameters(nn.Module):
    """Everything in the root, no borders at all."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 9, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(9, WIDTH, dtype=torch.float64))

    def forward(self, x):
        return torch.relu(x @ self.a) @ self.b
