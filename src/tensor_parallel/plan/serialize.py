"""Plans as JSON: versioned, made to be read and compared by people, one line a tensor or module.

A dim is its size where nothing cuts it, else a list of segments; a segment is a list of parts, row-major; a part is its
size, or {factor: units} where ranks cut it; "runtime" stands for a size that is known only when the model runs:

    c_attn.weight of GPT-2 with 4 heads of 16:  "dims": [64, [[{"h.0.head": 4}, 16], [{"h.0.head": 4}, 16], ...]]

Fields that have their default are left out.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import RUNTIME, DimLayout, Part, Placement, Segment, TensorLayout
from tensor_parallel.plan.plan import (
    Boundary,
    CallSite,
    Draw,
    Factor,
    HandRule,
    LocalSize,
    Lookup,
    ModulePlan,
    Plan,
    TensorPlan,
    Traffic,
)

FORMAT = "tensor_parallel plan"
VERSION = 1

_CURE = "make the plan again with make_plan(...).save(path)"
_T = TypeVar("_T")


# ------------------------------------------------------------------------------ writing


def _part_data(part: Part) -> Any:
    size = "runtime" if part.size == RUNTIME else part.size
    return size if part.factor is None else {part.factor: size}


def _dim_data(dim: DimLayout) -> Any:
    if len(dim.segments) == 1 and len(dim.segments[0].parts) == 1 and dim.segments[0].parts[0].factor is None:
        return _part_data(dim.segments[0].parts[0])
    return [[_part_data(part) for part in segment.parts] for segment in dim.segments]


def _placement_data(placement: Placement) -> Any:
    data: dict[str, Any] = {"kind": placement.kind}
    if placement.dims:
        data["dims"] = [[dim, _dim_data(layout)] for dim, layout in placement.dims]
    if placement.factors:
        data["factors"] = list(placement.factors)
    return data


def _value_data(value: Any) -> Any:
    match value:
        case DimLayout():
            return _dim_data(value)
        case TensorLayout():
            return [_dim_data(dim) for dim in value.dims]
        case Placement():
            return _placement_data(value)
        case tuple():
            return [_value_data(item) for item in value]
        case None | bool() | int() | str():
            return value
        case _:
            return _record_data(value)


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _record_data(record: Any, without: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    values = {field.name: (getattr(record, field.name), field) for field in fields(record)}
    return {
        name: _value_data(value)
        for name, (value, field) in values.items()
        if name not in without and (_default(field) is MISSING or value != _default(field))
    }


def _block(name: str, data: Mapping[str, Any] | list[Any]) -> str:
    """One JSON member whose items stand on a line each."""
    if isinstance(data, Mapping):
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
        opening, closing = "{", "}"
    else:
        lines = [f"    {json.dumps(item)}" for item in data]
        opening, closing = "[", "]"
    body = "\n" + ",\n".join(lines) + "\n  " if lines else ""
    return f"  {json.dumps(name)}: {opening}{body}{closing}"


def _refuse_functions(plan: Plan) -> None:
    for key, tensor in plan.tensors.items():
        if tensor.action is not None:
            raise PlanError(
                f"{key} is cut by {tensor.action}, a function, and no file can hold it: use tp.state_actions' own "
                "actions, or keep the tp.Config instead of the plan"
            )
    for name, module in plan.modules.items():
        for rule in module.rules:
            if not isinstance(rule.action, str):
                raise PlanError(
                    f"the {rule.kind} rule {rule.key!r} of {name or 'the model'} is {rule.action}, a function, and no "
                    "file can hold it: use actions in words, or keep the tp.Config instead of the plan"
                )


def to_json(plan: Plan) -> str:
    """The plan as JSON text; `from_json` gives an equal plan back.

    Raises:
        PlanError: it holds functions of rules by hand; names the first.
    """
    _refuse_functions(plan)
    members = [
        f'  "format": {json.dumps(FORMAT)}',
        f'  "version": {VERSION}',
        f'  "world_size": {plan.world_size}',
        _block("paths", list(plan.paths)),
        f'  "reads": {json.dumps(dict(plan.reads))}',
        _block("factors", {name: _record_data(factor, ["name"]) for name, factor in plan.factors.items()}),
        _block("tensors", {key: _record_data(tensor) for key, tensor in plan.tensors.items()}),
        _block("modules", {name: _record_data(module) for name, module in plan.modules.items()}),
        _block("traffic", [_record_data(traffic) for traffic in plan.traffic]),
    ]
    return "{\n" + ",\n".join(members) + "\n}\n"


def to_text(plan: Plan) -> str:
    """As to_json, with functions by their names; for comparing plans."""
    tensors = {
        key: replace(tensor, action=None, reason=f"cut by {_function_name(tensor.action)}") if tensor.action else tensor
        for key, tensor in plan.tensors.items()
    }
    modules = {
        name: replace(module, rules=tuple(replace(r, action=_function_name(r.action)) for r in module.rules))
        for name, module in plan.modules.items()
    }
    return to_json(replace(plan, tensors=tensors, modules=modules))


def _function_name(action: Any) -> str:
    return action if isinstance(action, str) else str(getattr(action, "__qualname__", type(action).__qualname__))


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to `path`: beside it first, then renamed, so that a reader never sees half a file.

    Raises:
        OSError: where the folder cannot be written.
    """
    target = Path(path)
    handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(to_json(plan))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class _Node:
    """A value of the file and where it stands."""

    value: Any
    place: str

    def fail(self, required: str) -> NoReturn:
        given = json.dumps(self.value)
        given = given if len(given) <= 80 else given[:77] + "..."
        raise PlanError(f"{self.place}: given {given}, required {required}; {_CURE}")

    def items(self) -> list[_Node]:
        if not isinstance(self.value, list):
            self.fail("a list")
        return [_Node(item, f"{self.place}[{index}]") for index, item in enumerate(self.value)]

    def members(self) -> dict[str, _Node]:
        if not isinstance(self.value, dict):
            self.fail("an object")
        return {key: _Node(value, f"{self.place}[{json.dumps(key)}]") for key, value in self.value.items()}

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.fail("a string")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.fail("true or false")
        return self.value

    def integer(self, least: int | None = 0) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            self.fail("an integer")
        if least is not None and self.value < least:
            self.fail(f"an integer of at least {least}")
        return self.value


