"""The plain attributes of a model's modules while it is traced: its integers tracked, all of them put back after."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tensor_parallel.planner.integers import Attribute, IntegerRecorder


@contextmanager
def tracked_attributes(module: nn.Module, recorder: IntegerRecorder, tracked: bool = True) -> Iterator[None]:
    """While it lasts, plain int attributes of every submodule, and those of config-like objects that it holds, are
    tracked; after it, every submodule has the plain attributes that it had before, whatever the body wrote.

    Modules with several names count under their first. Each module sees its own copy of its configs.

    tracked: False only restores.
    """
    saved = [(sub, _state(sub)) for sub in module.modules()]
    try:
        if tracked:
            for name, sub in module.named_modules():
                _track_module(sub, name, recorder)
        yield
    finally:
        for sub, (attributes, contents) in saved:
            _restore(sub.__dict__, attributes)
            for container, content in contents:
                _refill(container, content)


_State = tuple[dict[str, Any], list[tuple[Any, Any]]]
OWN = frozenset(nn.Module().__dict__)  # parameters, buffers, children, hooks: not plain attributes


def _state(module: nn.Module) -> _State:
    """A module's attributes, and the contents of the lists, dicts and sets among its plain ones."""
    attributes = dict(module.__dict__)
    containers = [v for k, v in attributes.items() if k not in OWN and type(v) in (list, dict, set)]
    return attributes, [(container, copy.copy(container)) for container in containers]


def _restore(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in found.keys() - wanted.keys():
        del found[name]
    for name, value in wanted.items():
        if name not in found or found[name] is not value:
            found[name] = value


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _track_module(module: nn.Module, name: str, recorder: IntegerRecorder) -> None:
    for attribute, value in list(module.__dict__.items()):
        if attribute in OWN or attribute.startswith("_"):
            continue
        if type(value) is int:
            module.__dict__[attribute] = recorder.tracked(value, Attribute(name, attribute))
        else:
            copied = _tracked_config(value, Attribute(name, attribute), recorder, nested=True)
            if copied is not None:
                module.__dict__[attribute] = copied


def _tracked_config(value: object, path: Attribute, recorder: IntegerRecorder, nested: bool) -> object | None:
    """A shallow copy of a config-like object with its int fields tracked, and those of configs in it; None for other
    objects and for configs that refuse being read or copied.

    Read and written through the instance's `__dict__`, so that aliases of fields follow by themselves.
    """
    try:
        if not _is_config(value):
            return None
        copied = copy.copy(value)
        fields = copied.__dict__
        if fields is value.__dict__:
            return None
    except Exception:  # code of the config's class: whatever it raises, this config stays untracked
        return None
    for name, content in list(fields.items()):
        if not isinstance(name, str) or name.startswith("_"):
            continue
        inner = Attribute(path.module, f"{path.attribute}.{name}")
        if type(content) is int:
            fields[name] = recorder.tracked(content, inner)
        elif nested:
            copied_content = _tracked_config(content, inner, recorder, nested=False)
            if copied_content is not None:
                fields[name] = copied_content
    return copied


def _is_config(value: object) -> bool:
    """Whether an object only holds settings, as far as its `__dict__` shows: ints, no tensors, no modules."""
    if isinstance(value, type | ModuleType | nn.Module | Tensor | Enum | int | float | str) or callable(value):
        return False
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or any(isinstance(content, Tensor | nn.Module) for content in fields.values()):
        return False
    return any(type(content) is int or getattr(content, "__dict__", None) for content in fields.values())
