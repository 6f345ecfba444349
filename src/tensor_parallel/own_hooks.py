"""Hooks that are a part of a model, not the user's: they stay where the user's hooks are left out."""

from __future__ import annotations

from typing import Any

# transformers' recording of hidden states installs these by itself, on each rank's own tree
_RECORDERS = frozenset({"install_output_capuring_hook.<locals>.output_capturing_hook"})


def is_recorder(hook: Any) -> bool:
    """Whether a hook is one by which a model records its outputs."""
    return getattr(hook, "__qualname__", "") in _RECORDERS


def is_own(hook: Any) -> bool:
    """Whether a hook works out a module's weights, as torch.nn.utils' weight_norm does."""
    return type(hook).__module__.startswith("torch.nn.utils.")