def _tuple_of(read: Callable[[_Node], _T]) -> Callable[[_Node], tuple[_T, ...]]:
    return lambda node: tuple(read(item) for item in node.items())


def _optional(read: Callable[[_Node], _T]) -> Callable[[_Node], _T | None]:
    return lambda node: None if node.value is None else read(node)


def _signed(node: _Node) -> int:
    return node.integer(least=None)


def _one_of(*allowed: str) -> Callable[[_Node], str]:
    def read(node: _Node) -> str:
        if node.text() not in allowed:
            node.fail("one of " + ", ".join(allowed))
        return node.text()

    return read


def _size(node: _Node) -> int:
    return RUNTIME if node.value == "runtime" else node.integer()


def _part(node: _Node) -> Part:
    if not isinstance(node.value, dict):
        return Part(_size(node))
    if len(node.value) != 1:
        node.fail('one factor and its units, such as {"head": 4}')
    ((factor, units),) = node.members().items()
    return Part(_size(units), factor)


def _dim(node: _Node) -> DimLayout:
    if not isinstance(node.value, list):
        return DimLayout.whole(_size(node))
    return DimLayout(tuple(Segment(tuple(_part(part) for part in segment.items())) for segment in node.items()))


def _layout(node: _Node) -> TensorLayout:
    return TensorLayout(tuple(_dim(item) for item in node.items()))


def _placed_dim(node: _Node) -> tuple[int, DimLayout]:
    if len(node.items()) != 2:
        node.fail("a dim and its layout")
    dim, layout = node.items()
    return dim.integer(least=None), _dim(layout)


def _position(node: _Node) -> tuple[int, int, int, int]:
    if len(node.items()) != 4:
        node.fail("four integers: line, column, end line, end column")
    line, column, end_line, end_column = (item.integer(least=None) for item in node.items())
    return line, column, end_line, end_column


def _record(kind: type[_T], readers: Mapping[str, Callable[[_Node], Any]], **given: Any) -> Callable[[_Node], _T]:
    """Reads a dataclass from an object that holds all of its required fields and no other ones."""
    required = [f.name for f in fields(kind) if _default(f) is MISSING and f.name not in given]  # type: ignore[arg-type]

    def read(node: _Node) -> _T:
        members = node.members()
        for name in required:
            if name not in members:
                raise PlanError(f"{node.place}: field {name!r} is missing; {_CURE}")
        for name in members:
            if name not in readers:
                raise PlanError(f"{node.place}: unknown field {name!r}, known are {', '.join(readers)}; {_CURE}")
        return kind(**{name: readers[name](member) for name, member in members.items()}, **given)

    return read


