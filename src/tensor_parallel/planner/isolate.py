"""One module's calls as a trace of their own.

Where the dims of a whole model leave a parameter no way to be cut (a layer whose outputs are its inputs' units), its
module may still be cut by itself: what enters is whole, what leaves is gathered at the module's border.
"""

from __future__ import annotations

from typing import Any

from tensor_parallel.planner.effects import Rules, infer
from tensor_parallel.planner.graph import Graph
from tensor_parallel.planner.records import FunctionCall, ModuleCall, Op, Trace, Value, replaced


def closed(graph: Graph, name: str) -> bool:
    """Whether the module's parameters are used in its own calls alone, and in no fused path."""
    trace = graph.trace
    spans = [(call.first_op, call.last_op) for call in graph.calls.get(name, ())]
    own = _own_parameters(graph, name)
    return bool(own and spans) and all(
        value.parameter not in trace.opaque
        and all(any(a <= op < b for a, b in spans) for op in graph.consumers.get(value.index, ()))
        for value in own
    )


def _own_parameters(graph: Graph, name: str) -> list[Value]:
    prefix = f"{name}." if name else ""
    module = graph.modules[name]
    own = {f"{prefix}{key}" for key in module._parameters}
    return [value for key, value in graph.trace.parameters.items() if key in own]


def isolated(graph: Graph, name: str, rules: Rules) -> Graph:
    """The calls of module `name` as a graph whose values keep their numbers and get dims anew."""
    return _Copy(graph).of(name, rules)


class _Copy:
    def __init__(self, graph: Graph) -> None:
        self.source = graph.trace
        self.graph = graph
        self.values: dict[int, Value] = {}
        self.trace = Trace(recorder=graph.trace.recorder, opaque=graph.trace.opaque, paths=graph.trace.paths)
        self.module_calls: dict[int, int] = {}
        self.function_calls: dict[int, int] = {}

    def value(self, value: Value) -> Value:
        twin = self.values.get(value.index)
        if twin is None:
            twin = Value(
                value.index, value.shape, value.dtype, value.parameter, value.is_buffer, value.constant, None, []
            )
            self.values[value.index] = twin
            if value.parameter is not None:
                self.trace.parameters[value.parameter] = twin
        return twin

    def tree(self, tree: Any) -> Any:
        return replaced(tree, self.value, Value)

    def of(self, name: str, rules: Rules) -> Graph:
        for root in self.graph.calls[name]:
            inner = [
                call
                for call in self.source.module_calls
                if root.first_op <= call.first_op and call.last_op <= root.last_op and call.index >= root.index
                if any(above.index == root.index for above in self.source.enclosing(call.index))
            ]
            for call in inner:
                self.module_calls[call.index] = len(self.module_calls)
            offset = len(self.trace.ops) - root.first_op
            for op in self.source.ops[root.first_op : root.last_op]:
                self._op(op, offset)
            for call in inner:
                self._module_call(call, root, offset)
        self.trace.sizes = {i: self.values.get(i, value) for i, value in self.source.sizes.items()}
        effects = infer(self.trace.ops, rules)
        return Graph.of(self.trace, effects, self.graph.modules)

    def _op(self, op: Op, offset: int) -> None:
        twin = Op(
            op.index + offset,
            op.name,
            self.tree(op.args),
            self.tree(op.kwargs),
            [self.value(value) for value in op.outputs],
            self.module_calls[op.module_call],
            None,
            op.overload,
        )
        for output in twin.outputs:
            output.producer = twin.index
        self.trace.ops.append(twin)
        if op.function_call is not None and op.function_call not in self.function_calls:
            self.function_calls[op.function_call] = len(self.trace.function_calls)
            self._function_call(self.source.function_calls[op.function_call], twin)

    def _function_call(self, call: FunctionCall, op: Op) -> None:
        twin = FunctionCall(len(self.trace.function_calls), call.name, (), {}, op.module_call)
        twin.args, twin.kwargs, twin.outputs = self.tree(call.args), self.tree(call.kwargs), self.tree(call.outputs)
        twin.integers, twin.method, twin.owner, twin.position = call.integers, call.method, call.owner, call.position
        twin.at, twin.is_method = op.index, call.is_method
        self.trace.function_calls.append(twin)

    def _module_call(self, call: ModuleCall, root: ModuleCall, offset: int) -> None:
        twin = ModuleCall(
            self.module_calls[call.index],
            call.name,
            call.number,
            None if call.index == root.index or call.parent is None else self.module_calls[call.parent],
            call.trace,
            call.first_op + offset,
            call.last_op + offset,
            {path: self.value(value) for path, value in call.inputs.items()},
            {path: self.value(value) for path, value in call.outputs.items()},
        )
        self.trace.module_calls.append(twin)
