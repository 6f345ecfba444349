"""Products that sum over a dim, lookups and convolutions."""

from __future__ import annotations

from collections.abc import Mapping

from tensor_parallel.planner.effects import Effect, Rule, argument, own_dims, same, same_softly
from tensor_parallel.planner.index_types import Blocked, Dim, leaf, split_product
from tensor_parallel.planner.records import Op, Value
from tensor_parallel.planner.rules.pointwise import broadcast


def _contract(effect: Effect, a: Dim, b: Dim) -> None:
    effect.contracted.append(same(effect, a, b))


def _linear(op: Op) -> Effect:
    x, weight = argument(op, 0, "input"), argument(op, 1, "weight")
    bias = argument(op, 2, "bias")
    effect = Effect(linear="each")
    _contract(effect, own_dims(x)[-1], own_dims(weight)[-1])
    out_dims = own_dims(weight)[:-1]
    op.outputs[0].dims = [*own_dims(x)[:-1], *out_dims]
    if bias is not None:
        same_softly(effect, bias, -1, op.outputs[0].dims[-1])
        effect.bias.append(bias)
    return effect


def _matmul(op: Op) -> Effect:
    a, b = op.inputs()[:2]
    effect, out = Effect(linear="each"), op.outputs[0]
    if len(a.shape) == 1 or len(b.shape) == 1:
        _contract(effect, own_dims(a)[-1], own_dims(b)[-2 if len(b.shape) > 1 else 0])
        out.dims = [*own_dims(a)[:-1], *([*b.dims[:-2], b.dims[-1]] if len(b.shape) > 1 else [])]
        return effect
    _contract(effect, own_dims(a)[-1], own_dims(b)[-2])
    batch: list[Dim] = []
    for i, size in enumerate(out.shape[:-2]):
        ends = [(v, i - len(out.shape) + len(v.shape)) for v in (a, b)]
        present = [own_dims(v)[j] for v, j in ends if j >= 0 and v.shape[j] == size]
        batch.append(same(effect, *present) if present else leaf(size))
    out.dims = [*batch, a.dims[-2], b.dims[-1]]
    return effect


def _addmm(op: Op) -> Effect:
    bias, a, b = op.inputs()[:3]
    effect, out = Effect(linear="each", bias=[bias]), op.outputs[0]
    _contract(effect, own_dims(a)[-1], own_dims(b)[-2])
    batch = [same(effect, x, y) for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True)]
    out.dims = [*batch, a.dims[-2], b.dims[-1]]
    for i in range(1, len(bias.shape) + 1):
        if bias.shape[-i] == out.shape[-i]:
            same_softly(effect, bias, -i, out.dims[-i])
    return effect


def _embedding(op: Op) -> Effect:
    weight, ids = argument(op, 0, "weight"), argument(op, 1, "indices")
    op.outputs[0].dims = [*own_dims(ids), *own_dims(weight)[1:]]
    return Effect(lookup=(weight, ids, weight.dims[0]), linear="none")


def _convolution(op: Op) -> Effect:
    x, weight, bias, *_ = op.args
    transposed, groups = bool(argument(op, 6, "transposed")), int(argument(op, 8, "groups", 1))
    out, effect = op.outputs[0], Effect(linear="each")
    w_in, w_out = (own_dims(weight)[i] for i in ((0, 1) if transposed else (1, 0)))
    channels = own_dims(x)[1]
    if groups == 1:
        _contract(effect, channels, w_in)
        out_channels = w_out
    else:
        out_channels = _grouped(effect, channels, w_in, w_out, groups, transposed)
    out.dims = [x.dims[0], out_channels, *(leaf(n) for n in out.shape[2:])]
    effect.blocked += [*x.dims[2:], *weight.dims[2:]]
    if bias is not None:
        same_softly(effect, bias, 0, out_channels)
        effect.bias.append(bias)
    return effect


def _grouped(effect: Effect, channels: Dim, w_in: Dim, w_out: Dim, groups: int, transposed: bool) -> Dim:
    """Channels are groups x channels of a group on both sides; only whole groups stay local."""
    from tensor_parallel.planner.index_types import product

    try:
        group, *inside = split_product(channels, groups)
        if transposed:
            group_w, *rest = split_product(w_in, groups)
            group = same(effect, group, group_w)
            contracted, out_inside = [*inside, *rest], [w_out]
        else:
            group_w, *out_inside = split_product(w_out, groups)
            group = same(effect, group, group_w)
            contracted = [*inside, w_in]
    except Blocked:
        effect.blocked += [channels, w_in, w_out]
        return leaf(groups * (w_out.size if transposed else w_out.size // groups))
    # Cutting inside a group would need a cut of every group; not worth a rule.
    effect.blocked += [*contracted, *out_inside]
    return product([group, *out_inside])


def _attention(op: Op) -> Effect:
    """Batch and heads stay, keys and head size are mixed; fewer key heads than query heads are groups (GQA)."""
    q, k, v = (argument(op, i, n) for i, n in enumerate(("query", "key", "value")))
    effect, out = Effect(linear="none"), op.outputs[0]
    dims = list(own_dims(q))
    for i in range(len(dims) - 2):
        for other in (k, v):
            dims[i] = _heads(effect, dims[i], own_dims(other)[i])
    effect.blocked += [q.dims[-1], k.dims[-1], k.dims[-2], v.dims[-2]]
    same(effect, q.dims[-1], k.dims[-1])
    same(effect, k.dims[-2], v.dims[-2])
    out.dims = [*dims[:-1], v.dims[-1]]
    for extra in op.outputs[1:]:
        extra.dims = [leaf(n) for n in extra.shape]
    _mask(op, effect, q, k)
    return effect


def _heads(effect: Effect, queries: Dim, keys: Dim) -> Dim:
    from tensor_parallel.planner.index_types import product

    if keys.size == queries.size:
        return same(effect, queries, keys)
    if keys.size == 1 or queries.size == 1:
        return queries if keys.size == 1 else keys
    if queries.size % keys.size:
        return queries
    return same(effect, queries, product([keys, leaf(queries.size // keys.size)]))


def _mask(op: Op, effect: Effect, q: Value, k: Value) -> None:
    mask = op.kwargs.get("attn_mask", op.args[3] if len(op.args) > 3 else None)
    if not isinstance(mask, Value):
        return
    scores = [*q.dims[:-1], k.dims[-2]]
    for i in range(1, len(mask.shape) + 1):
        if i <= len(scores) and mask.shape[-i] == scores[-i].size:
            same_softly(effect, mask, -i, scores[-i])


def bilinear_broadcast(op: Op, effect: Effect) -> None:
    broadcast(op, effect, op.inputs(), op.outputs[0])


RULES: Mapping[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot"), _matmul),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm"), _addmm),
    "aten.embedding": _embedding,
    "aten.convolution": _convolution,
    **dict.fromkeys(
        (
            "scaled_dot_product_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_efficient_attention",
        ),
        _attention,
    ),
}
