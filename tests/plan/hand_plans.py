"""Plans made by hand, small enough to be checked by eye."""

import torch
from torch import nn

from tensor_parallel.layout import DimLayout, Part, Placement, Segment, TensorLayout, partial, shard
from tensor_parallel.plan import Boundary, Factor, ModulePlan, Plan, TensorPlan, Traffic


def cut(units, factor, inner=1):
    parts = (Part(units, factor),) if inner == 1 else (Part(units, factor), Part(inner))
    return DimLayout((Segment(parts),))


def whole(*sizes):
    return TensorLayout(tuple(DimLayout.whole(size) for size in sizes))


class Mlp(nn.Module):
    def __init__(self, width=6, hidden=10, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)}) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return x


def mlp_plan(width=6, hidden=10, layers=2):
    """Column and row split of every layer, the row bias on rank 0."""
    factors, tensors, modules, traffic = {}, {}, {}, []
    for i in range(layers):
        f, up, down = f"layers.{i}.hidden", f"layers.{i}.up", f"layers.{i}.down"
        factors[f] = Factor(f, hidden, None, "hidden unit")
        h, w = cut(hidden, f), DimLayout.whole(width)
        for name, layout, extra in (
            (f"{up}.weight", TensorLayout((h, w)), {}),
            (f"{up}.bias", TensorLayout((h,)), {}),
            (f"{down}.weight", TensorLayout((w, h)), {}),
            (f"{down}.bias", TensorLayout((w,)), {"rank0_only": True, "reason": "added before a sum over the ranks"}),
        ):
            nbytes = 4
            for size in layout.shape:
                nbytes *= size
            tensors[name] = TensorPlan((name,), layout, nbytes, **extra)
        lies = shard(-1, h)
        modules[up] = ModulePlan(outputs=(Boundary("", lies, lies),))
        modules[down] = ModulePlan(
            inputs=(Boundary("input", lies, lies),), outputs=(Boundary("", partial(f), Placement()),)
        )
        traffic.append(Traffic(down, "", "all_reduce", 1, 2 * 3 * width * 4))
    return Plan(factors, tensors, modules, tuple(traffic), ("forward(x)",))
