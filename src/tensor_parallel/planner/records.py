"""What a trace holds: values (tensor versions), operators, function calls with their integers, module calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tensor_parallel.planner.index_types import Dim
from tensor_parallel.planner.integers import Expression, IntegerRecorder
from tensor_parallel.planner.reads import Reads

ArgumentPath = tuple[int | str, ...]
"""Where an argument stands in a call: position or keyword, then indices."""


@dataclass(eq=False, slots=True)
class Value:
    """One version of one tensor. `parameter`: the key of the parameter or buffer that it is; `constant`: no parameter
    reaches it, so it is the same on every rank."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: str | None = None
    is_buffer: bool = False
    constant: bool = True
    producer: int | None = None
    dims: list[Dim] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class IntegerArgument:
    """An integer in the arguments of a function call; `expression` is None for a literal."""

    path: ArgumentPath
    value: int
    expression: Expression | None


@dataclass(eq=False, slots=True)
class FunctionCall:
    """One call of a torch function from Python code, with the module whose forward runs and where the call stands.

    method, owner, position: as in plan.CallSite, and the module that has it.  at: index of the first operator it ran.
    is_method: called on a tensor, which the arguments as written leave out.
    """

    index: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module_call: int
    integers: list[IntegerArgument] = field(default_factory=list)
    method: str = ""
    owner: str | None = None
    position: tuple[int, int, int, int] | None = None
    outputs: Any = None
    at: int = 0
    is_method: bool = False


@dataclass(eq=False, slots=True)
class Op:
    """One operator: its name ("aten.mm.default", "linear"), arguments with values in place of tensors, outputs."""

    index: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Value]
    module_call: int
    function_call: int | None
    overload: Any = None

    def inputs(self) -> list[Value]:
        return [v for _, v in tensors(self.args, Value)] + [v for _, v in tensors(self.kwargs, Value)]


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of one module: `inputs` and `outputs` by path, as plan.Boundary names them."""

    index: int
    name: str
    number: int
    parent: int | None
    trace: int
    first_op: int = 0
    last_op: int = 0
    inputs: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)


@dataclass(eq=False)
class Trace:
    """Everything that one or several forwards did.

    data: tensors that came from outside.  again: makes the same trace with some integers shifted.
    reads: the plain attributes that the forwards looked at.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    function_calls: list[FunctionCall] = field(default_factory=list)
    module_calls: list[ModuleCall] = field(default_factory=list)
    parameters: dict[str, Value] = field(default_factory=dict)
    sizes: dict[int, Value] = field(default_factory=dict)
    recorder: IntegerRecorder = field(default_factory=IntegerRecorder)
    opaque: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    data: list[torch.Tensor] = field(default_factory=list)
    again: Callable[[frozenset[Any]], Trace] | None = None
    reads: Reads = field(default_factory=Reads)

    def enclosing(self, module_call: int) -> Iterator[ModuleCall]:
        """The module calls around (and with) one, innermost first."""
        at: int | None = module_call
        while at is not None:
            yield self.module_calls[at]
            at = self.module_calls[at].parent

    def roots(self) -> list[ModuleCall]:
        return [call for call in self.module_calls if call.parent is None]


def tensors(tree: Any, kind: type = torch.Tensor, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, tensor) of every tensor in nested containers, dataclasses and model outputs, in order."""
    if isinstance(tree, kind):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from tensors(item, kind, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for key, item in enumerate(tree):
            yield from tensors(item, kind, f"{path}.{key}" if path else str(key))
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        # Not getattr: a field may have become a property that refuses to be read.
        held = tree.__dict__ if hasattr(tree, "__dict__") else {k: getattr(tree, k, None) for k in tree.__slots__}
        for key in tree.__dataclass_fields__:
            yield from tensors(held.get(key), kind, f"{path}.{key}" if path else key)


def replaced(tree: Any, change: Any, kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """The same containers with `change(item)` in place of every item of `kind`; a container in which nothing changes is
    handed back itself."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        items = [replaced(item, change, kind) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if isinstance(tree, list):
            return items
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, Mapping):
        changed = {key: new for key, old in tree.items() if (new := replaced(old, change, kind)) is not old}
        if not changed:
            return tree
        twin = copy.copy(tree)
        for key, item in changed.items():
            twin[key] = item  # type: ignore[index]
        return twin
    return tree
