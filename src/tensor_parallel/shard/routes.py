"""What decides along which path a forward goes, and so whether the plan still holds: the plain attributes that it read
when it was traced, and what the objects in them hold (a config's fields, a list's items)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_MISSING = object()
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_FUNCTIONS = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_DEPTH = 2
"""How deep objects in objects are followed: a config and the configs in it."""

Key = tuple[str, str]
"""Module and attribute, or object and field, by name."""
Marks = dict[Key, Any]


class Routes:
    """Changes of one split model, from outside, of what its plan depends on. No value is kept alive by it but the
    objects that hold settings alone.

    reads: `Plan.reads`.
    """

    __slots__ = ("_changed", "_contents", "_objects", "_planned", "reads")

    def __init__(self, root: nn.Module, reads: Mapping[str, bool]) -> None:
        self.reads = reads
        self._changed: dict[Key, weakref.ref[nn.Module]] = {}
        self._objects: list[tuple[str, Any]] = []
        seen: set[int] = set()
        for (name, attribute), value in self._attributes(root):
            self._follow(f"{name}.{attribute}".lstrip("."), value, _DEPTH, seen)
        self._contents = [_glance(held) for _, held in self._objects]
        self._planned = self.snapshot(root)

    def _attributes(self, root: nn.Module) -> Iterator[tuple[Key, Any]]:
        names = self.reads.keys()
        for name, module in root.named_modules():
            values = module.__dict__
            yield from (((name, attribute), values[attribute]) for attribute in names & values.keys())

    def _follow(self, name: str, value: Any, depth: int, seen: set[int]) -> None:
        if depth and id(value) not in seen and _holds_settings(value):
            seen.add(id(value))
            self._objects.append((name, _container(value)))
            for field, inner in _content(value):
                self._follow(f"{name}.{field}", inner, depth - 1, seen)

    def snapshot(self, root: nn.Module) -> Marks:
        """What the plan depends on, as it is now."""
        found = {key: _mark(value) for key, value in self._attributes(root)}
        found.update({(name, str(f)): _mark(value) for name, held in self._objects for f, value in _content(held)})
        return found

    def note(self, module: nn.Module, name: str, attribute: str) -> None:
        """The attribute of `module`, called `name` in the model, is about to be set or deleted from outside."""
        if attribute in self.reads:
            self._planned.setdefault((name, attribute), _mark(_value(module, attribute)))
            self._changed[name, attribute] = weakref.ref(module)

    def refuses(self, module: nn.Module, name: str, attribute: str, value: Any) -> bool:
        """Whether with `value` in the attribute the forward may go along another path than with what is in it."""
        return attribute in self.reads and not self._stands_for(attribute, _mark(_value(module, attribute)), value)

    def settle(self) -> None:
        """After a run: what the model's own code wrote into its objects is no change."""
        self._contents = [_glance(held) for _, held in self._objects]

    def stale(self) -> bool:
        """Whether anything was set since the last run; `differences` tells whether it matters."""
        return bool(self._changed) or [_glance(held) for _, held in self._objects] != self._contents

    def differences(self) -> list[str]:
        """In words, what was set to another value than it had when the plan was made. Asked again, only what was set
        since then."""
        found = []
        for (name, attribute), reference in self._changed.items():
            module = reference()
            if module is not None:
                found += self._compared(name, attribute, _value(module, attribute))
        for (name, held), before in zip(self._objects, self._contents, strict=True):
            if _glance(held) != before:
                content = {str(field): value for field, value in _content(held)}
                known = [field for owner, field in self._planned if owner == name]
                for field in dict.fromkeys([*known, *content]):
                    found += self._compared(name, field, content.get(field, _MISSING))
        self._changed.clear()
        self.settle()
        return found

    def since(self, root: nn.Module, before: Marks) -> list[str]:
        """As `differences`, of everything that `snapshot` gave otherwise before."""
        now = dict(self._attributes(root))
        now.update({(name, str(f)): value for name, held in self._objects for f, value in _content(held)})
        return [
            difference
            for key in dict.fromkeys([*before, *now])
            if _mark(now.get(key, _MISSING)) != before.get(key, _ABSENT)
            for difference in self._compared(*key, now.get(key, _MISSING))
        ]

    def _compared(self, name: str, attribute: str, now: Any) -> list[str]:
        planned = self._planned.get((name, attribute), _ABSENT)
        if self._stands_for(attribute, planned, now):
            return []
        where = f"{name}.{attribute}".lstrip(".")
        return [f"{where} was {_word(planned)} and is {_word(_mark(now))}"]

    def _stands_for(self, attribute: str, planned: Any, now: Any) -> bool:
        only_calculated = type(planned) is float and type(now) is float and not self.reads.get(attribute, True)
        return only_calculated or bool(planned == _mark(now))


