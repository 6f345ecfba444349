"""What the integers in the arguments of a traced call count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tensor_parallel.planner.index_types import Blocked, Dim, cut_sum, split_product
from tensor_parallel.planner.records import FunctionCall, IntegerArgument, Value, tensors

_SHAPES = {
    "view", "reshape", "expand", "broadcast_to", "zeros", "ones", "full", "empty", "rand", "randn",
    "new_zeros", "new_ones", "new_full", "new_empty",
}  # fmt: skip

_CONVOLUTIONS = {f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)}


@dataclass(frozen=True)
class Requirement:
    """`argument` of `call` counts the units of `dim` where `value` is a shard; elsewhere, and for dim None, it is the
    number that the unsplit model passes. `index`: which dim of the value it is, where it is one."""

    call: FunctionCall
    argument: IntegerArgument
    dim: Dim | None
    value: Value | None
    index: int | None = None


def requirements(call: FunctionCall) -> Iterator[Requirement]:
    """One for each integer of the call that matters."""
    counted = {id(r.argument): r for r in _counted(call)}
    for argument in call.integers:
        found = counted.get(id(argument))
        if found is not None:
            yield found
        elif argument.expression is not None:
            yield Requirement(call, argument, None, None)


def _counted(call: FunctionCall) -> Iterator[Requirement]:
    name = call.name
    outputs = [value for _, value in tensors(call.outputs, Value)]
    if not outputs:
        return
    by_path = {argument.path: argument for argument in call.integers}
    if name in _SHAPES:
        yield from _shape_arguments(call, by_path, outputs[0])
    elif name in ("repeat", "tile"):
        yield from _tiles(call, by_path, outputs[0])
    elif name == "unflatten":
        first = int(_positional(call, 1, "dim")) % len(_input(call).shape)
        sizes = [by_path[p] for p in sorted(by_path, key=str) if p[:1] in ((2,), ("sizes",)) and len(p) > 1]
        for offset, argument in enumerate(sizes):
            yield Requirement(call, argument, outputs[0].dims[first + offset], outputs[0])
    elif name in ("split", "split_with_sizes"):
        dim = int(_positional(call, 2, "dim", 0))
        for path, argument in by_path.items():
            if path[0] in (1, "split_size_or_sections", "split_size", "split_sizes"):
                output = outputs[path[1] if len(path) > 1 else 0]  # type: ignore[index]
                yield Requirement(call, argument, output.dims[dim], output)
    elif name in ("__getitem__", "narrow"):
        yield from _slices(call, by_path)
    elif name == "repeat_interleave":
        yield from _repeats(call, by_path, outputs[0])
    elif name in (*_CONVOLUTIONS, "group_norm"):
        yield from _groups(call, by_path, outputs[0])


def _input(call: FunctionCall) -> Value:
    first: Value = next(value for _, value in tensors((call.args, call.kwargs), Value))
    return first


def _positional(call: FunctionCall, index: int, name: str, default: Any = None) -> Any:
    return call.args[index] if index < len(call.args) else call.kwargs.get(name, default)


def _shape_arguments(
    call: FunctionCall, by_path: Mapping[tuple[int | str, ...], IntegerArgument], output: Value
) -> Iterator[Requirement]:
    rank = len(output.shape)
    start = 1 if call.args and isinstance(call.args[0], Value) else 0
    if len(call.args) > start and isinstance(call.args[start], (tuple, list)):
        prefix: tuple[int | str, ...] = (start,)
    elif len(call.args) > start:
        prefix = ()
    else:
        prefix = ("size",) if "size" in call.kwargs else ("shape",)
    for i in range(rank):
        path = (*prefix, i) if prefix else (start + i,)
        argument = by_path.get(path)
        if argument is not None and argument.value >= 0:
            yield Requirement(call, argument, output.dims[i], output, i)


def _slices(call: FunctionCall, by_path: Mapping[tuple[int | str, ...], IntegerArgument]) -> Iterator[Requirement]:
    value = _input(call)
    if call.name == "narrow":
        dim, start = int(_positional(call, 1, "dim")), int(_positional(call, 2, "start"))
        yield from _cut_at(call, value, dim, by_path.get((2,)), start, 0)
        yield from _cut_at(call, value, dim, by_path.get((3,)), int(_positional(call, 3, "length")) + start, start)
        return
    index = call.args[1]
    items = index if isinstance(index, tuple) else (index,)
    consumed = sum(1 for item in items if item is not None and item is not Ellipsis and not isinstance(item, bool))
    dim = 0
    for k, item in enumerate(items):
        if item is None:
            continue
        if item is Ellipsis:
            dim += len(value.shape) - consumed
            continue
        if isinstance(item, slice):
            for key in ("start", "stop"):
                argument = by_path.get((1, k, key) if isinstance(index, tuple) else (1, key))
                yield from _cut_at(call, value, dim, argument, getattr(item, key), 0)
        dim += 1


def _cut_at(
    call: FunctionCall, value: Value, dim: int, argument: IntegerArgument | None, at: int | None, start: int
) -> Iterator[Requirement]:
    """An offset counts the units before it (behind it, for a negative one; from `start`, for a length)."""
    if argument is None or at is None or at == 0 or at - start == 0:
        return
    size = value.shape[dim]
    at = min(at + size if at < 0 else at, size)
    if at in (0, size) and argument.value not in (at, at - start):
        return
    try:
        head, tail = cut_sum(value.dims[dim], at)
        counted = tail if argument.value < 0 else cut_sum(head, start)[1] if start else head
    except Blocked:
        return
    yield Requirement(call, argument, counted, value)


def _repeats(
    call: FunctionCall, by_path: Mapping[tuple[int | str, ...], IntegerArgument], output: Value
) -> Iterator[Requirement]:
    argument, value = by_path.get((1,)) or by_path.get(("repeats",)), _input(call)
    dim = _positional(call, 2, "dim")
    if argument is not None and dim is not None and argument.value > 1:
        try:
            parts = split_product(output.dims[int(dim)], value.shape[int(dim)])
        except Blocked:
            return
        yield Requirement(call, argument, parts[-1], output)


def _tiles(
    call: FunctionCall, by_path: Mapping[tuple[int | str, ...], IntegerArgument], output: Value
) -> Iterator[Requirement]:
    """Each number counts the repeats of one dim, from the right."""
    value = _input(call)
    arguments = [by_path[path] for path in sorted(by_path, key=str)]
    for i, argument in zip(range(-1, -len(arguments) - 1, -1), reversed(arguments), strict=True):
        before = value.shape[i] if -i <= len(value.shape) else 1
        if argument.value > 1 and before:
            try:
                repeats = split_product(output.dims[i], argument.value)[0]
            except Blocked:
                continue
            yield Requirement(call, argument, repeats, output, i if before == 1 else None)


def _groups(
    call: FunctionCall, by_path: Mapping[tuple[int | str, ...], IntegerArgument], output: Value
) -> Iterator[Requirement]:
    position, name = (1, "num_groups") if call.name == "group_norm" else (6, "groups")
    argument = by_path.get((position,)) or by_path.get((name,))
    if argument is not None and argument.value > 1:
        try:
            group = split_product(output.dims[1], argument.value)[0]
        except Blocked:
            return
        yield Requirement(call, argument, group, output)
