"""The classes that modules of split models get: their own, with what a rank does in the forward's place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tensor_parallel.plan import ModulePlan
from tensor_parallel.shard.assembly import reading
from tensor_parallel.shard.shards import slot_of
from tensor_parallel.shard.sizes import local_forward, local_methods

Outside = Callable[[nn.Module, Any, tuple[Any, ...], dict[str, Any]], Any]
"""(module, its slot, args, kwargs) -> what a call of the module from outside of its ranks gives."""


class Swapped(nn.Module):
    """Among the first bases of every class made for a split model's modules."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Stops the original class's own hook: it must not wrap the methods a second time."""


class ClassTable:
    """The classes of one split model, each made once.  outside: what a call from outside does."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._made: dict[Any, tuple[type[nn.Module], Callable[..., Any]]] = {}

    def of(
        self, base: type[nn.Module], plan: ModulePlan, mixins: tuple[type, ...], *, assembles: bool = False
    ) -> tuple[type[nn.Module], Callable[..., Any]]:
        """The class for modules of the class `base` with such a plan, and the forward of a rank."""
        key = (base, plan.call_sites, bool(plan.lookups), bool(plan.draws), mixins, assembles)
        if key not in self._made:
            forward = local_forward(base, plan)
            made = _split_class(base, mixins, local_methods(base, plan), forward, self._outside, assembles=assembles)
            self._made[key] = made, made.forward if _checkpoints_itself(base) else forward
        return self._made[key]


def _split_class(
    base: type[nn.Module],
    mixins: tuple[type, ...],
    methods: Mapping[str, Callable[..., Any]],
    own_forward: Callable[..., Any],
    outside: Outside,
    *,
    assembles: bool = False,
) -> type[nn.Module]:
    """`base`'s subclass for a split model, under the same name. `type(model)(config)` gives an ordinary `base`.

    methods: those that the subclass has in place of the base's.  own_forward: what a rank does.
    outside: what a call from outside does.  assembles: its modules have parameters of which each rank keeps a piece.
    """

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = slot_of(self)
        if slot is None:  # kept by a forward patched onto the instance, and the model is whole meanwhile
            return base.forward(self, *args, **kwargs)
        rank = slot.rank_here()
        if rank is None:
            return outside(self, slot, args, kwargs)
        return own_forward(self, *args, **kwargs)

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)

    namespace = {
        **methods,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__new__": new,
        "forward": forward,
        "_tp_base": base,
        **({"__getattr__": reading(base)} if assembles else {}),
    }
    meta: Any = type(base)
    made: type[nn.Module] = meta(base.__name__, (*mixins, base), namespace)
    if _checkpoints_itself(base):
        super(Swapped, made).__init_subclass__()  # type: ignore[misc]
    return made


def _checkpoints_itself(base: type[nn.Module]) -> bool:
    """Whether it is a layer of transformers whose `forward` is wrapped, for each subclass anew, in one that checkpoints
    where it is the outermost: then the split class needs the wrapper, and a rank has to go through it."""
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and issubclass(base, layers.GradientCheckpointingLayer)
