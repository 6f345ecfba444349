"""Reductions, norms, softmax, pooling, indexing and factories: what mixes a dim, and what makes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from tensor_parallel.planner.effects import Effect, Rule, argument, own_dims, same, same_softly, unknown
from tensor_parallel.planner.index_types import Blocked, Dim, leaf, product, split_product
from tensor_parallel.planner.records import Op, Value


def _axes(op: Op, index: int = 1, name: str = "dim") -> list[int]:
    rank = len(op.inputs()[0].shape)
    wanted = argument(op, index, name)
    if wanted is None or wanted == []:
        return list(range(rank))
    return [int(d) % max(rank, 1) for d in (wanted if isinstance(wanted, Sequence) else [wanted])]


def _kept(x: Value, out: Value, axes: Sequence[int]) -> list[Dim]:
    if len(out.shape) == len(x.shape):
        return [leaf(1) if i in axes else d for i, d in enumerate(own_dims(x))]
    return [d for i, d in enumerate(own_dims(x)) if i not in axes]


def _sum(op: Op) -> Effect:
    x, axes = op.inputs()[0], _axes(op)
    if ".dim_" not in op.name:
        axes = list(range(len(x.shape)))
    op.outputs[0].dims = _kept(x, op.outputs[0], axes)
    return Effect(contracted=[x.dims[i] for i in axes], linear="each")


def _mean(op: Op) -> Effect:
    x = op.inputs()[0]
    axes = _axes(op) if ".dim" in op.name else list(range(len(x.shape)))
    op.outputs[0].dims = _kept(x, op.outputs[0], axes)
    return Effect(blocked=[x.dims[i] for i in axes], linear="each")


def _reduced(op: Op) -> Effect:
    """max, min, any, argmax, var, ...: over some dims, or over all."""
    x = op.inputs()[0]
    axes = _axes(op) if any(tag in op.name for tag in (".dim", ".int", ".correction", "amax", "amin", "arg")) else None
    axes = list(range(len(x.shape))) if axes is None else axes
    for out in op.outputs:
        out.dims = _kept(x, out, axes)
        if len(out.dims) != len(out.shape):
            return unknown(op)
    return Effect(blocked=[x.dims[i] for i in axes])


def _along(op: Op) -> Effect:
    """softmax, cumsum, sort, ...: one dim is mixed and stays."""
    x = op.inputs()[0]
    axis = int(argument(op, 1, "dim", -1)) % max(len(x.shape), 1)
    for out in op.outputs:
        out.dims = [d if n == d.size else leaf(n) for d, n in zip(own_dims(x), out.shape, strict=True)]
    return Effect(blocked=[x.dims[axis]] if x.dims else [])


def _topk(op: Op) -> Effect:
    x = op.inputs()[0]
    axis = int(argument(op, 2 if "topk" in op.name else 1, "dim", -1)) % max(len(x.shape), 1)
    for out in op.outputs:
        out.dims = [leaf(n) if i == axis else own_dims(x)[i] for i, n in enumerate(out.shape)]
    return Effect(blocked=[own_dims(x)[axis]])


def _triangle(op: Op) -> Effect:
    x = op.inputs()[0]
    op.outputs[0].dims = list(own_dims(x))
    return Effect(blocked=x.dims[-2:], linear="each")


def _layer_norm(op: Op) -> Effect:
    x, shape = op.inputs()[0], argument(op, 1, "normalized_shape")
    effect, out = Effect(), op.outputs[0]
    out.dims = list(own_dims(x))
    normalized = x.dims[len(x.shape) - len(shape) :]
    for index in (2, 3):
        affine = argument(op, index, "weight" if index == 2 else "bias")
        if isinstance(affine, Value):
            for own, dim in zip(own_dims(affine), normalized, strict=True):
                same(effect, own, dim)
    effect.blocked += normalized
    for extra in op.outputs[1:]:
        extra.dims = [leaf(1) if n == 1 else d for n, d in zip(extra.shape, x.dims, strict=False)]
    return effect


def _batch_norm(op: Op) -> Effect:
    x, *affine = op.inputs()
    effect, out = Effect(), op.outputs[0]
    out.dims = list(own_dims(x))
    for value in affine:
        if len(value.shape) == 1:
            out.dims[1] = same(effect, out.dims[1], own_dims(value)[0])
    for extra in op.outputs[1:]:
        extra.dims = [out.dims[1] if n == x.shape[1] else leaf(n) for n in extra.shape]
    effect.blocked += [d for i, d in enumerate(x.dims) if i != 1]
    return effect


def _groups(channels: Dim, groups: int) -> tuple[list[Dim], list[Dim]]:
    """Channels as groups and the channels of a group; either may be missing, being 1."""
    if groups == 1:
        return [], [channels]
    group, *inside = split_product(channels, groups)
    return [group], inside


def _group_norm(op: Op) -> Effect:
    x, effect, out = op.inputs()[0], Effect(), op.outputs[0]
    groups = int(argument(op, 6, "group"))
    dims = list(own_dims(x))
    try:
        group, inside = _groups(dims[1], groups)
        effect.blocked += inside
        dims[1] = product([*group, *inside])
    except Blocked:
        effect.blocked.append(dims[1])
    for value in op.inputs()[1:]:
        if len(value.shape) == 1:
            same(effect, dims[1], own_dims(value)[0])
    effect.blocked += dims[2:]
    out.dims = dims
    for extra in op.outputs[1:]:
        extra.dims = [leaf(n) for n in extra.shape]
    return effect


def _pooled(op: Op) -> Effect:
    """Batch and channels stay; the spatial dims (as many as the operator's name says) are mixed."""
    x = op.inputs()[0]
    spatial = 1 if "1d" in op.name else 3 if "3d" in op.name else 2
    for out in op.outputs:
        out.dims = [*own_dims(x)[:-spatial], *(leaf(n) for n in out.shape[-spatial:])]
    return Effect(blocked=x.dims[-spatial:])


def _padded(op: Op) -> Effect:
    x, out = op.inputs()[0], op.outputs[0]
    pad = [int(n) for n in argument(op, 1, "pad" if "constant" in op.name else "padding")]
    # A dim that is padded at one end and cropped at the other keeps its size and moves its units.
    changed = [any(pad[2 * (len(x.shape) - 1 - i) :][:2]) for i in range(len(x.shape))]
    out.dims = [leaf(n) if c else d for n, c, d in zip(out.shape, changed, own_dims(x), strict=True)]
    return Effect(blocked=[d for c, d in zip(changed, x.dims, strict=True) if c])


def _indexed(op: Op) -> Effect:
    """x[i, :, j]: indexed dims are mixed and give way to the indices' common shape."""
    x, indices = argument(op, 0, "self"), argument(op, 1, "indices")
    used = [i for i, index in enumerate(indices) if isinstance(index, Value)]
    if not used or any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return unknown(op)
    shape = op.outputs[0].shape
    rank = max(len(indices[i].shape) for i in used)
    adjacent = used == list(range(used[0], used[-1] + 1))
    at = used[0] if adjacent else 0
    kept = [d for i, d in enumerate(own_dims(x)) if i not in used]
    op.outputs[0].dims = [*kept[:at], *(leaf(n) for n in shape[at : at + rank]), *kept[at:]]
    return Effect(blocked=[x.dims[i] for i in used] + [d for i in used for d in own_dims(indices[i])], linear="none")


def _gathered(op: Op) -> Effect:
    x, index = argument(op, 0, "self"), argument(op, 2, "index")
    axis, effect = int(argument(op, 1, "dim")) % len(x.shape), Effect()
    if len(index.shape) != len(x.shape):
        dims = list(own_dims(x))
        effect.blocked.append(dims[axis])
        dims[axis] = leaf(op.outputs[0].shape[axis])
        op.outputs[0].dims = dims
        return effect
    dims = []
    for i, (d, n, m) in enumerate(zip(own_dims(x), x.shape, index.shape, strict=True)):
        if i == axis or n != m:
            effect.blocked.append(d)
            dims.append(own_dims(index)[i])
        else:
            same_softly(effect, index, i, d)
            dims.append(d)
    op.outputs[0].dims = dims
    return effect


def _made(op: Op) -> Effect:
    """Factories: sizes alone decide."""
    for out in op.outputs:
        out.dims = [leaf(n) for n in out.shape]
    return Effect(fresh=True)


def _counted(op: Op) -> Effect:
    """arange, rand and their like: a local size would give other values."""
    for out in op.outputs:
        out.dims = [leaf(n) for n in out.shape]
    return Effect()


def _read(op: Op) -> Effect:
    """A value that goes to Python."""
    return Effect(all_blocked=True)


def _length(op: Op) -> Effect:
    """len(x), which Python turns into a plain number."""
    return Effect(blocked=own_dims(op.inputs()[0])[:1])


def _buffer(op: Op) -> Effect:
    """What a buffer is after the forward lies like the buffer itself."""
    old, new = op.inputs()
    effect = Effect()
    if old.shape != new.shape:
        return Effect(all_blocked=True)
    for a, b in zip(own_dims(old), own_dims(new), strict=True):
        same(effect, a, b)
    return effect


def elements(value: Value) -> int:
    return prod(value.shape)


def _names(*names: str) -> list[str]:
    return [f"aten.{name}" for name in names]


def _table(rule: Any, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(_names(*names), rule)


RULES: Mapping[str, Rule] = {
    **_table(_sum, "sum"),
    **_table(_mean, "mean"),
    **_table(_reduced, "amax", "amin", "argmax", "argmin", "max", "min", "any", "all", "var", "std", "prod"),
    **_table(_along, "_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort"),
    **_table(_topk, "topk"),
    **_table(_triangle, "triu", "tril"),
    **dict.fromkeys(("read", "kept in an attribute"), _read),
    "kept in a buffer": _buffer,
    "len": _length,
    "aten.native_layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "aten._fused_rms_norm": _layer_norm,
    **_table(
        _batch_norm,
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "cudnn_batch_norm",
        "batch_norm_with_update",
        "_batch_norm_with_update",
        "_batch_norm_no_update",
    ),
    **_table(_group_norm, "native_group_norm"),
    **_table(
        _pooled,
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_max_pool2d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
    ),
    **_table(_padded, "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d"),
    **_table(_indexed, "index"),
    **_table(_gathered, "gather", "index_select"),
    **_table(
        _made, "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor"
    ),
    **_table(_counted, "arange", "linspace", "rand", "randn", "randint", "randperm", "eye"),
    **_table(_read, "_local_scalar_dense", "equal", "is_nonzero", "item"),
}