class _Identity:
    """Equal to that of the same object, while it lives."""

    __slots__ = ("_address", "_reference", "kind")

    def __init__(self, value: Any) -> None:
        self.kind, self._address = type(value).__name__, id(value)
        try:
            self._reference: weakref.ref[Any] | None = weakref.ref(value)
        except TypeError:  # of a kind without weak references: its address is all there is
            self._reference = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self._address != other._address:
            return False
        return self._reference is None or self._reference() is not None

    __hash__ = None  # type: ignore[assignment]


_DEEPEST = 4


def _mark(value: Any, depth: int = 0) -> Any:
    """What is equal for values that code goes the same way with, for all that can be known: simple values are equal,
    tensors are of one shape and kind, containers hold such, other things are the same object."""
    if isinstance(value, _SIMPLE) or value is _MISSING:
        return value if isinstance(value, float) else (type(value), value)
    if isinstance(value, torch.Tensor):
        return "tensor", value.shape, value.dtype, value.requires_grad
    if isinstance(value, MethodType):
        return "method", _Identity(value.__self__), _Identity(value.__func__)
    if depth < _DEEPEST:
        if isinstance(value, (list, tuple)):
            return type(value), [_mark(item, depth + 1) for item in value]
        if type(value) is dict:
            return dict, {key: _mark(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (set, frozenset)):
            return type(value), value.copy()
    return _Identity(value)


_ABSENT = _mark(_MISSING)


def _word(mark: Any) -> str:
    match mark:
        case float():
            return repr(mark)
        case (type(), value) if value is _MISSING:
            return "missing"
        case (kind, value) if kind in (str, int, bool, type(None)):
            return repr(value)
        case _Identity():
            return f"another {mark.kind}"
        case ("tensor", shape, dtype, _):
            return f"a tensor {list(shape)} of {str(dtype).removeprefix('torch.')}"
        case (kind, *_):
            return f"another {kind.__name__}" if isinstance(kind, type) else f"another {kind}"
    return "another one"


def _value(module: nn.Module, attribute: str) -> Any:
    return module.__dict__.get(attribute, getattr(type(module), attribute, _MISSING))


# --- objects that hold settings ------------------------------------------------------------------------------------


def _holds_settings(value: Any) -> bool:
    """Whether it is a container or an object whose content can be seen and is no tensor or module."""
    if isinstance(value, (*_SIMPLE, *_FUNCTIONS, nn.Module, torch.Tensor, weakref.ref)):
        return False
    try:
        content = dict(_content(value))
    except Exception:  # code of the object's class, whatever it raises: it keeps its content to itself
        return False
    return not any(isinstance(item, (torch.Tensor, nn.Module)) for item in content.values())


def _container(held: Any) -> Any:
    """What is to be looked at: of an object its own dict, past what its class makes of reading attributes."""
    return held if isinstance(held, (list, dict, set)) else vars(held)


def _content(held: Any) -> Iterable[tuple[Any, Any]]:
    """What an object holds, by field, key or place."""
    container = _container(held)
    if isinstance(container, list):
        return enumerate(container)
    if isinstance(container, set):
        return ((item, item) for item in container)
    found: Iterable[tuple[Any, Any]] = container.items()
    return found


def _glance(container: Any) -> Any:
    """Enough to see whether something else was put into a container: addresses, in order."""
    if isinstance(container, dict):
        return list(container), list(map(id, container.values()))
    return list(map(id, container))
