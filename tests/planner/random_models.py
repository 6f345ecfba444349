"""Random programs of torch operators over random modules: what nobody thought of."""

import random

import torch
import torch.nn.functional as F
from torch import nn

SIZES = (4, 6, 8, 12)


class Block(nn.Module):
    """A random straight-line program over its own parameters. (b, t, width) -> (b, t, width)."""

    def __init__(self, draw, width, steps):  # noqa: C901
        super().__init__()
        self.width, self.heads = width, draw.choice([2, 3, 4])
        self.steps = []
        self.layers, self.weights = nn.ModuleDict(), nn.ParameterDict()
        shapes = [width]
        for step in range(steps):
            name, last = draw.choice(STEPS), shapes[-1]
            other = draw.choice([i for i, s in enumerate(shapes) if s == last])
            out = last
            key = f"s{step}"
            if name in ("linear", "project"):
                out = draw.choice(SIZES)
                self.layers[key] = nn.Linear(last, out, bias=draw.random() < 0.5)
            elif name in ("matmul", "bare_linear"):
                out = draw.choice(SIZES)
                self.weights[key] = nn.Parameter(torch.randn(last, out, dtype=torch.float64) / last**0.5)
            elif name in ("scale", "shift"):
                self.weights[key] = nn.Parameter(torch.randn(last, dtype=torch.float64))
            elif name == "norm":
                self.layers[key] = draw.choice([nn.LayerNorm, nn.RMSNorm])(last)
            elif name == "again":
                known = [k for k, m in self.layers.items() if isinstance(m, nn.Linear) and m.in_features == last]
                if not known:
                    continue
                key = draw.choice(known)
                out = self.layers[key].out_features
            elif name == "transposed_again":
                known = [k for k, m in self.layers.items() if isinstance(m, nn.Linear) and m.out_features == last]
                if not known:
                    continue
                key = draw.choice(known)
                out = self.layers[key].in_features
            elif name == "cat":
                out = 2 * last
                if out > 24:
                    continue
            elif name == "chunk":
                if last % 2:
                    continue
                out = last // 2
                if out < 2:
                    continue
            elif name == "attend":
                if last % self.heads:
                    continue
                for part in "qkv":
                    self.layers[key + part] = nn.Linear(last, last)
            shapes.append(out)
            self.steps.append((name, key, other))
        self.out = nn.Linear(shapes[-1], width, bias=draw.random() < 0.7)
        self.residual = draw.random() < 0.5

    def forward(self, x):
        values = [x]
        for name, key, other in self.steps:
            values.append(getattr(self, "_" + name)(values[-1], key, values[other]))
        y = self.out(values[-1])
        return x + y if self.residual else y

    def _linear(self, x, key, _):
        return self.layers[key](x)

    _project = _again = _norm = _linear

    def _matmul(self, x, key, _):
        return x @ self.weights[key]

    def _bare_linear(self, x, key, _):
        return F.linear(x, self.weights[key].t())

    def _transposed_again(self, x, key, _):
        return F.linear(x, self.layers[key].weight.t())

    def _scale(self, x, key, _):
        return x * self.weights[key]

    def _shift(self, x, key, _):
        return x + self.weights[key]

    def _relu(self, x, key, _):
        return F.relu(x)

    def _tanh(self, x, key, _):
        return torch.tanh(x)

    def _inplace(self, x, key, _):
        return (x * 1).mul_(0.5).add_(1)

    def _softmax(self, x, key, _):
        return x.softmax(-1) * x.shape[1]

    def _add(self, x, key, other):
        return x + other

    def _sub(self, x, key, other):
        return x - 0.5 * other

    def _mul(self, x, key, other):
        return x * torch.sigmoid(other)

    def _cat(self, x, key, other):
        return torch.cat([x, other], -1)

    def _chunk(self, x, key, _):
        a, b = x.chunk(2, -1)
        return a * torch.sigmoid(b)

    def _flip(self, x, key, _):
        return x.flip(-1)

    def _rows(self, x, key, _):
        return x.flip(1) + x.cumsum(1) / 10

    def _centre(self, x, key, _):
        return x - x.mean(-1, keepdim=True)

    def _total(self, x, key, _):
        return x + x.sum(-1, keepdim=True) / 10

    def _pool(self, x, key, _):
        return x + x.mean(1, keepdim=True)

    def _mask(self, x, key, other):
        return x.masked_fill(other > 0, 0.0)

    def _fill(self, x, key, other):
        return x.masked_fill(other > 0, 0.5)

    def _detach(self, x, key, _):
        return x - 0.5 * x.detach()

    def _gram(self, x, key, other):
        return (x @ other.transpose(1, 2)).softmax(-1) @ x

    def _channels(self, x, key, other):
        return x @ (other.transpose(1, 2) @ x).tanh() / 10

    def _shuffle(self, x, key, _):
        return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if x.shape[-1] % 2 == 0 else x

    def _pad(self, x, key, _):
        return F.pad(x, (1, -1)) + F.pad(x, (0, 0, 1, -1))

    def _stack(self, x, key, other):
        return torch.stack([x, other], -1).sum(-1)

    def _attend(self, x, key, _):
        b, t, c = x.shape
        q, k, v = (self.layers[key + p](x).view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in "qkv")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)


STEPS = sorted(name[1:] for name, item in vars(Block).items() if name[0] == "_" and name[1] != "_" and callable(item))
STEPS += ["linear", "project", "linear", "matmul", "relu", "add", "attend"]


class Program(nn.Module):
    """Blocks in a row, some called twice."""

    def __init__(self, seed, width=12):
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        blocks = [Block(draw, width, draw.randint(2, 6)) for _ in range(draw.randint(1, 3))]
        self.blocks = nn.ModuleList(blocks)
        self.order = list(range(len(blocks))) + ([draw.randrange(len(blocks))] if draw.random() < 0.4 else [])
        self.double()

    def forward(self, x):
        for index in self.order:
            x = self.blocks[index](x)
        return x
