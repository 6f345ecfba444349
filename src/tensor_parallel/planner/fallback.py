"""A plan without a trace: each linear, embedding and convolution layer by itself, its output gathered."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from tensor_parallel.layout import REPLICATE, DimLayout, Part, Segment, TensorLayout, shard
from tensor_parallel.plan import Boundary, Factor, ModulePlan, Plan, TensorPlan, Traffic
from tensor_parallel.planner.trace import OPAQUE, parameter_names

WHOLE_REASON = "there are no example_inputs to trace, and it belongs to no plain linear, embedding or convolution layer"

_LAYERS: dict[type[nn.Module], tuple[int, int, str]] = {
    nn.Linear: (0, -1, "unit"),
    nn.Embedding: (1, -1, "unit"),
    nn.EmbeddingBag: (1, -1, "unit"),
    nn.Conv1d: (0, -2, "channel"),
    nn.Conv2d: (0, -3, "channel"),
    nn.Conv3d: (0, -4, "channel"),
    nn.ConvTranspose1d: (1, -2, "channel"),
    nn.ConvTranspose2d: (1, -3, "channel"),
    nn.ConvTranspose3d: (1, -4, "channel"),
}
"""Layer class -> (dim of the weight that makes outputs, dim of the output, what a unit is)."""

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def _splittable(module: nn.Module) -> bool:
    if type(module) not in _LAYERS or getattr(module, "groups", 1) != 1:
        return False
    if isinstance(module, _TABLES) and (module.max_norm is not None or module.sparse):
        return False
    return module.__dict__.get("forward") is None and bool(isinstance(module.weight, torch.Tensor))


def layerwise_plan(module: nn.Module, world_size: int) -> Plan:
    """Cut every plain layer's outputs over the ranks and gather them: exact for any forward that calls its layers, at
    one collective a layer. Layers that share a weight, and layers inside fused modules, stay whole."""
    names = parameter_names(module)
    keys = {id(tensor): key for key, (tensor, _, _) in names.items()}
    shared = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    inside = {id(child) for m in module.modules() if isinstance(m, OPAQUE) for child in m.modules()}
    factors, layouts, modules, traffic = {}, {}, {}, []
    for name, layer in module.named_modules():
        if id(layer) in inside or not _splittable(layer):
            continue
        own = {k: p for k, p in layer._parameters.items() if p is not None}
        dim, out_dim, unit = _LAYERS[type(layer)]
        units = own["weight"].shape[dim]
        if units < 2 or any(shared[id(p)] > 1 for p in own.values()):
            continue
        factor = Factor(f"{name}.{unit}" if name else unit, units, None, unit)
        cut = DimLayout((Segment((Part(units, factor.name),)),))
        factors[factor.name] = factor
        for key, parameter in own.items():
            dims = [DimLayout.whole(n) for n in parameter.shape]
            dims[dim if key == "weight" else 0] = cut
            layouts[keys[id(parameter)]] = TensorLayout(tuple(dims))
        whole_input = () if isinstance(layer, _TABLES) else (Boundary("input", gathers_gradient=True),)
        modules[name] = ModulePlan(whole_input, (Boundary("", shard(out_dim, cut), REPLICATE),))
        traffic.append(Traffic(name, "", "all_gather", 1, 0))
    tensors = {}
    for key, (tensor, all_names, is_buffer) in names.items():
        nbytes = tensor.numel() * tensor.element_size()
        whole = TensorLayout(tuple(DimLayout.whole(n) for n in tensor.shape))
        layout = layouts.get(key, whole)
        reason = "" if key in layouts else WHOLE_REASON
        tensors[key] = TensorPlan(all_names, layout, nbytes, is_buffer, gathered=key in layouts, reason=reason)
    return Plan(factors, tensors, modules, tuple(traffic), world_size=world_size)