_placement = _record(
    Placement,
    {
        "kind": _one_of("replicate", "shard", "partial"),
        "dims": _tuple_of(_placed_dim),
        "factors": _tuple_of(_Node.text),
    },
)
_boundary = _record(
    Boundary,
    {
        "path": _Node.text,
        "before": _placement,
        "after": _placement,
        "call": _optional(_Node.integer),
        "gathers_gradient": _Node.flag,
        "spare": _Node.flag,
    },
)
_lookup = _record(Lookup, {"path": _Node.text, "weight": _Node.text, "rows": _dim})
_local_size = _record(LocalSize, {"attribute": _Node.text, "layout": _dim})
_call_site = _record(
    CallSite,
    {
        "method": _Node.text,
        "position": _position,
        "argument": _tuple_of(_signed),
        "value": _signed,
        "layout": _optional(_dim),
    },
)
_draw = _record(
    Draw,
    {
        "index": _Node.integer,
        "function": _Node.text,
        "placement": _optional(_placement),
        "call": _optional(_Node.integer),
    },
)
_hand_rule = _record(
    HandRule,
    {
        "kind": _one_of("input", "output", "attribute"),
        "key": lambda node: node.value if isinstance(node.value, str) else node.integer(least=None),
        "action": _Node.text,
    },
)
_module = _record(
    ModulePlan,
    {
        "inputs": _tuple_of(_boundary),
        "outputs": _tuple_of(_boundary),
        "lookups": _tuple_of(_lookup),
        "attributes": _tuple_of(_local_size),
        "call_sites": _tuple_of(_call_site),
        "draws": _tuple_of(_draw),
        "last": _Node.flag,
        "calls": _tuple_of(_Node.text),
        "rules": _tuple_of(_hand_rule),
    },
)
_tensor = _record(
    TensorPlan,
    {
        "names": _tuple_of(_Node.text),
        "layout": _layout,
        "nbytes": _Node.integer,
        "is_buffer": _Node.flag,
        "rank0_only": _Node.flag,
        "gathered": _Node.flag,
        "reason": _Node.text,
    },
)
_traffic = _record(
    Traffic,
    {
        "module": _Node.text,
        "path": _Node.text,
        "op": _one_of("all_reduce", "all_gather"),
        "calls": _Node.integer,
        "nbytes": _Node.integer,
    },
)


def _factor(name: str, node: _Node) -> Factor:
    readers = {"units": lambda n: n.integer(1), "partner": _optional(_Node.text), "unit": _Node.text}
    return _record(Factor, readers, name=name)(node)


def _check_head(node: _Node) -> dict[str, _Node]:
    members = node.members()
    kind = members.get("format", _Node(None, f'{node.place}["format"]'))
    if kind.value != FORMAT:
        kind.fail(json.dumps(FORMAT))
    version = members.get("version", _Node(None, f'{node.place}["version"]'))
    if version.value != VERSION:
        version.fail(f"version {VERSION}, the one that this release reads")
    known = ["format", "version", *(f.name for f in fields(Plan))]
    for name in known:
        if name not in members:
            raise PlanError(f"{node.place}: field {name!r} is missing; {_CURE}")
    for name in members:
        if name not in known:
            raise PlanError(f"{node.place}: unknown field {name!r}, known are {', '.join(known)}; {_CURE}")
    return members


def from_json(text: str, source: str = "plan") -> Plan:
    """The plan of a text that `to_json` wrote; `source` names the text in errors.

    Raises:
        PlanError: no JSON, another format or version, a field missing, unknown or of a wrong kind; names the place.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{source} is no JSON: {error}; {_CURE}") from None
    members = _check_head(_Node(data, source))
    return Plan(
        factors={name: _factor(name, node) for name, node in members["factors"].members().items()},
        tensors={key: _tensor(node) for key, node in members["tensors"].members().items()},
        modules={name: _module(node) for name, node in members["modules"].members().items()},
        traffic=_tuple_of(_traffic)(members["traffic"]),
        paths=_tuple_of(_Node.text)(members["paths"]),
        reads={name: node.flag() for name, node in members["reads"].members().items()},
        world_size=members["world_size"].integer(1),
    )


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `save` wrote.

    Raises:
        PlanError: the file is no plan of this version; names the place.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{os.fspath(path)} is no JSON: {error}; {_CURE}") from None
    return from_json(text, os.fspath(path))
