"""Writes a trace down: which value a tensor object is at this moment, and what each operator made of which values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tensor_parallel.planner.records import Op, Trace, Value, replaced, tensors


class Recorder:
    """State of one trace, shared by both modes."""

    def __init__(self, trace: Trace, module: nn.Module, names: Mapping[int, str]) -> None:
        self.trace = trace
        self.names = names
        self.known: dict[int, Value] = {}
        self.geometry: dict[tuple[Any, ...], int] = {}
        self.pending: list[tuple[Value, Value, Value]] = []
        self.kept: dict[int, Value] = {}
        self.changed: list[int] = []
        self.parameters: dict[int, torch.Tensor] = {}
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.storages: dict[int, list[int]] = {}
        self.alive: list[Any] = []
        self.stack: list[int] = []
        self.counts: dict[str, int] = {}
        self.function_call: int | None = None
        self.silent = 0
        self.number = len(trace.roots())

    def value(self, tensor: torch.Tensor) -> Value:
        found = self.known.get(id(tensor))
        if found is None and (twin := self.geometry.get(_geometry(tensor))) is not None:
            # Autograd hands out another tensor object for a view than the one that the dispatcher saw.
            found = self.known[twin]
            self._keep(tensor, found)
        if found is None:
            found = self.add(tensor)
            if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                self.trace.data.append(tensor)
        return found

    def _keep(self, tensor: torch.Tensor, value: Value) -> None:
        if id(tensor) not in self.known:
            self.alive.append(tensor)
            self.storages.setdefault(_storage(tensor), []).append(id(tensor))
        self.known[id(tensor)] = value
        self.geometry[_geometry(tensor)] = id(tensor)

    def add(self, tensor: torch.Tensor, **facts: Any) -> Value:
        value = Value(len(self.trace.values), tuple(tensor.shape), tensor.dtype, **facts)
        self.trace.values.append(value)
        self._keep(tensor, value)
        return value

    def add_parameter(self, key: str, tensor: torch.Tensor, is_buffer: bool) -> None:
        if key in self.trace.parameters:
            self._keep(tensor, self.trace.parameters[key])
        else:
            constant = is_buffer
            self.trace.parameters[key] = self.add(tensor, parameter=key, is_buffer=is_buffer, constant=constant)
        self.kept[id(tensor)] = self.trace.parameters[key]
        if not is_buffer:
            self.parameters[_storage(tensor)] = tensor

    def before_write(self, written: torch.Tensor) -> None:
        """Keep the values of a parameter that an operator is about to write into."""
        parameter = self.parameters.get(_storage(written))
        if parameter is not None and not parameter.is_meta:
            self.saved.setdefault(id(parameter), (parameter, parameter.detach().clone()))

    def restore(self) -> None:
        """Put back the values of parameters that the forward wrote into."""
        with torch.no_grad():
            for parameter, values in self.saved.values():
                parameter.copy_(values)

    def record(self, name: str, args: Any, kwargs: Any, outputs: Any, overload: Any = None) -> None:
        args, kwargs = replaced(args, self.value), replaced(kwargs, self.value)
        op = Op(len(self.trace.ops), name, args, kwargs, [], self.stack[-1] if self.stack else 0, self.function_call)
        op.overload = overload
        inputs = op.inputs()
        for _, tensor in tensors(outputs):
            written = id(tensor) in self.known
            aliases = [a for a in self.storages.get(_storage(tensor), []) if a != id(tensor)] if written else []
            value = self.add(tensor, producer=op.index, constant=all(v.constant for v in inputs))
            op.outputs.append(value)
            if written and id(tensor) in self.kept:
                self.changed.append(id(tensor))
            if aliases:
                self._written_through(value, aliases)
        self.trace.ops.append(op)

    def _written_through(self, written: Value, aliases: Sequence[int]) -> None:
        """An in-place write changed every view of the storage: what they hold now is unknown."""
        for alias in aliases:
            old = self.known[alias]
            value = Value(len(self.trace.values), old.shape, old.dtype, constant=old.constant and written.constant)
            self.trace.values.append(value)
            self.known[alias] = value
            self.pending.append((value, old, written))
            if alias in self.kept:
                self.changed.append(alias)

    def check_origin(self, tensor: torch.Tensor) -> None:
        """What a custom autograd function returns is behind an operator whose backward nobody knows."""
        old = self.known.get(id(tensor))
        if old is None or not isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
            return
        name = "custom autograd function"
        if old.producer is None or self.trace.ops[old.producer].name != name:
            op = Op(len(self.trace.ops), name, (old,), {}, [], self.stack[-1], None)
            op.outputs.append(self.add(tensor, producer=op.index, constant=old.constant))
            self.trace.ops.append(op)

    def flush(self) -> None:
        """Write down the unknown views behind in-place writes as operators of their own."""
        for value, old, written in self.pending:
            index = len(self.trace.ops)
            value.producer = index
            at = self.stack[-1] if self.stack else 0
            self.trace.ops.append(Op(index, "view of a tensor written in place", (old, written), {}, [value], at, None))
        self.pending.clear()
        for tensor in self.changed:
            self.keep(self.kept[tensor], self.known[tensor])
        self.changed.clear()

    def keep(self, *values: Value) -> None:
        """Write down that a value stays behind in the module: alone, or as what a buffer is from now on."""
        name = "kept in an attribute" if len(values) == 1 else "kept in a buffer"
        at = self.stack[-1] if self.stack else 0
        self.trace.ops.append(Op(len(self.trace.ops), name, values, {}, [], at, None))


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (_storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
