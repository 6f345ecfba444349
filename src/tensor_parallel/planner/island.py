"""An island: the stretch of a forward in which some leaves are cut, and what its exactness takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tensor_parallel.planner.index_types import Dim
from tensor_parallel.planner.records import ModuleCall, Op, Trace, Value

State = Literal["shard", "partial"]
Side = Literal["in", "out"]
Place = tuple[str, Side, str]
"""(module, side, path): one border that one tensor crosses."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A tensor lies as `state` for operators from `start` to `stop`, because of a border of module call `call`."""

    start: int
    stop: int
    state: State | None
    call: int
    side: Side


Conversions = dict[int, list[Conversion]]
"""By the value's number."""


@dataclass
class Island:
    """A candidate that holds: what is cut, and what its exactness takes.

    states: of every tensor that is not replicated as it is made.
    places: borders where ranks talk or slice.  biases: parameters that rank 0 alone uses.
    lookups: embedding operators whose rows are cut.  local: values made from sizes that must be local.
    dims: of constants that are sliced here, as what they meet.
    meetings: (value, operator) where a whole tensor meets cut ones, so that ranks have parts of its gradient.
    """

    cut: frozenset[Dim]
    states: dict[int, State]
    places: dict[Place, Literal["all_reduce", "all_gather", "slice"]]
    parameters: list[str]
    biases: set[str]
    lookups: list[Op]
    local: set[int]
    conversions: Conversions
    dims: dict[int, list[Dim]]
    meetings: set[tuple[int, int]]

    def state_at(self, value: int, op: int) -> State | None:
        """The value's state as the operator `op` meets it."""
        for conversion in reversed(self.conversions.get(value, ())):
            if conversion.start <= op < conversion.stop:
                return conversion.state
        return self.states.get(value)

    def crossings(self) -> Iterator[tuple[int, Conversion]]:
        """(value, conversion) of every tensor that enters a module call as a slice."""
        for value, conversions in self.conversions.items():
            yield from ((value, conversion) for conversion in conversions if conversion.state == "shard")

    def computes_whole(self) -> bool:
        """Whether a stretch in the middle is gathered and sliced again: every rank computes all of it."""
        return {"all_gather", "slice"} <= set(self.places.values())

    def touched(self) -> set[int]:
        """Every value that is not replicated somewhere."""
        return set(self.states) | {value for value, _ in self.crossings()}


def learns(value: Value) -> bool:
    """Whether a gradient may go back through the value to more than a parameter itself."""
    return not value.constant and value.parameter is None and value.dtype.is_floating_point


def border_state(
    trace: Trace, states: dict[int, State], conversions: Conversions, value: int, call: ModuleCall, side: Side
) -> State | None:
    """How a value lies just outside the entry of a module call, or just inside its exit. Several calls may begin or end
    between the same two operators: inner borders lie behind outer entries, outer borders behind inner exits."""
    at = call.first_op if side == "in" else call.last_op
    around = {above.index for above in trace.enclosing(call.index)}
    for conversion in reversed(conversions.get(value, ())):
        own = conversion.call == call.index and conversion.side == side
        if own or not conversion.start <= at < conversion.stop:
            continue
        inner = conversion.call not in around and call.index in {c.index for c in trace.enclosing(conversion.call)}
        if side == "in" and conversion.side == "in" and inner:
            continue
        if side == "out" and conversion.side == "out" and conversion.call in around:
            continue
        return conversion.state
    return states.get(value)


def inner_state(trace: Trace, island: Island, value: int, call: ModuleCall, at: int) -> State | None:
    """How a value lies where the code of a module call itself meets it, before the operator `at`."""
    around = {above.index for above in trace.enclosing(call.index)} | {call.index}
    for conversion in reversed(island.conversions.get(value, ())):
        inside = conversion.call in around
        if conversion.start <= at <= conversion.stop and inside == (conversion.side == "in"):
            return conversion.state
    return island.states.get(value)
