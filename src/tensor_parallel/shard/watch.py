"""Whether a module that was split for one process still is what it was split as."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import nn

from tensor_parallel.errors import PlanError
from tensor_parallel.shard.routes import Routes
from tensor_parallel.shard.survey import Survey

_SAME_PATH = frozenset({"gradient_checkpointing"})
"""What decides how a path is gone along, not which: torch recomputes what it did."""


class Watch:
    """Whether the tree is still what was split. Kept by the root's slot: nothing in it may keep the root alive."""

    def __init__(self, root: nn.Module, reads: Mapping[str, bool]) -> None:
        self._root = weakref.ref(root)
        self._survey, self._shapes = Survey(root), _shapes(root)
        self.routes = Routes(root, {name: any_ for name, any_ in reads.items() if name not in _SAME_PATH})
        self._before = self.routes.snapshot(root)

    def check(self) -> None:
        """Raise PlanError where parameters were added, removed or exchanged for others of another shape, or where what
        the planned forward read is set to something else."""
        root = self._root()
        if root is None:
            return
        cure = "change the module first, then call make_distributed_shard"
        if self.routes.stale():
            found = self.routes.since(root, self._before)
            if found:
                raise PlanError(f"{'; '.join(found)}, and this rank's part was planned for what it was; {cure}")
            self.routes.differences()  # set, and back to what it was
        if self._survey.is_stale():
            now = _shapes(root)
            for name in dict.fromkeys([*self._shapes, *now]):
                if self._shapes.get(name) != now.get(name):
                    was, is_now = (_shape_text(shapes.get(name)) for shapes in (self._shapes, now))
                    raise PlanError(f"{name} was {was} when this rank's part was made and is {is_now} now; {cure}")
            self._survey.renew()


def _shape_text(shape: torch.Size | None) -> str:
    return "absent" if shape is None else f"of shape {tuple(shape)}"


def _shapes(root: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in root.named_parameters(remove_duplicate=False)}
