"""Integers that a module's code reads from itself or its config (`self.num_heads`, `self.config.hidden_size`) and that
must be a rank's own while the rank runs that code, and whole for everybody else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

SIZES = "_tp_sizes"
"""Attribute of a module: its LocalSizes."""

Active = Callable[[], Any]

# --- the descriptors -----------------------------------------------------------------------------------------------


def _inactive() -> None:
    return None


class LocalSizes(dict[str, Any]):
    """One module's local values, by the plain attribute that the code reads first: an int (by hand also something
    else), or what an object's ints are. `active` tells whether the rank's own code is running in this thread."""

    __slots__ = ("active",)

    def __init__(self, values: Mapping[str, Any], active: Active) -> None:
        super().__init__(values)
        self.active = active

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalSizes:
        """Fresh ones under the same `active`, which belongs to the running model and is never copied."""
        return LocalSizes(
            {k: Overlaid(v.sizes) if isinstance(v, Overlaid) else v for k, v in self.items()}, self.active
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled module reads its whole values: it has left its ranks."""
        return LocalSizes, ({}, _inactive)


class Overlaid:
    """The local ints of an object held by a module, by path inside it ("num_heads", "text_config.num_heads"), and the
    overlay that was last made of it."""

    __slots__ = ("last", "sizes")

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.last: Any = None

    def over(self, real: Any, active: Active) -> Any:
        """The overlay of `real`: the same one while the module holds the same object."""
        last = self.last
        if last is None or last._tp_real is not real:
            last = self.last = Overlay(real, self.sizes, active)
        return last


def _descriptor(cls: type, name: str) -> property:
    """A plain attribute of the instance's `__dict__`, read through its LocalSizes."""

    def read(self: Any) -> Any:  # 0.2 us and what `active` takes
        values = self.__dict__
        if "_tp_sizes" in values:
            sizes = values["_tp_sizes"]
            if name in sizes:
                rank = sizes.active()
                if rank is not None and rank is not False:
                    local = sizes[name]
                    return local.over(plain(self), sizes.active) if local.__class__ is Overlaid else local
        return values[name] if name in values else getattr(super(cls, self), name)

    def plain(self: Any) -> Any:
        values = self.__dict__
        return values[name] if name in values else getattr(super(cls, self), name)

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(name)
        del self.__dict__[name]

    return property(read, write, delete)


def install_local_attributes(cls: type, names: Iterable[str]) -> None:
    """Let instances of `cls`, a private subclass, read the attributes `names` through their own LocalSizes; of a path
    like "config.x" its first part. Instances without sizes read, write and delete as before."""
    for name in dict.fromkeys(name.partition(".")[0] for name in names):
        if not isinstance(cls.__dict__.get(name), property):
            setattr(cls, name, _descriptor(cls, name))


def local_attributes(module: nn.Module, sizes: Mapping[str, Any], active: Callable[[], Any]) -> None:
    """Let the code of `module` read `sizes` in place of its own integers while `active()`, and everybody else the whole
    ones. Writes go to the real attributes.

    module: its class must be private to the split model (see `install_local_attributes`, called here).
    sizes: local values by attribute ("num_heads") or path into an object held ("config.num_attention_heads").
    active: whether the rank's own code is running in this thread: a bool, or the rank, None where none is running.
    """
    if not sizes:
        return
    install_local_attributes(type(module), sizes)
    local: dict[str, Any] = {}
    inside: dict[str, dict[str, int]] = {}
    for path, size in sizes.items():
        first, _, rest = path.partition(".")
        if rest:
            inside.setdefault(first, {})[rest] = size
        else:
            local[first] = size
    local.update({first: Overlaid(paths) for first, paths in inside.items()})
    module.__dict__[SIZES] = LocalSizes(local, active)


# --- the overlay of a config ---------------------------------------------------------------------------------------


def _aliases(real: Any) -> dict[str, str]:
    """Other names of a transformers config's fields."""
    found = getattr(real, "attribute_map", None)
    return found if isinstance(found, dict) else {}


class Overlay:
    """Stands for a config while a rank's own code reads it: answers the rank's integers, and the one real config's
    everything else. Writes go to the real one. It passes `isinstance` for the real one's class, is equal to it, and its
    copies and pickles are the real one's. Properties and methods of the config's class that are written in Python run
    on the overlay, so that what they compute is local too."""

    __slots__ = ("__weakref__", "_tp_active", "_tp_inside", "_tp_local", "_tp_real")

    _tp_real: Any
    _tp_local: dict[str, int]
    _tp_inside: dict[str, Overlaid]
    _tp_active: Active

    def __init__(self, real: Any, sizes: Mapping[str, int], active: Active) -> None:
        local = {path: size for path, size in sizes.items() if "." not in path}
        local |= {alias: local[name] for alias, name in _aliases(real).items() if name in local}
        inside: dict[str, dict[str, int]] = {}
        for path, size in sizes.items():
            first, _, rest = path.partition(".")
            if rest:
                inside.setdefault(first, {})[rest] = size
        object.__setattr__(self, "_tp_real", real)
        object.__setattr__(self, "_tp_local", local)
        object.__setattr__(self, "_tp_inside", {first: Overlaid(paths) for first, paths in inside.items()})
        object.__setattr__(self, "_tp_active", active)

    def __getattr__(self, name: str) -> Any:
        local, inside = self._tp_local.get(name), self._tp_inside.get(name)
        real = self._tp_real
        if local is not None or inside is not None:
            rank = self._tp_active()
            if rank is not None and rank is not False:
                return local if inside is None else inside.over(getattr(real, name), self._tp_active)
            return getattr(real, name)
        if name not in object.__getattribute__(real, "__dict__"):  # past a config's own slow __getattribute__
            found = _class_attribute(type(real), name)
            if isinstance(found, property) and found.fget is not None:
                return found.fget(self)
            if isinstance(found, FunctionType):
                return MethodType(found, self)
        return getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tp_real, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._tp_real, name)

    @property
    def __class__(self) -> Any:
        return type(self._tp_real)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        self._tp_real.__class__ = value

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self._tp_real.__dict__

    def __dir__(self) -> list[str]:
        return dir(self._tp_real)

    def __repr__(self) -> str:
        return repr(self._tp_real)

    def __str__(self) -> str:
        return str(self._tp_real)

    def __eq__(self, other: object) -> bool:
        return bool(self._tp_real == _real(other))

    def __hash__(self) -> int:
        return hash(self._tp_real)

    def __bool__(self) -> bool:
        return bool(self._tp_real)

    def __len__(self) -> int:
        return len(self._tp_real)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tp_real)

    def __contains__(self, item: object) -> bool:
        return item in self._tp_real

    def __getitem__(self, key: Any) -> Any:
        found = _class_attribute(type(self._tp_real), "__getitem__")
        return found(self, key) if isinstance(found, FunctionType) else self._tp_real[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tp_real[key] = value

    def __copy__(self) -> Any:
        return copy.copy(self._tp_real)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._tp_real, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _real, (self._tp_real,)


def _real(value: Any) -> Any:
    """The object itself, or the real one under an overlay."""
    return value._tp_real if type(value) is Overlay else value


def _class_attribute(cls: type, name: str) -> Any:
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
