"""Tiny models to try a split on: the shapes of real ones, written plainly. Each makes its own inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _ids(vocab: int, batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


class Mlp(nn.Module):
    """Linear layers of the given widths with GELU between: x (batch, widths[0]) -> (batch, widths[-1])."""

    def __init__(self, widths: Sequence[int] = (6, 10, 6), bias: bool = True) -> None:
        super().__init__()
        self.width = widths[0]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if index else x)
        return x

    def inputs(self, batch: int = 3, length: int = 0, seed: int = 1) -> dict[str, Tensor]:
        """What its forward takes; `length` means nothing here."""
        generator = torch.Generator().manual_seed(seed)
        dtype = next(self.parameters()).dtype
        return {"x": torch.randn(batch, self.width, generator=generator, dtype=torch.float64).to(dtype)}


class ConvNet(nn.Module):
    """A small image classifier: plain and grouped convolutions, batch norms, a residual, a linear head."""

    def __init__(self, channels: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(channels)
        self.expand = nn.Conv2d(channels, 2 * channels, 1)
        self.project = nn.Conv2d(2 * channels, channels, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(channels, channels, 1, stride=2, bias=False)
        self.head = nn.Linear(channels, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(pixels)))
        x = F.relu(self.depthwise_norm(self.depthwise(x)))
        x = self.project(F.relu(self.expand(x))) + self.shortcut(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]

    def inputs(self, batch: int = 2, length: int = 8, seed: int = 1) -> dict[str, Tensor]:
        """Images (batch, 3, length, length)."""
        generator = torch.Generator().manual_seed(seed)
        dtype = next(self.parameters()).dtype
        return {"pixels": torch.randn(batch, 3, length, length, generator=generator, dtype=torch.float64).to(dtype)}


class TiedEmbedding(nn.Module):
    """A token embedding, a linear layer and a head tied to the embedding: ids (batch, length) -> logits."""

    def __init__(self, vocab: int = 11, width: int = 6) -> None:
        super().__init__()
        self.vocab = vocab
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))  # type: ignore[no-any-return]

    def inputs(self, batch: int = 2, length: int = 5, seed: int = 1) -> dict[str, Tensor]:
        """Token ids (batch, length)."""
        return {"ids": _ids(self.vocab, batch, length, seed)}


class GptAttention(nn.Module):
    """Causal attention with q, k and v in one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.n_embd = width

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)  # type: ignore[no-any-return]


class GptBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = GptAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A hand-written GPT: fused qkv, learned positions, tied head, a bias everywhere."""

    def __init__(self, vocab: int = 101, width: int = 20, heads: int = 5, layers: int = 2, positions: int = 16) -> None:
        super().__init__()
        self.vocab = vocab
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]

    def inputs(self, batch: int = 2, length: int = 7, seed: int = 1) -> dict[str, Tensor]:
        """Token ids (batch, length)."""
        return {"ids": _ids(self.vocab, batch, length, seed)}


class RmsNorm(nn.Module):
    """Root mean square norm over the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions and, where asked for, norms on each head's q and k."""

    def __init__(self, width: int, heads: int, kv_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.q_norm = RmsNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(self.head_dim) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, qk_norm: bool) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(width)
        self.attention = LlamaAttention(width, heads, kv_heads, qk_norm)
        self.mlp_norm = RmsNorm(width)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A hand-written Llama: grouped queries, rotary positions, gated MLP, no biases."""

    inv_freq: Tensor

    def __init__(
        self,
        vocab: int = 101,
        width: int = 28,
        heads: int = 7,
        kv_heads: int = 1,
        hidden: int = 30,
        layers: int = 2,
        qk_norm: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden, qk_norm) for _ in range(layers))
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        dim = width // heads
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, dim, 2).double() / dim), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).to(self.inv_freq.dtype), self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        x = self.embed(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def inputs(self, batch: int = 2, length: int = 7, seed: int = 1) -> dict[str, Tensor]:
        """Token ids (batch, length)."""
        return {"ids": _ids(self.vocab, batch, length, seed)}
