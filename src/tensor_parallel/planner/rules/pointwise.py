"""Element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Mapping

from tensor_parallel.planner.effects import Effect, Linear, Rule, argument, own_dims, same, same_softly
from tensor_parallel.planner.index_types import Dim, leaf
from tensor_parallel.planner.records import Op, Value


def broadcast(op: Op, effect: Effect, operands: list[Value], out: Value) -> None:
    """Dims of `out` from operands aligned at the right."""
    dims: list[Dim] = []
    rank = len(out.shape)
    for i, size in enumerate(out.shape):
        aligned = [(v, i - rank + len(v.shape)) for v in operands if i - rank + len(v.shape) >= 0]
        aligned = [(v, j) for v, j in aligned if v.shape[j] == size]
        firm = [own_dims(v)[j] for v, j in aligned if not v.constant or v.parameter is not None]
        if firm:
            dims.append(same(effect, *firm))
            for v, j in aligned:
                if v.constant and v.parameter is None:
                    same_softly(effect, v, j, dims[-1])
        else:
            dims.append(same(effect, *(own_dims(v)[j] for v, j in aligned)) if aligned else leaf(size))
    out.dims = dims


def _pointwise(op: Op, linear: Linear) -> Effect:
    effect = Effect(linear=linear)
    for out in op.outputs:
        broadcast(op, effect, op.inputs(), out)
    return effect


def pointwise(op: Op) -> Effect:
    return _pointwise(op, "none")


def _joint(op: Op) -> Effect:
    """Sums: partial where all terms are; a number added to a partial sum would be added once a rank."""
    return _pointwise(op, "joint" if len(op.inputs()) > 1 else "none")


def _each(op: Op) -> Effect:
    return _pointwise(op, "each")


def _first(op: Op) -> Effect:
    return _pointwise(op, "first")


def _masked_fill(op: Op) -> Effect:
    fill = argument(op, 2, "value")
    return _pointwise(op, "first" if not isinstance(fill, Value) and fill == 0 else "none")


def _like(op: Op) -> Effect:
    """Made from the shape alone."""
    op.outputs[0].dims = list(own_dims(op.inputs()[0]))
    return Effect(shape_only=True)


RULES: Mapping[str, Rule] = {
    "pointwise": pointwise,
    **dict.fromkeys(("aten.add", "aten.sub"), _joint),
    **dict.fromkeys(("aten.mul", "aten.neg"), _each),
    "aten.div.Tensor": _first,
    "aten.div.Scalar": _first,
    "aten.masked_fill": _masked_fill,
    **dict.fromkeys(("dropout", "aten.native_dropout"), pointwise),
    **dict.fromkeys(("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like"), _like),
}
