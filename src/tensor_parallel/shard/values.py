"""Nested values: what goes into and comes out of a forward, and the places in it that a plan names by path."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import is_not
from typing import Any

import torch

Key = str | int

_PLAIN = (str, int, float, type(None), torch.Tensor)


def _rebuild(value: Any, items: list[Any]) -> Any:
    """A list or tuple of `value`'s own kind (a named tuple too) that holds `items`."""
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    fresh = copy.copy(value)
    fresh[:] = items
    return fresh


def map_leaves(value: Any, change: Callable[[Any], Any], *, anew: bool = False) -> Any:
    """`value` with `change` applied to every leaf of its dicts, lists, tuples and dataclasses; containers in which
    nothing changes are kept as they are, unless all shall be made `anew`."""
    if isinstance(value, _PLAIN):
        return change(value)
    if isinstance(value, dict):
        found = {key: map_leaves(item, change, anew=anew) for key, item in value.items()}
        if not anew and not any(map(is_not, found.values(), value.values())):
            return value
        if type(value) is dict:
            return found
        fresh = copy.copy(value)
        for key, item in found.items():
            fresh[key] = item
        return fresh
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [map_leaves(item, change, anew=anew) for item in value]
        if not anew and not any(map(is_not, items, value)):
            return value
        return _rebuild(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change, anew)
    return change(value)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """A dataclass's fields that are set. Past its `__getattribute__`: some configs refuse to be read there."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:  # one with slots
        own = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if hasattr(value, item.name)}
    for item in dataclasses.fields(value):
        if item.name in own:
            yield item.name, own[item.name]


def _map_dataclass(value: Any, change: Callable[[Any], Any], anew: bool) -> Any:
    fields = dict(_fields(value))
    found = {name: map_leaves(item, change, anew=anew) for name, item in fields.items()}
    if not anew and not any(map(is_not, found.values(), fields.values())):
        return value
    fresh = copy.copy(value)
    for name, item in found.items():
        object.__setattr__(fresh, name, item)
    return fresh


def leaves(value: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """(path, leaf) of every leaf of nested dicts, lists, tuples and dataclasses, in order."""
    if isinstance(value, _PLAIN):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, item in _fields(value):
            yield from leaves(item, (*path, name))
    else:
        yield path, value


def distinct_leaves(value: Any) -> dict[int, Any]:
    """The leaves of nested values as in `leaves`, each once, by id."""
    found: dict[int, Any] = {}
    _collect(value, found)
    return found


def _collect(value: Any, found: dict[int, Any]) -> None:
    if isinstance(value, _PLAIN):
        found[id(value)] = value
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for _, item in _fields(value):
            _collect(item, found)
    else:
        found[id(value)] = value


def parse_path(path: str) -> tuple[Key, ...]:
    """`"pair.1"` as `("pair", 1)`; "" as `()`."""
    return tuple(int(part) if part.isdigit() else part for part in path.split(".")) if path else ()


def _has(value: Any, key: Key) -> bool:
    if isinstance(value, dict):
        return key in value or (isinstance(key, int) and key < len(value))
    if isinstance(value, (list, tuple)):
        return isinstance(key, int) and key < len(value)
    return isinstance(key, str) and hasattr(value, key)


def _resolve(value: Any, key: Key) -> Any:
    """The real key in a dict: plans may count a ModelOutput's items."""
    if isinstance(value, dict) and key not in value and isinstance(key, int):
        return list(value)[key]
    return key


def change_at(value: Any, path: Sequence[Key], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with the tensor at `path` changed; as it is where no tensor is there in this call.

    Lists, tuples and plain dicts on the way are made anew; other mappings (a ModelOutput) and objects, which a forward
    makes for its caller, are written in place.
    """
    if not path:
        return change(value) if isinstance(value, torch.Tensor) else value
    if value is None or not _has(value, path[0]):
        return value
    key = _resolve(value, path[0])
    keyed = isinstance(value, (dict, list, tuple))
    old = value[key] if keyed else getattr(value, key)
    new = change_at(old, path[1:], change)
    if new is old:
        return value
    if type(value) is dict:
        return {**value, key: new}
    if isinstance(value, (list, tuple)):
        items = list(value)
        items[key] = new
        return _rebuild(value, items)
    if keyed:
        value[key] = new
    else:
        setattr(value, key, new)
    return value


def tensor_at(value: Any, path: Sequence[Key]) -> torch.Tensor | None:
    """The tensor at `path`, None where there is none in this call."""
    for step in path:
        if value is None or not _has(value, step):
            return None
        key = _resolve(value, step)
        value = value[key] if isinstance(value, (dict, list, tuple)) else getattr(value, key)
    return value if isinstance(value, torch.Tensor) else None
