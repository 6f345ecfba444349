"""Views, copies, and what cuts or joins along a dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensor_parallel.planner.effects import Effect, Rule, argument, own_dims, same
from tensor_parallel.planner.index_types import Blocked, Dim, concatenation, cut_sum, leaf, product, reshape
from tensor_parallel.planner.records import Op, Value


def _x(op: Op) -> Value:
    return op.inputs()[0]


def identity(op: Op) -> Effect:
    op.outputs[0].dims = list(own_dims(_x(op)))
    return Effect(linear="each")


def _cast(op: Op) -> Effect:
    """Linear but for what rounds: to integers and booleans."""
    op.outputs[0].dims = list(own_dims(_x(op)))
    old, new = _x(op).dtype, op.outputs[0].dtype
    return Effect(linear="each" if new == old or new.is_floating_point or new.is_complex else "none")


def _reinterpreted(op: Op) -> Effect:
    """The same bits as another dtype."""
    x, out = _x(op), op.outputs[0]
    if x.shape == out.shape:
        out.dims = list(own_dims(x))
        return Effect()
    out.dims = [*own_dims(x)[:-1], leaf(out.shape[-1])]
    return Effect(blocked=[x.dims[-1]])


def _reshaped(op: Op) -> Effect:
    x, out = _x(op), op.outputs[0]
    try:
        out.dims = reshape(own_dims(x), out.shape)
    except Blocked:
        out.dims = [leaf(n) for n in out.shape]
        return Effect(blocked=list(x.dims), linear="each")
    return Effect(linear="each")


def _permuted(op: Op) -> Effect:
    x = _x(op)
    order = [int(d) % len(x.shape) for d in argument(op, 1, "dims")]
    op.outputs[0].dims = [own_dims(x)[d] for d in order]
    return Effect(linear="each")


def _transposed(op: Op) -> Effect:
    x, dims = _x(op), list(own_dims(_x(op)))
    if "transpose" in op.name:
        a, b = (int(argument(op, i, n)) % len(dims) for i, n in ((1, "dim0"), (2, "dim1")))
        dims[a], dims[b] = dims[b], dims[a]
    else:
        dims = dims[::-1]
    del x
    op.outputs[0].dims = dims
    return Effect(linear="each")


def _unsqueezed(op: Op) -> Effect:
    dims = list(own_dims(_x(op)))
    at = int(argument(op, 1, "dim")) % (len(dims) + 1)
    dims.insert(at, leaf(1))
    op.outputs[0].dims = dims
    return Effect(linear="each")


def _squeezed(op: Op) -> Effect:
    x = _x(op)
    dims, wanted = own_dims(x), argument(op, 1, "dim")
    if wanted is None:
        chosen = set(range(len(dims)))
    else:
        chosen = {int(d) % max(len(dims), 1) for d in (wanted if isinstance(wanted, (list, tuple)) else [wanted])}
    op.outputs[0].dims = [d for i, d in enumerate(dims) if not (i in chosen and x.shape[i] == 1)]
    # A dim of one local unit would vanish too.
    return Effect(blocked=[d for i, d in enumerate(dims) if i in chosen and x.shape[i] != 1], linear="each")


def _expanded(op: Op) -> Effect:
    x, out = _x(op), op.outputs[0]
    dims, new = own_dims(x), len(out.shape) - len(x.shape)
    out.dims = [dims[i - new] if i >= new and x.shape[i - new] == n else leaf(n) for i, n in enumerate(out.shape)]
    return Effect(linear="each", fresh=True)


def _repeated(op: Op) -> Effect:
    x, out = _x(op), op.outputs[0]
    new = len(out.shape) - len(x.shape)
    dims = own_dims(x)
    out.dims = [
        leaf(n)
        if i < new
        else dims[i - new]
        if x.shape[i - new] == n
        else product([leaf(n // x.shape[i - new]), dims[i - new]])
        for i, n in enumerate(out.shape)
    ]
    return Effect(linear="each", fresh=True)


def _dim(op: Op, index: int = 1) -> int:
    return int(argument(op, index, "dim", 0)) % max(len(_x(op).shape), 1)


def _sliced(op: Op) -> Effect:
    x, out, d = _x(op), op.outputs[0], _dim(op)
    dims, size, step = list(own_dims(x)), x.shape[d], int(argument(op, 4, "step", 1))
    start = argument(op, 2, "start")
    start = min(max(int(start or 0) + (size if int(start or 0) < 0 else 0), 0), size)
    effect = Effect(linear="each")
    if out.shape[d] == size:
        out.dims = dims
        return effect
    try:
        if step == 1:
            _, rest = cut_sum(dims[d], start)
            dims[d], _ = cut_sum(rest, out.shape[d])
        elif size % step == 0 and start < step and out.shape[d] == size // step:
            dims[d], steps = reshape([dims[d]], [size // step, step])
            effect.blocked.append(steps)
        else:
            raise Blocked("a strided slice")
    except Blocked:
        effect.blocked.append(x.dims[d])
        dims[d] = leaf(out.shape[d])
    out.dims = dims
    return effect


def _selected(op: Op) -> Effect:
    d, dims = _dim(op), own_dims(_x(op))
    op.outputs[0].dims = [dim for i, dim in enumerate(dims) if i != d]
    return Effect(blocked=[dims[d]], linear="each")


def _split(op: Op) -> Effect:
    x, d = _x(op), _dim(op, 2)
    effect = Effect(linear="each")
    rest: Dim = own_dims(x)[d]
    for out in op.outputs:
        out.dims = list(x.dims)
        try:
            out.dims[d], rest = cut_sum(rest, out.shape[d])
        except Blocked:
            effect.blocked.append(x.dims[d])
            out.dims[d], rest = leaf(out.shape[d]), leaf(rest.size - out.shape[d])
    return effect


def _unbound(op: Op) -> Effect:
    d, dims = _dim(op), own_dims(_x(op))
    for out in op.outputs:
        out.dims = [dim for i, dim in enumerate(dims) if i != d]
    return Effect(blocked=[dims[d]], linear="each")


def _concatenated(op: Op) -> Effect:
    parts = [v for v in argument(op, 0, "tensors") if v.shape != (0,)]
    out, effect = op.outputs[0], Effect(linear="joint")
    d = int(argument(op, 1, "dim", 0)) % len(out.shape)
    out.dims = list(own_dims(parts[0]))
    for i in range(len(out.shape)):
        if i != d:
            out.dims[i] = same(effect, *(own_dims(p)[i] for p in parts))
    out.dims[d] = concatenation([own_dims(p)[d] for p in parts])
    return effect


def _stacked(op: Op) -> Effect:
    parts, out, effect = list(argument(op, 0, "tensors")), op.outputs[0], Effect(linear="joint")
    d = int(argument(op, 1, "dim", 0)) % len(out.shape)
    dims = [same(effect, *(own_dims(p)[i] for p in parts)) for i in range(len(parts[0].shape))]
    dims.insert(d, leaf(len(parts)))
    out.dims = dims
    return effect


def _as_complex(op: Op) -> Effect:
    op.outputs[0].dims = own_dims(_x(op))[:-1]
    return Effect(blocked=[_x(op).dims[-1]], linear="each")


def _as_real(op: Op) -> Effect:
    op.outputs[0].dims = [*own_dims(_x(op)), leaf(2)]
    return Effect(linear="each")


def _flipped(op: Op) -> Effect:
    x: Any = _x(op)
    op.outputs[0].dims = list(own_dims(x))
    moved = argument(op, 1, "dims") if "flip" in op.name else argument(op, 2, "dims") or range(len(x.shape))
    return Effect(blocked=[x.dims[int(d)] for d in moved], linear="each")


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("aten.alias", "aten.clone", "aten.detach", "aten.lift_fresh", "aten.contiguous"), identity),
    "aten._to_copy": _cast,
    "aten.view.dtype": _reinterpreted,
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias"), _reshaped),
    "aten.permute": _permuted,
    **dict.fromkeys(("aten.transpose", "aten.t"), _transposed),
    "aten.unsqueeze": _unsqueezed,
    "aten.squeeze": _squeezed,
    "aten.expand": _expanded,
    "aten.repeat": _repeated,
    "aten.slice": _sliced,
    "aten.select": _selected,
    **dict.fromkeys(("aten.split", "aten.split_with_sizes"), _split),
    "aten.unbind": _unbound,
    "aten.cat": _concatenated,
    "aten.stack": _stacked,
    "aten.view_as_complex": _as_complex,
    "aten.view_as_real": _as_real,
    **dict.fromkeys(("aten.flip", "aten.roll"), _flipped),
}
