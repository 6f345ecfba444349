"""A typed trace with the indices that simulation needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from tensor_parallel.planner.effects import Effect
from tensor_parallel.planner.index_types import Dim, leaves
from tensor_parallel.planner.records import ModuleCall, Trace, Value


@dataclass(eq=False)
class Graph:
    """consumers: operators by the value that they read.  exits, entries: module borders by the value that crosses.
    calls: by module.  by_leaf: parameters and buffers by leaf.  live: operators whose outputs somebody reads."""

    trace: Trace
    effects: list[Effect]
    modules: dict[str, nn.Module]
    consumers: dict[int, list[int]] = field(default_factory=dict)
    exits: dict[int, list[tuple[ModuleCall, str]]] = field(default_factory=dict)
    entries: dict[int, list[tuple[ModuleCall, str]]] = field(default_factory=dict)
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)
    by_leaf: dict[Dim, list[Value]] = field(default_factory=dict)
    live: list[bool] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    _leaves: dict[int, frozenset[Dim]] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, effects: list[Effect], modules: dict[str, nn.Module]) -> Graph:
        graph = cls(trace, effects, modules)
        graph.values = {value.index: value for op in trace.ops for value in (*op.inputs(), *op.outputs)}
        for op in trace.ops:
            for value in op.inputs():
                graph.consumers.setdefault(value.index, []).append(op.index)
        for call in trace.module_calls:
            graph.calls.setdefault(call.name, []).append(call)
            for path, value in call.inputs.items():
                graph.entries.setdefault(value.index, []).append((call, path))
            for path, value in call.outputs.items():
                graph.exits.setdefault(value.index, []).append((call, path))
        graph.index_leaves()
        graph.live = graph._live()
        return graph

    def index_leaves(self) -> None:
        """Again, after leaves have become one."""
        self.by_leaf = {}
        self._leaves.clear()
        for value in self.trace.parameters.values():
            for node in dict.fromkeys(n for dim in value.dims for n in leaves(dim)):
                self.by_leaf.setdefault(node, []).append(value)

    def _live(self) -> list[bool]:
        """Operators whose outputs somebody reads, or that have none."""
        read = {v.index for call in self.trace.module_calls for v in call.outputs.values()}
        live = [False] * len(self.trace.ops)
        for op in reversed(self.trace.ops):
            if not op.outputs or any(o.index in read for o in op.outputs):
                live[op.index] = True
                read.update(v.index for v in op.inputs())
        return live

    def has(self, value: Value, cut: frozenset[Dim]) -> bool:
        """Whether one of the leaves occurs in the value's dims."""
        found = self._leaves.get(value.index)
        if found is None:
            found = frozenset(node for dim in value.dims for node in leaves(dim))
            self._leaves[value.index] = found
        return not cut.isdisjoint(found)
