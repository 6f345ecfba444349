"""What a rank's own forward is: with its random calls known, and with the integers that its code reads made its own
(attributes, size arguments of calls, an embedding's padding index)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from tensor_parallel.layout import Cuts, local_size, runs
from tensor_parallel.plan import ModulePlan
from tensor_parallel.shard.attributes import Active, local_attributes
from tensor_parallel.shard.call_sites import TABLE, call_sizes, with_local_sizes
from tensor_parallel.shard.hand_rules import local_attribute_values


def local_forward(base: type[nn.Module], plan: ModulePlan) -> Callable[..., Any]:
    """The module's own forward, its planned call sites taking local sizes."""
    sites = [site for site in plan.call_sites if site.method == "forward"]
    forward = with_local_sizes(base.forward, sites) if sites else base.forward
    if plan.draws:
        forward = _drawing(forward)
    return _looking_up(forward) if plan.lookups else forward


def _drawing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose random calls are those that the module's plan knows."""

    @functools.wraps(forward)
    def drawing(module: Any, *args: Any, **kwargs: Any) -> Any:
        with module.__dict__["_tp_slot"].drawing():
            return forward(module, *args, **kwargs)

    return drawing


def _looking_up(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An embedding's forward, within which alone its padding index is the rank's own: other code compares whole ids."""

    @functools.wraps(forward)
    def looked_up(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.__dict__["_tp_looking_up"] = True
        try:
            return forward(module, *args, **kwargs)
        finally:
            module.__dict__["_tp_looking_up"] = False

    return looked_up


def local_methods(base: type[nn.Module], plan: ModulePlan) -> dict[str, Callable[..., Any]]:
    """The other methods with call sites: they take local sizes where a rank calls them."""
    names = dict.fromkeys(site.method for site in plan.call_sites if site.method != "forward")
    return {name: _local_method(base, name, plan) for name in names}


def _local_method(base: type[nn.Module], name: str, plan: ModulePlan) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(base, name)
    local = with_local_sizes(original, [site for site in plan.call_sites if site.method == name])

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside = self._tp_slot.rank_here() is not None
        return (local if inside else original)(self, *args, **kwargs)

    return method


def localise_sizes(
    module: nn.Module, own_class: type[nn.Module], plan: ModulePlan, rank: int, cuts: Cuts, active: Active
) -> None:
    """Make `module`, of the class `own_class` made for it, read `rank`'s own integers while a rank runs it, which
    `active` tells."""
    sizes = {item.attribute: local_size(item.layout, cuts, rank) for item in plan.attributes}
    local_attributes(module, {**sizes, **local_attribute_values(module, plan, rank)}, active)
    if plan.call_sites:
        module.__dict__[TABLE] = call_sizes(plan.call_sites, cuts, rank)
    for lookup in plan.lookups:
        if getattr(module, "padding_idx", None) is not None:
            _localise_padding(module, own_class, runs(lookup.rows, cuts, rank))


class _PaddingIndex:
    """`padding_idx`: the whole vocabulary's for everybody, in the embedding's own forward the rank's row (None: another
    rank's)."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        values = module.__dict__
        return values["_tp_padding" if values.get("_tp_looking_up") and "_tp_padding" in values else "padding_idx"]

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__["padding_idx"] = value


def _localise_padding(module: nn.Module, own_class: type[nn.Module], ranges: list[tuple[int, int]]) -> None:
    whole: Any = module.padding_idx
    local, offset = None, 0
    for start, stop in ranges:
        if start <= whole < stop:
            local = whole - start + offset
        offset += stop - start
    module.__dict__["_tp_padding"] = local
    if "padding_idx" not in own_class.__dict__:
        own_class.padding_idx = _PaddingIndex()  # type: ignore[attr-defined]
