"""User hooks on modules inside a split model, called from a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tensor_parallel.shard.shards import Slot

# transformers' recording of hidden states installs these on every rank's own tree, for that rank's own outputs
_RECORDERS = frozenset({"install_output_capuring_hook.<locals>.output_capturing_hook"})


def is_recorder(hook: Any) -> bool:
    """Whether a hook is one that a model installs by itself, on each rank's tree."""
    return getattr(hook, "__qualname__", "") in _RECORDERS


def _user_hooks(module: nn.Module) -> Iterator[Any]:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if not is_recorder(hook):
            yield hook


@dataclass(slots=True)
class _Pending:
    """A forward between its hooks: the border's work must be done before they see the output."""

    slot: Slot
    elsewhere: Any
    args: Any
    output: Any = None
    forwarded: list[Any] = field(default_factory=list)

    def forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        slot, slot.pending = self.slot, None
        self.forwarded = [*args, *kwargs.values()]
        output = slot.own_forward(module, *args, **kwargs)
        self.output = output if slot.inside is None else slot.inside.leave(output, self.elsewhere)
        return self.output


def call_with_hooks(module: nn.Module, slot: Slot, args: Any, kwargs: Any) -> Any:
    """One rank's call of a module that has hooks; they run on the rank that has them, after the collectives.

    Raises:
        NotImplementedError: a hook would see one rank's part, would change the value on one rank only, or is a backward
            hook.
    """
    users = list(_user_hooks(module))
    if slot.parts and users:
        raise NotImplementedError(
            f"a hook on {slot.name} would see one rank's part ({slot.parts}); hook a module whose inputs and "
            "outputs are whole, such as the layer around it"
        )
    if module._backward_hooks or module._backward_pre_hooks:
        raise NotImplementedError(
            f"a backward hook on {slot.name}, inside a split model, would see one rank's part of the gradient; "
            "register it on the model itself, or on a parameter"
        )
    elsewhere = None
    if slot.inside is not None:
        args, kwargs, elsewhere = slot.inside.enter(args, kwargs)
    pending = _Pending(slot, elsewhere, args)
    slot.pending = pending
    try:
        result = nn.Module._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        slot.pending = None
    given = [*args, *kwargs.values()]
    replaced = len(given) != len(pending.forwarded) or any(
        a is not b for a, b in zip(given, pending.forwarded, strict=True)
    )
    if users and (replaced or result is not pending.output):
        raise NotImplementedError(
            f"a hook on {slot.name}, inside a split model, returned a value: it would change rank 0's alone; "
            "return None there, or hook the model itself"
        )
    return result
