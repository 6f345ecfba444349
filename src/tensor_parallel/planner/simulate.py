"""Simulate the forward with some leaves cut: which tensors become shards, which partial sums, and at which modules'
borders the ranks have to talk so that the result is exact. Anything that cannot be shown exact fails the candidate."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from torch import nn

from tensor_parallel.planner.effects import Effect
from tensor_parallel.planner.graph import Graph
from tensor_parallel.planner.index_types import Dim, find, leaves
from tensor_parallel.planner.island import Conversion, Conversions, Island, Place, State, border_state, learns
from tensor_parallel.planner.records import Op, Value

MAX_PLACES = 256
MAX_GATHERS = 2


class Fails(Exception):
    """The leaves cannot be cut exactly; the text says where."""


class _Needs(Exception):
    """A tensor must be made whole, or sliced, before an operator."""

    def __init__(self, action: Literal["whole", "slice"], value: Value, op: int, why: str) -> None:
        super().__init__(why)
        self.action, self.value, self.op, self.why = action, value, op, why


def dim_has(dim: Dim, cut: frozenset[Dim]) -> bool:
    return any(node in cut for node in leaves(dim))


class Simulation:
    """One run over the region of the cut leaves, started again each time a border is added."""

    def __init__(self, graph: Graph, cut: Iterable[Dim], *, eager: bool = True) -> None:
        self.graph = graph
        self.cut = frozenset(find(node) for node in cut)
        self.eager = eager
        self.places: dict[Place, Literal["all_reduce", "all_gather", "slice"]] = {}
        self.local: set[int] = set()
        self.dims: dict[int, list[Dim]] = {}

    def _said(self, op: Op) -> str:
        """An operator for people: what it is and in which module."""
        name = op.name.removeprefix("aten.").partition(".")[0].strip("_")
        module = self.graph.trace.module_calls[op.module_call].name
        return f"{name} in {module!r}" if module else name

    def _has(self, value: Value) -> bool:
        dims = self.dims.get(value.index)
        return self.graph.has(value, self.cut) if dims is None else any(dim_has(dim, self.cut) for dim in dims)

    def run(self) -> Island:
        """Raises Fails."""
        for _ in range(MAX_PLACES):
            try:
                return self._forward()
            except _Needs as need:
                if need.action == "slice":
                    self._slice(need)
                else:
                    self._make_whole(need)
        raise Fails(f"more than {MAX_PLACES} borders")

    # --- states ---------------------------------------------------------------------------------------------------

    def _conversions(self) -> Conversions:
        found: Conversions = {}
        last = len(self.graph.trace.ops) + 1
        for (name, side, path), kind in self.places.items():
            for call in self.graph.calls[name]:
                value = (call.inputs if side == "in" else call.outputs).get(path)
                if value is None:
                    continue
                span = (call.first_op, call.last_op) if side == "in" else (call.last_op, last)
                state: State | None = "shard" if kind == "slice" else None
                found.setdefault(value.index, []).append(Conversion(*span, state, call.index, side))
        return found

    def _state(self, value: Value, at: int) -> State | None:
        for conversion in reversed(self.conversions.get(value.index, ())):
            if conversion.start <= at < conversion.stop:
                return conversion.state
        return self.states.get(value.index)

    def _forward(self) -> Island:
        graph = self.graph
        self._begin()
        cut_parameters = list({v.index: v for node in self.cut for v in graph.by_leaf.get(node, ())}.values())
        for value in cut_parameters:
            self._check_parameter(value)
            self.states[value.index] = "shard"
        for index in self.local:
            self.states[index] = "shard"
        for index in (*(v.index for v in cut_parameters), *self.local, *self.conversions):
            self._wake(index)
        while self.todo:
            op = graph.trace.ops[heapq.heappop(self.todo)]
            if graph.live[op.index]:
                self._set_outputs(op, self._apply(op, graph.effects[op.index]))
            else:
                self._check_dead(op)
        self._check_outputs()
        self._check_places()
        self._check_biases()
        self._check_lookups()
        return Island(
            self.cut,
            self.states,
            dict(self.places),
            [v.parameter for v in cut_parameters if v.parameter is not None],
            self.biases,
            self.lookups,
            set(self.local),
            self.conversions,
            dict(self.dims),
            self.meetings,
        )

    def _begin(self) -> None:
        self.states: dict[int, State] = {}
        self.conversions = self._conversions()
        self.biases: set[str] = set()
        self.lookups: list[Op] = []
        self.meetings: set[tuple[int, int]] = set()
        self.used_as_bias: set[tuple[int, int]] = set()
        self.todo: list[int] = []
        self.seen: set[int] = set()

    def _check_dead(self, op: Op) -> None:
        """What nobody reads may come out wrong, but it runs: shapes must fit."""
        before = (set(self.biases), set(self.used_as_bias), list(self.lookups))
        try:
            self._set_outputs(op, self._apply(op, self.graph.effects[op.index]))
        except Fails:
            pass
        except _Needs as need:
            if need.action == "slice":
                raise
        self.biases, self.used_as_bias, self.lookups = before

    def _wake(self, value: int) -> None:
        """Operators run in the order of the trace, each once: what they read is settled by then."""
        for op in self.graph.consumers.get(value, ()):
            if op not in self.seen:
                self.seen.add(op)
                heapq.heappush(self.todo, op)

    def _set_outputs(self, op: Op, state: State | None) -> None:
        for output in op.outputs:
            if state == "shard":
                self._check_once(op, output)
            if output.index in self.local:
                if state == "partial":
                    raise Fails(f"{self._said(op)} makes a local tensor out of a partial sum")
                self.states[output.index] = "shard"
            elif state is not None and (state == "partial" or self._has(output)):
                self.states[output.index] = state
            if output.index in self.states:
                self._wake(output.index)

    def _check_once(self, op: Op, value: Value) -> None:
        """Ranks hold the blocks on a diagonal where the same units stand twice in a tensor, not slices of it."""
        if not self._has(value):
            return
        for node in self.cut:
            rows = [[sum(n is node for n in row) for row in _segments(dim)] for dim in value.dims]
            if sum(any(row) for row in rows) > 1 or any(count > 1 for row in rows for count in row):
                raise Fails(f"{self._said(op)} gives a tensor that has the same units twice")

    def _check_parameter(self, value: Value) -> None:
        for dim in value.dims:
            seen = [node for node in leaves(dim) if node in self.cut]
            segments = _segments(dim)
            if any(len([n for n in leaves_ if n is node]) > 1 for leaves_ in segments for node in set(seen)):
                raise Fails(f"{value.parameter} holds a unit twice in one dim")
        cut_dims = [dim for dim in value.dims if dim_has(dim, self.cut)]
        if len(cut_dims) > 1:
            raise Fails(f"{value.parameter} would be cut along two of its dims by the same units")
        for segment in _segments(cut_dims[0]):
            if len(self.cut & set(segment)) == 0:
                raise Fails(f"a segment of {value.parameter} is not cut")
        if (reason := self.graph.trace.opaque.get(value.parameter or "")) is not None:
            raise Fails(f"{value.parameter}: {reason}")

    # --- one operator ---------------------------------------------------------------------------------------------

    def _apply(self, op: Op, effect: Effect) -> State | None:
        inputs = [(value, self._state(value, op.index)) for value in op.inputs()]
        if all(state is None for _, state in inputs):
            return None
        partial = [value for value, state in inputs if state == "partial"]
        shards = [value for value, state in inputs if state == "shard"]
        for value in shards:
            self._check_constant(op, effect, value)
        if effect.shape_only:
            return "shard" if shards else None
        if effect.all_blocked:
            raise _Needs("whole", (partial + shards)[0], op.index, f"{self._said(op)} needs whole tensors")
        state = (
            self._partial(op, effect, inputs, partial, shards) if partial else self._shards(op, effect, inputs, shards)
        )
        self.meetings.update((value.index, op.index) for value, its in inputs if its is None and learns(value))
        return state

    def _check_constant(self, op: Op, effect: Effect, value: Value) -> None:
        """A constant is cut as what it met elsewhere: operators that know nothing of that would take it for whole."""
        dims = self.dims.get(value.index, value.dims)
        for i, dim in enumerate(dims):
            own = {node for node in leaves(dim) if node in self.cut}
            met = [as_ for v, j, as_ in effect.sliced if v is value and j % len(value.shape) == i]
            fits = all(own == {node for node in leaves(as_) if node in self.cut} for as_ in met)
            if not fits or (own and not met and dims is not value.dims):
                raise Fails(f"{self._said(op)} takes a constant that is sliced elsewhere")

    def _partial(
        self,
        op: Op,
        effect: Effect,
        inputs: list[tuple[Value, State | None]],
        partial: list[Value],
        shards: list[Value],
    ) -> State:
        why = f"{self._said(op)} cannot take a partial sum"
        others = [value for value, state in inputs if state is None]
        if shards or effect.linear == "none":
            raise _Needs("whole", partial[0], op.index, why)
        if effect.linear == "joint":
            for value in others:
                self._add_bias(op, value, partial[0])
            return "partial"
        if len(partial) > 1 or (effect.linear == "first" and partial[0] is not inputs[0][0]):
            raise _Needs("whole", partial[0], op.index, why)
        if partial[0] in effect.bias:
            # The product of whole tensors beside it would be added on every rank.
            raise _Needs("whole", partial[0], op.index, why)
        for value in effect.bias:
            self._add_bias(op, value, partial[0])
        return "partial"

    def _shards(
        self, op: Op, effect: Effect, inputs: list[tuple[Value, State | None]], shards: list[Value]
    ) -> State | None:
        for dim in effect.blocked:
            for value in shards:
                if dim_has(dim, self.cut) and has_dim(self.dims.get(value.index, value.dims), dim, self.cut):
                    raise _Needs("whole", value, op.index, f"{self._said(op)} mixes the units")
        for value, index, as_ in effect.sliced:
            if not dim_has(as_, self.cut):
                continue
            self.dims.setdefault(value.index, list(value.dims))[index] = as_
            if self._state(value, op.index) is None:
                raise _Needs("slice", value, op.index, f"{self._said(op)} needs a slice of a constant")
        if effect.lookup is not None and dim_has(effect.lookup[2], self.cut):
            return self._lookup(op, effect)
        contracted = [dim for dim in effect.contracted if dim_has(dim, self.cut)]
        for value, state in inputs:
            if state is None and self._has(value) and not (contracted and value in effect.bias):
                raise _Needs("slice", value, op.index, f"{self._said(op)} needs a slice")
        return self._contract(op, effect, contracted) if contracted else "shard"

    def _contract(self, op: Op, effect: Effect, contracted: list[Dim]) -> State:
        for dim in contracted:
            for segment in _segments(dim):
                if self.cut - set(segment):
                    raise Fails(f"{self._said(op)} sums over a dim of which a segment is not cut")
        if any(self._has(output) for output in op.outputs):
            raise Fails(f"{self._said(op)} sums over cut units and keeps them")
        for value in effect.bias:
            self._add_bias(op, value, None)
        return "partial"

    def _lookup(self, op: Op, effect: Effect) -> State:
        weight, ids, _ = effect.lookup  # type: ignore[misc]
        call = self.graph.trace.module_calls[op.module_call]
        module = self.graph.modules[call.name]
        plain = (
            isinstance(module, nn.Embedding)
            and module.max_norm is None
            and not module.scale_grad_by_freq
            and not module.sparse
            and any(value is ids for value in call.inputs.values())
        )
        if not plain:
            raise Fails(f"the lookup of {weight.parameter} is not that of a plain nn.Embedding called with the ids")
        self.lookups.append(op)
        return "partial"

    def _add_bias(self, op: Op, value: Value, partial: Value | None) -> None:
        """A whole term added to a partial sum must be added once: by rank 0, if it is a parameter."""
        source, via = value, op.index
        while source.parameter is None:
            self.used_as_bias.add((source.index, via))
            producer = None if source.producer is None else self.graph.trace.ops[source.producer]
            if producer is None or not _is_view(producer):
                if partial is None:
                    raise Fails(f"{self._said(op)} adds a tensor that is no parameter to a partial sum")
                raise _Needs("whole", partial, op.index, f"{self._said(op)} adds a whole tensor")
            source, via = producer.inputs()[0], producer.index
        if partial is not None and (source.is_buffer or self._has(source)):
            raise _Needs("whole", partial, op.index, f"{self._said(op)} adds {source.parameter}")
        if source.is_buffer or self._has(source):
            raise Fails(f"{self._said(op)} adds {source.parameter} to a partial sum")
        self.used_as_bias.add((source.index, via))
        self.biases.add(source.parameter)

    # --- borders --------------------------------------------------------------------------------------------------

    def _chain(self, value: Value, state: State) -> Iterator[Value]:
        """The value and what it came from in the same state, nearest first."""
        seen = {value.index}
        todo = [value]
        while todo:
            at = todo.pop(0)
            yield at
            if at.producer is None:
                continue
            for source in self.graph.trace.ops[at.producer].inputs():
                if source.index not in seen and source.parameter is None and self._state(source, at.producer) == state:
                    seen.add(source.index)
                    todo.append(source)

    def _make_whole(self, need: _Needs) -> None:
        state = self._state(need.value, need.op)
        assert state is not None
        kind: Literal["all_reduce", "all_gather"] = "all_reduce" if state == "partial" else "all_gather"
        found: list[tuple[int, int, Place]] = []
        for value in self._chain(need.value, state):
            for call, path in self.graph.exits.get(value.index, ()):
                if not call.first_op <= need.op < call.last_op:
                    made = -1 if value.producer is None else value.producer
                    found.append((made, -call.index, (call.name, "out", path)))
        if not found:
            raise Fails(f"{need.why}, and no module's border lies before it")
        origin = (min if self.eager else max)(made for made, _, _ in found)
        # Of several modules that hand out the same tensor, the innermost (called last): its callers see the whole.
        place: Place = min(item for item in found if item[0] == origin)[2]
        if place in self.places:
            raise Fails(f"{need.why}, even where {_border(place)} is whole")
        self.places[place] = kind
        if sum(k == "all_gather" for k in self.places.values()) > MAX_GATHERS:
            raise Fails(f"more than {MAX_GATHERS} gathers")

    def _slice(self, need: _Needs) -> None:
        value = need.value
        for call, path in reversed(self.graph.entries.get(value.index, ())):
            if call.first_op <= need.op < call.last_op:
                place: Place = (call.name, "in", path)
                if place in self.places:
                    raise Fails(f"{need.why}, even where {_border(place)} is sliced")
                self.places[place] = "slice"
                return
        producer = None if value.producer is None else self.graph.trace.ops[value.producer]
        if producer is None:
            raise Fails(f"{need.why}, and it enters no module there")
        effect = self.graph.effects[producer.index]
        if effect.fresh and self._makes(producer, value):
            if value.index in self.local:
                raise Fails(need.why)
            self.local.add(value.index)
            return
        if effect.all_blocked or any(dim_has(d, self.cut) for d in (*effect.blocked, *effect.contracted)):
            raise Fails(f"{need.why}, and {self._said(producer)} mixes what must be sliced")
        inputs = [v for v in producer.inputs() if self._has(v)]
        before = [v for v in inputs if self._state(v, producer.index) is None]
        if not before:
            raise Fails(f"{need.why}, and {self._said(producer)} makes it whole")
        self._slice(_Needs("slice", before[0], producer.index, need.why))

    def _makes(self, producer: Op, value: Value) -> bool:
        """Whether the operator makes every cut dim of its output from sizes (an expand hands the others on)."""
        dims = self.dims.get(value.index, value.dims)
        for source in producer.inputs():
            new = len(value.shape) - len(source.shape)
            for i, dim in enumerate(dims):
                if dim_has(dim, self.cut) and i >= new and source.shape[i - new] != 1:
                    return False
        return True

    # --- the end --------------------------------------------------------------------------------------------------

    def _check_outputs(self) -> None:
        last = len(self.graph.trace.ops)
        for call in self.graph.trace.roots():
            for value in call.outputs.values():
                if self._state(value, last) is not None:
                    raise _Needs("whole", value, last, "the model hands it out")

    def _check_places(self) -> None:
        """A border is the same at every call of its module."""
        wanted = {"all_reduce": "partial", "all_gather": "shard", "slice": None}
        for (name, side, path), kind in self.places.items():
            for call in self.graph.calls[name]:
                value = (call.inputs if side == "in" else call.outputs).get(path)
                if value is None:
                    continue
                state = border_state(self.graph.trace, self.states, self.conversions, value.index, call, side)
                if state != wanted[kind]:
                    raise Fails(f"calls of {name!r} differ: {path!r} is {state or 'replicated'}, not {wanted[kind]}")

    def _check_lookups(self) -> None:
        """A module whose ids are shifted is called for lookups alone."""
        calls = self.graph.trace.module_calls
        looked_up = {op.module_call for op in self.lookups}
        for name in {calls[index].name for index in looked_up}:
            if any(call.index not in looked_up for call in self.graph.calls[name]):
                raise Fails(f"{name!r} is called with ids and with other inputs")

    def _check_biases(self) -> None:
        """Rank 0 alone uses a bias: every use of it must be one that adds it to a partial sum."""
        for key in self.biases:
            todo = [self.graph.trace.parameters[key]]
            while todo:
                value = todo.pop()
                for index in self.graph.consumers.get(value.index, ()):
                    if (value.index, index) not in self.used_as_bias and self.graph.live[index]:
                        raise Fails(f"{key} is added to a partial sum and used elsewhere")
                    op = self.graph.trace.ops[index]
                    if _is_view(op):
                        todo += op.outputs


def has_dim(dims: Sequence[Dim], dim: Dim, cut: frozenset[Dim]) -> bool:
    """Whether one of the cut leaves of `dim` occurs in `dims`."""
    wanted = {node for node in leaves(dim) if node in cut}
    return any(node in wanted for own in dims for node in leaves(own))


def _border(place: Place) -> str:
    name, side, path = place
    return f"{'input' if side == 'in' else 'output'} {path}".rstrip() + f" of {name or 'the model'!r}"


_VIEWS = (
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "unsqueeze",
    "squeeze",
    "alias",
    "t",
    "transpose",
    "permute",
    "_to_copy",
)


def _is_view(op: Op) -> bool:
    return op.name.startswith("aten.") and op.name.split(".")[1] in _VIEWS


def _segments(dim: Dim) -> list[list[Dim]]:
    """The leaves of each segment of a dim."""
    node = find(dim)
    if node.kind == "sum":
        return [row for part in node.parts for row in _segments(part)]
    if node.kind == "leaf":
        return [[node]]
    rows: list[list[Dim]] = [[]]
    for part in node.parts:
        rows = [row + tail for row in rows for tail in _segments(part)]
    return rows
