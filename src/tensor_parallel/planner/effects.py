"""What an operator does to the leaves of its dims, and the registry of the rules that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from tensor_parallel.planner.index_types import Blocked, Dim, leaf, shorten, unify
from tensor_parallel.planner.records import Op, Value

Linear = Literal["none", "each", "joint", "first"]


@dataclass(slots=True)
class Effect:
    """How one operator treats tensors that are cut along a leaf, or partial sums.

    blocked: dims whose leaves it mixes: those must be whole here.  all_blocked: every leaf of every input is mixed.
    contracted: dims that it sums over: cut, the output is a partial sum.
    linear: which inputs may be partial sums: "each" one of them, the others whole; "joint": all together (sums,
        concatenations); "first": the first only.
    bias: inputs that are added to a contraction.
    lookup: (weight, ids, rows) of an embedding.
    sliced: (value, dim, as): an input that is no parameter's doing and must be sliced where `as` is cut.
    fresh: dims that no input has are made here from sizes, cut or whole as they are needed.
    shape_only: the values of the inputs do not matter.
    """

    blocked: list[Dim] = field(default_factory=list)
    all_blocked: bool = False
    contracted: list[Dim] = field(default_factory=list)
    linear: Linear = "none"
    bias: list[Value] = field(default_factory=list)
    lookup: tuple[Value, Value, Dim] | None = None
    sliced: list[tuple[Value, int, Dim]] = field(default_factory=list)
    fresh: bool = False
    shape_only: bool = False


Rule = Callable[[Op], Effect]
"""Gives the outputs of an operator their dims, unifies what must be one, and returns the effect."""


@dataclass(frozen=True)
class Rules:
    """Rules by operator: "aten.mm.default", all overloads of "aten.mm", or an own name ("linear"). Immutable: a
    caller's own rules make a new registry."""

    by_name: Mapping[str, Rule]

    def with_rule(self, name: str, rule: Rule) -> Rules:
        """These rules and one more, which wins over one of the same name."""
        return Rules(MappingProxyType({**self.by_name, name: rule}))

    def find(self, op: Op) -> Rule | None:
        name = op.name
        base = name.rsplit(".", 1)[0]
        found = self.by_name.get(name) or self.by_name.get(base)
        if found is None and op.overload is not None:
            if base.endswith("_") and not base.endswith("__"):
                found = self.by_name.get(base[:-1])
            if found is None and torch.Tag.pointwise in op.overload.tags:
                found = self.by_name["pointwise"]
        return found


def infer(ops: Sequence[Op], rules: Rules) -> list[Effect]:
    """Give every value its dims, in the order of the trace, and return the effect of each operator."""
    effects = []
    for op in ops:
        for value in op.inputs():
            own_dims(value)
        rule = rules.find(op)
        effects.append(unknown(op) if rule is None else rule(op))
        for output in op.outputs:
            if len(output.dims) != len(output.shape):
                effects[-1] = unknown(op)
    for value in dict.fromkeys(v for op in ops for v in (*op.inputs(), *op.outputs)):
        value.dims = [shorten(dim) for dim in value.dims]
    return effects


def own_dims(value: Value) -> list[Dim]:
    """The value's dims; a value that no operator made gets leaves."""
    if len(value.dims) != len(value.shape):
        value.dims = [leaf(size) for size in value.shape]
    return value.dims


def unknown(op: Op) -> Effect:
    """No rule: nothing may be cut here."""
    for output in op.outputs:
        output.dims = [leaf(size) for size in output.shape]
    return Effect(all_blocked=True)


def same(effect: Effect, *dims: Dim) -> Dim:
    """Unify dims of one size; where they do not fit, their leaves are blocked here."""
    first = dims[0]
    for other in dims[1:]:
        try:
            first = unify(first, other)
        except Blocked:
            effect.blocked += [first, other]
    return first


def same_softly(effect: Effect, value: Value, index: int, dim: Dim) -> None:
    """Let a constant's dim follow `dim` where it still has no structure; else note that it must be sliced where that is
    cut. (A mask's or a slope table's own structure must not refine the model's leaves.)"""
    if value.shape[index] == 1:
        return
    own = own_dims(value)[index]
    if not value.constant or value.parameter is not None:
        same(effect, own, dim)
    else:
        effect.sliced.append((value, index, dim))


def argument(op: Op, index: int, name: str, default: Any = None) -> Any:
    return op.args[index] if index < len(op.args) else op.kwargs.get(name, default)
