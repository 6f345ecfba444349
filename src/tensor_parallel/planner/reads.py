"""Which plain attributes a forward reads while it is traced: set to another value later, they may send it along a path
that the plan does not know.

Not seen: what C code and other objects than modules read, and comparisons of what `math` makes of a float.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensor_parallel.planner.attributes import OWN

_NEVER = OWN | frozenset(dir(nn.Module))


@dataclass
class Reads:
    """names: of attributes that were looked at on any module, there or not.  compared: those of them whose float was
    compared with something."""

    names: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)

    def deciding(self, module: nn.Module) -> dict[str, bool]:
        """By name, whether any other value may lead elsewhere; False for floats that were only calculated with, which
        another float may replace. Names that are nothing but parameters, buffers and children are left out."""
        plain: set[str] = set()
        inside: set[str] = set()
        floats: dict[str, bool] = {}
        for part in module.modules():
            inside.update(part._parameters, part._buffers, part._modules)
            plain.update(part.__dict__)
            for name, value in part.__dict__.items():
                floats[name] = floats.get(name, True) and type(value) is float
        wanted = sorted(self.names - _NEVER - (inside - plain))
        return {name: name in self.compared or not floats.get(name, False) for name in wanted}


@contextmanager
def noted_reads(module: nn.Module, reads: Reads) -> Iterator[None]:
    """While it lasts, what any code reads of the module's and its submodules' attributes is noted in `reads`."""
    classes: dict[type, type] = {}
    swapped = []
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        swapped.append((part, type(part)))
        for name, value in part.__dict__.items():
            if type(value) is float:
                part.__dict__[name] = TrackedFloat(value, frozenset((name,)), reads)
    try:
        for part, own in swapped:
            if own not in classes:
                classes[own] = _noting(own, reads)
            part.__class__ = classes[own]
        yield
    finally:
        for part, own in swapped:
            part.__class__ = own


class _Noting(nn.Module):
    def __init_subclass__(cls, **_: Any) -> None:
        """Stops the original class's own hook: it must not wrap the methods a second time."""


def _noting(own: type[nn.Module], reads: Reads) -> type[nn.Module]:
    """`own`'s subclass under the same name, whose instances note what is read of them."""
    note, plainly = reads.names.add, own.__getattribute__

    def read(self: Any, name: str) -> Any:
        note(name)
        return plainly(self, name)

    namespace = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__getattribute__": read,
    }
    meta: Any = type(own)
    made: type[nn.Module] = meta(own.__name__, (_Noting, own), namespace)
    return made


# --- floats --------------------------------------------------------------------------------------------------------


def _calculated(compute: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def apply(self: TrackedFloat, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        names = self.names.union(*(other.names for other in others if isinstance(other, TrackedFloat)))
        plain = [float.__float__(self), *(o.__float__() if isinstance(o, TrackedFloat) else o for o in others)]
        result = compute(*(reversed(plain) if reflected else plain))
        return TrackedFloat(result, names, self.reads) if type(result) is float else result

    return apply


def _compared(name: str) -> Callable[..., Any]:
    plainly = getattr(float, name)

    def apply(self: TrackedFloat, *others: Any) -> Any:
        for value in (self, *others):
            if isinstance(value, TrackedFloat):
                value.reads.compared.update(value.names)
        return plainly(self, *others)

    return apply


class TrackedFloat(float):
    """A float that remembers from which attributes it was calculated, and notes where it is compared or rounded."""

    names: frozenset[str]
    reads: Reads

    def __new__(cls, value: float, names: frozenset[str], reads: Reads) -> TrackedFloat:
        made = super().__new__(cls, value)
        made.names, made.reads = names, reads
        return made

    def __float__(self) -> float:
        return float.__float__(self)

    def __pos__(self) -> TrackedFloat:
        return self

    __add__ = _calculated(operator.add)
    __radd__ = _calculated(operator.add, reflected=True)
    __sub__ = _calculated(operator.sub)
    __rsub__ = _calculated(operator.sub, reflected=True)
    __mul__ = _calculated(operator.mul)
    __rmul__ = _calculated(operator.mul, reflected=True)
    __truediv__ = _calculated(operator.truediv)
    __rtruediv__ = _calculated(operator.truediv, reflected=True)
    __mod__ = _calculated(operator.mod)
    __rmod__ = _calculated(operator.mod, reflected=True)
    __pow__ = _calculated(operator.pow)
    __rpow__ = _calculated(operator.pow, reflected=True)
    __neg__ = _calculated(operator.neg)
    __abs__ = _calculated(operator.abs)

    __eq__ = _compared("__eq__")
    __ne__ = _compared("__ne__")
    __lt__ = _compared("__lt__")
    __le__ = _compared("__le__")
    __gt__ = _compared("__gt__")
    __ge__ = _compared("__ge__")
    __bool__ = _compared("__bool__")
    __int__ = _compared("__int__")
    __trunc__ = _compared("__trunc__")
    __floor__ = _compared("__floor__")
    __ceil__ = _compared("__ceil__")
    __round__ = _compared("__round__")
    __floordiv__ = _compared("__floordiv__")
    __rfloordiv__ = _compared("__rfloordiv__")
    __hash__ = float.__hash__

    def __copy__(self) -> TrackedFloat:
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> TrackedFloat:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[type[float], tuple[float]]:
        return float, (float.__float__(self),)
