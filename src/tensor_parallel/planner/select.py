"""Which leaves to cut: simulate every candidate, then take the best set whose members do not clash.

One number decides: bytes on the busiest device, plus each collective at a rate of exchange stated in bytes of weights
that one would rather hold. Whatever keeps its stretch split goes before what gathers in the middle and slices again:
the ranks would all compute the same there. Ties are broken by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from tensor_parallel.planner.graph import Graph
from tensor_parallel.planner.index_types import Dim, find, leaves
from tensor_parallel.planner.island import Conversion, Island
from tensor_parallel.planner.records import Value
from tensor_parallel.planner.simulate import Fails, Simulation
from tensor_parallel.planner.sizes import Sizes, Solver, Unsolved

_WINS = "candidate %s of %d units is cut: it saves %.0f bytes a device and costs as much as %.0f"
_LOSES = "candidate %s of %d units loses: it saves %.0f bytes a device and costs as much as %.0f; %s"


@dataclass(frozen=True)
class Exchange:
    """What a collective costs, in bytes of weights on the busiest device.

    The defaults make a Llama come out as Megatron's split and let a vocabulary of 50 be split.
    """

    call: float = 256.0
    byte: float = 1 / 64


@dataclass
class Candidate:
    """A leaf (with its partner: query groups beside KV heads) and the island that cutting it makes."""

    name: str
    leaf: Dim
    island: Island
    saved: float
    cost: float
    graph: Graph
    partner: Dim | None = None
    sizes: Sizes = field(default_factory=Sizes)
    solver: Solver | None = None

    @property
    def gain(self) -> float:
        return self.saved - self.cost


def _nothing_taken() -> Taken:
    return Taken()


@dataclass
class Choice:
    """What is cut, and why the rest is not."""

    chosen: list[Candidate] = field(default_factory=list)
    reasons: dict[Dim, str] = field(default_factory=dict)
    taken: Taken = field(default_factory=_nothing_taken)


def _bytes(value: Value) -> int:
    return prod(value.shape) * value.dtype.itemsize


def _rate(graph: Graph, island: Island, units: int, world_size: int, exchange: Exchange) -> tuple[float, float]:
    busiest = -(-units // world_size) / units
    saved = sum(_bytes(graph.trace.parameters[key]) for key in island.parameters) * (1 - busiest)
    cost = 0.0
    for (name, side, path), kind in island.places.items():
        if kind == "slice":
            continue
        for call in graph.calls[name]:
            value = (call.inputs if side == "in" else call.outputs).get(path)
            if value is not None:
                cost += exchange.call + exchange.byte * _bytes(value)
    return saved, cost


def leaf_name(graph: Graph, node: Dim) -> str:
    """A name for people and for ties: the first parameter that has the leaf, and where."""
    value = graph.by_leaf[node][0]
    at = next(i for i, dim in enumerate(value.dims) if any(n is node for n in leaves(dim)))
    order = [n for n in leaves(value.dims[at])].index(node)
    return f"{value.parameter}.{at}.{order}"


def _simulate(graph: Graph, cut: tuple[Dim, ...], world_size: int, exchange: Exchange) -> tuple[Island, float, float]:
    """The cheaper of reducing as early and as late as can be."""
    found: list[tuple[float, Island, float, float]] = []
    failure = ""
    for eager in (True, False):
        try:
            island = Simulation(graph, cut, eager=eager).run()
        except Fails as error:
            failure = failure or str(error)  # not the error: its traceback would keep the module in a cycle
            continue
        saved, cost = _rate(graph, island, prod(node.size for node in cut), world_size, exchange)
        found.append((cost - saved, island, saved, cost))
        if cost < saved:
            break
    if not found:
        raise Fails(failure or "no way")
    _, island, saved, cost = min(found, key=lambda item: item[0])
    return island, saved, cost


def candidates(graph: Graph) -> Iterator[Dim]:
    """Every leaf of a parameter that has units to deal out."""
    for node, values in graph.by_leaf.items():
        if node.size > 1 and any(not value.is_buffer for value in values):
            yield node


def choose(
    graph: Graph,
    world_size: int,
    exchange: Exchange,
    solver: Solver,
    choice: Choice,
) -> None:
    """Add to the choice the candidates with the largest gain that do not clash, taken greedily."""
    found: list[Candidate] = []
    log = logging.getLogger(__name__)
    for node in candidates(graph):
        try:
            island, saved, cost = _simulate(graph, (node,), world_size, exchange)
        except Fails as error:
            choice.reasons[node] = str(error)
            log.debug("candidate %s of %d units cannot be cut: %s", leaf_name(graph, node), node.size, error)
            continue
        candidate = Candidate(leaf_name(graph, node), node, island, saved, cost, graph)
        if candidate.gain <= 0:
            worth = f"it saves {saved:.0f} bytes a device and costs as much as {cost:.0f}"
            choice.reasons[node] = f"cutting it is not worth its collectives: {worth}"
            log.debug(_LOSES, candidate.name, node.size, saved, cost, "not worth its collectives")
        else:
            found.append(candidate)
    found.sort(key=lambda c: (c.island.computes_whole(), -c.gain, c.name))
    for candidate in found:
        if find(candidate.leaf) is not candidate.leaf:
            continue
        try:
            if reason := choice.taken.clash(candidate):
                raise Fails(reason)
            _join_twins(candidate, world_size, exchange, solver, choice.taken)
            candidate.sizes = solver.solve(candidate.island, candidate.leaf, None)
            candidate.solver = solver
        except (Fails, Unsolved) as error:
            choice.reasons[candidate.leaf] = str(error)
            log.debug(
                _LOSES,
                candidate.name,
                candidate.leaf.size,
                candidate.saved,
                candidate.cost,
                choice.reasons[candidate.leaf],
            )
            continue
        log.debug(_WINS, candidate.name, candidate.leaf.size, candidate.saved, candidate.cost)
        _add_partner(candidate, solver, choice.taken)
        choice.taken.add(candidate)
        choice.chosen.append(candidate)


def _join_twins(candidate: Candidate, world_size: int, exchange: Exchange, solver: Solver, taken: Taken) -> None:
    """Cut together what the same integers count.

    Raises:
        Fails: together they cannot be cut; they are apart again then.
    """
    graph, node = candidate.graph, candidate.leaf
    joined: list[Dim] = []
    try:
        while twins := [twin for twin in solver.twins(candidate.island, node) if twin.kind == "leaf"]:
            if any(twin in taken.leaves for twin in twins):
                raise Fails("they are cut already")
            for twin in twins:
                twin.link = node
            joined += twins
            graph.index_leaves()
            candidate.island, candidate.saved, candidate.cost = _simulate(graph, (node,), world_size, exchange)
            if reason := taken.clash(candidate):
                raise Fails(reason)
    except Fails as error:
        for twin in joined:
            twin.link = None
        graph.index_leaves()
        raise Fails(f"the same integers count other units; together: {error}") from None


class Taken:
    """What the chosen candidates use: no two of them may cut one parameter or touch one tensor."""

    def __init__(self) -> None:
        self.leaves: set[Dim] = set()
        self.parameters: dict[str, str] = {}
        self.biases: dict[str, str] = {}
        self.values: dict[int, str] = {}
        self.slices: dict[int, list[tuple[Conversion, str]]] = {}
        self.places: dict[tuple[str, str, str], str] = {}

    def clash(self, candidate: Candidate) -> str:
        island = candidate.island
        for key in island.parameters:
            if other := self.parameters.get(key) or self.biases.get(key):
                return f"{key} is cut by {other} already"
        for key in island.biases:
            if other := self.parameters.get(key):
                return f"{key}, added to a partial sum, is cut by {other} already"
        # A module planned by itself takes what enters it for whole.
        entering = {v.index for call in candidate.graph.trace.roots() for v in call.inputs.values()}
        for index in island.touched() | entering:
            if other := self.values.get(index):
                return f"shares a tensor with {other}, which cuts or sums it differently"
        for index in (set(island.states) | entering) & set(self.slices):
            return f"shares a tensor with {self.slices[index][0][1]}, which slices it"
        for index, own in island.crossings():
            for taken, other in self.slices.get(index, ()):
                if own.start < taken.stop and taken.start < own.stop:
                    return f"shares a tensor with {other}, which slices it differently"
        for place in island.places:
            if other := self.places.get(place):
                return f"shares the border {place} with {other}"
        return ""

    def uses(self, keys: Iterable[str]) -> bool:
        """Whether any of these parameters is spoken for."""
        return any(key in self.parameters or key in self.biases for key in keys)

    def add(self, candidate: Candidate) -> None:
        island = candidate.island
        self.leaves |= island.cut
        self.parameters.update(dict.fromkeys(island.parameters, candidate.name))
        self.biases.update(dict.fromkeys(island.biases, candidate.name))
        self.values.update(dict.fromkeys(island.states, candidate.name))
        for index, conversion in island.crossings():
            self.slices.setdefault(index, []).append((conversion, candidate.name))
        self.places.update(dict.fromkeys(island.places, candidate.name))


def _partner(graph: Graph, node: Dim) -> Dim | None:
    """The leaf right behind `node` in a product of some parameter's dim that other parameters do not have there."""
    for value in graph.by_leaf[node]:
        for dim in value.dims:
            row = list(leaves(dim))
            for first, second in pairwise(row):
                if first is node and second.size > 1 and len(graph.by_leaf[second]) < len(graph.by_leaf[node]):
                    return find(second)
    return None


def _add_partner(candidate: Candidate, solver: Solver, taken: Taken) -> None:
    """Query groups take the ranks that KV heads are too few for, if both together hold at the same borders."""
    graph = candidate.graph
    node = _partner(graph, candidate.leaf)
    if node is None:
        return
    try:
        both = Simulation(graph, (candidate.leaf, node)).run()
        alone = Simulation(graph, (node,)).run()
        pair = replace(candidate, island=both, partner=node)
        same = set(both.parameters) == set(candidate.island.parameters) and both.places == candidate.island.places
        if same and counted_once(alone, both) and not taken.clash(pair):
            candidate.sizes = solver.solve(both, candidate.leaf, node)
            candidate.island, candidate.partner = both, node
    except (Fails, Unsolved):
        return


def counted_once(alone: Island, both: Island) -> bool:
    """Whether each partial sum of the pair is one over the partner's units too, so that no unit is counted twice."""
    partial = {index for index, state in both.states.items() if state == "partial"}
    return all(alone.states.get(index) == "partial" for index in partial)
