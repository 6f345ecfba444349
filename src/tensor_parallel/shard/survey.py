"""Whether anything was done to a split model's modules since the last look: one pass over their dicts a call."""

from __future__ import annotations

from itertools import chain, repeat
from operator import contains, itemgetter
from typing import Any

from torch import nn

_held = itemgetter("_modules", "_parameters")
_buffers = itemgetter("_buffers")
_hooks = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Survey:
    """What stands in the modules of one visible tree.

    Kept by the root's slot, and keeps the root's dicts but not the root: `del model` must free everything at once.
    """

    __slots__ = ("_buffers_of_root", "_inner", "_known", "_known_hooks", "_of_root")

    def __init__(self, root: nn.Module) -> None:
        self._of_root, self._buffers_of_root = (root._modules, root._parameters), root._buffers
        self._inner = [vars(module) for module in root.modules() if module is not root]
        self._known = self._structure()
        self._known_hooks: Any = None

    def _structure(self) -> tuple[list[int], list[int], list[int], list[str]]:
        """Sizes, and what is in them by address (of buffers by name: the model's own code may exchange them): one of
        both changes whatever is moved."""
        held = [*self._of_root, *chain.from_iterable(map(_held, self._inner))]
        buffers = [self._buffers_of_root, *map(_buffers, self._inner)]
        return (
            list(map(len, held)),
            list(map(id, chain.from_iterable(map(dict.values, held)))),
            list(map(len, buffers)),
            list(chain.from_iterable(buffers)),
        )

    def renew(self) -> None:
        """Take what stands there now for what was split."""
        self._known = self._structure()

    def is_stale(self) -> bool:
        """Whether modules or parameters were assigned, moved or deleted since the split, buffers added or removed."""
        return self._structure() != self._known

    def hooks_changed(self, *circumstances: bool) -> bool:
        """Whether hooks were registered or removed, or forwards patched, at inner modules since this was last asked, or
        the circumstances are others."""
        keys = list(chain.from_iterable(chain.from_iterable(map(_hooks, self._inner))))  # of each handle its own
        found = keys, list(map(contains, self._inner, repeat("forward"))), circumstances
        if found == self._known_hooks:
            return False
        self._known_hooks = found
        return True
