"""Which integers of the model's code must become a rank's own.

Every size argument of a traced call says what it counts. With the units cut, the value that the code would compute on a
rank must be the local size. Where it is not, the attribute that gives it becomes local, or else the one call; where
neither reaches, the units are not cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensor_parallel.layout import Cuts, DimLayout, local_size, spread
from tensor_parallel.plan import CallSite, Factor, Plan, resolve, source
from tensor_parallel.planner.graph import Graph
from tensor_parallel.planner.index_types import Blocked, Cut, Dim, leaves, normal_form
from tensor_parallel.planner.integers import Attribute, Comparison, Constant, Expression, Size, evaluate
from tensor_parallel.planner.integers import leaves as origins
from tensor_parallel.planner.island import Island
from tensor_parallel.planner.size_arguments import Requirement, requirements

WORLD_SIZES = (2, 3, 4)
"""Sizes are checked as numbers for these world sizes, rank by rank."""


@dataclass
class Sizes:
    """The solution for one island."""

    attributes: dict[tuple[str, str], DimLayout] = field(default_factory=dict)
    sites: list[tuple[str, CallSite]] = field(default_factory=list)


class Unsolved(Exception):
    """An integer that nothing reaches; the text says which."""


class Solver:
    """Requirements of a whole trace, solved island by island."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_value: dict[int, list[Requirement]] = {}
        self.by_origin: dict[tuple[str, str], list[Requirement]] = {}
        self.originals: dict[tuple[str, str], int] = {}
        self.checks: dict[object, list[Comparison]] = {}
        self.by_place: dict[object, list[Requirement]] = {}
        self.reachable: dict[tuple[type, CallSite], str] = {}
        for call in graph.trace.function_calls:
            for requirement in requirements(call):
                self._index(requirement)
        # Offsets of slices refine leaves.
        graph.index_leaves()
        for comparison in graph.trace.recorder.comparisons:
            for expression in (comparison.left, comparison.right):
                for origin in origins(expression):
                    self.checks.setdefault(_key(origin), []).append(comparison)
        self.escapes: dict[object, list[Expression]] = {}
        for escape in graph.trace.recorder.escapes:
            for origin in origins(escape.expression):
                self.escapes.setdefault(_key(origin), []).append(escape.expression)

    def _index(self, requirement: Requirement) -> None:
        for place in _places(requirement):
            self.by_place.setdefault(place, []).append(requirement)
        if requirement.value is not None:
            self.by_value.setdefault(requirement.value.index, []).append(requirement)
        for origin in _origins(requirement.argument.expression):
            if isinstance(origin, Size):
                self.by_value.setdefault(origin.tensor, []).append(requirement)
            else:
                self.by_origin.setdefault(_key(origin), []).append(requirement)

    def twins(self, island: Island, node: Dim) -> list[Dim]:
        """Leaves that the same integers count: one attribute read for several layers, one call in a loop over them.
        Such leaves can only be cut together."""
        found: dict[Dim, None] = {}
        for value in sorted(island.touched()):
            for requirement in self.by_value.get(value, ()):
                if requirement.dim is None:
                    continue
                row = list(leaves(requirement.dim))
                if node not in row:
                    continue
                for other in (r for place in _places(requirement) for r in self.by_place[place]):
                    twin = list(leaves(other.dim)) if other.dim is not None else []
                    if [n.size for n in twin] == [n.size for n in row]:
                        found.update({b: None for a, b in zip(row, twin, strict=True) if a is node and b is not node})
        return list(found)

    def solve(self, island: Island, first: Dim, partner: Dim | None, banned: Iterable[tuple[str, str]] = ()) -> Sizes:
        """banned: attributes that must stay the model's own.  Raises Unsolved."""
        names: Cut = {first: "first"} if partner is None else {first: "first", partner: "partner"}
        worlds = [_cuts(first, partner, world_size) for world_size in WORLD_SIZES]
        banned = set(banned)
        while True:
            attempt = _Attempt(self, island, names, worlds, banned)
            try:
                return attempt.solve()
            except _Ban as ban:
                banned.add(ban.attribute)


class _Ban(Exception):
    def __init__(self, attribute: tuple[str, str]) -> None:
        super().__init__(attribute)
        self.attribute = attribute


def _places(requirement: Requirement) -> Iterator[object]:
    """What gives the integer its value everywhere at once: the attribute that it is, the call that it stands in."""
    call, expression = requirement.call, requirement.argument.expression
    if requirement.dim is None:
        return
    if isinstance(expression, Attribute):
        yield _key(expression)
    if call.owner is not None and call.position is not None:
        yield call.owner, call.method, call.position, requirement.argument.path


def _key(origin: Attribute | Size) -> Any:
    return (origin.module, origin.attribute) if isinstance(origin, Attribute) else origin.tensor


def _origins(expression: Expression | None) -> Iterator[Attribute | Size]:
    if expression is not None:
        yield from origins(expression)


def _cuts(first: Dim, partner: Dim | None, world_size: int) -> Cuts:
    """The ranges that resolve() would deal out."""
    if partner is None:
        return {"first": spread(first.size, world_size)}
    factors = {"first": Factor("first", first.size, "partner"), "partner": Factor("partner", partner.size)}
    return resolve(Plan(factors, {}), world_size).cuts


class _Attempt:
    """One try with some attributes left alone."""

    def __init__(
        self, solver: Solver, island: Island, names: Cut, worlds: Sequence[Cuts], banned: set[tuple[str, str]]
    ) -> None:
        self.solver, self.island, self.names, self.worlds, self.banned = solver, island, names, worlds, banned
        self.found = Sizes()

    def solve(self) -> Sizes:
        relevant = {id(r): r for v in sorted(self.island.touched()) for r in self.solver.by_value.get(v, ())}
        self._vote(list(relevant.values()))
        for attribute in self.found.attributes:
            relevant.update({id(r): r for r in self.solver.by_origin.get(attribute, ())})
        sites: dict[tuple[str, CallSite], None] = {}
        for requirement in relevant.values():
            if not self._satisfied(requirement):
                sites[self._site(requirement)] = None
        self.found.sites = list(sites)
        self._check_uses()
        return self.found

    def _expected(self, requirement: Requirement) -> DimLayout | None:
        """What the argument counts, where that is cut; None where it must be the unsplit model's number."""
        dim, value = requirement.dim, requirement.value
        if dim is None or value is None:
            return None
        if requirement.index is not None and value.index in self.island.dims:
            dim = self.island.dims[value.index][requirement.index]
        if self.island.state_at(value.index, requirement.call.at) != "shard":
            return None
        if not any(node in self.names for node in leaves(dim)):
            return None
        try:
            return normal_form(dim, self.names, self.solver.graph.by_leaf)
        except Blocked as error:
            raise Unsolved(f"{requirement.call.name} in {requirement.call.owner!r}: {error}") from None

    def _vote(self, relevant: Sequence[Requirement]) -> None:
        """An attribute takes what most of the calls that it goes straight into ask of it."""
        votes: dict[tuple[str, str], Counter[DimLayout | None]] = {}
        for requirement in relevant:
            expression = requirement.argument.expression
            if isinstance(expression, Attribute) and self._expected(requirement) is not None:
                votes.setdefault(_key(expression), Counter())
        for attribute, counter in votes.items():
            for requirement in self.solver.by_origin[attribute]:
                if isinstance(requirement.argument.expression, Attribute):
                    counter[self._expected(requirement)] += 1
                    self.solver.originals[attribute] = requirement.argument.value
            layout, count = max(counter.items(), key=lambda item: (item[1], item[0] is not None))
            if layout is not None and attribute not in self.banned and count * 2 >= sum(counter.values()):
                self.found.attributes[attribute] = layout

    def _satisfied(self, requirement: Requirement) -> bool:
        expected, argument = self._expected(requirement), requirement.argument
        for cuts in self.worlds:
            for rank in range(len(cuts["first"])):
                wanted = argument.value if expected is None else self._size(expected, argument.value, cuts, rank)
                if self._value(argument.expression, argument.value, requirement.call.at, cuts, rank) != wanted:
                    return False
        return True

    def _size(self, layout: DimLayout, value: int, cuts: Cuts, rank: int) -> int:
        size = local_size(layout.at_run_time(abs(value)), cuts, rank)
        return -size if value < 0 else size

    def _value(self, expression: Expression | None, value: int, at: int, cuts: Cuts, rank: int) -> int:
        if expression is None:
            return value

        def lookup(origin: Attribute | Size) -> int:
            return self._origin(origin, at, cuts, rank)

        try:
            return evaluate(expression, lookup)
        except ZeroDivisionError:
            return -(2**62)

    def _origin(self, origin: Attribute | Size, at: int, cuts: Cuts, rank: int) -> int:
        if isinstance(origin, Attribute):
            layout = self.found.attributes.get(_key(origin))
            return origin_value(self.solver, origin) if layout is None else local_size(layout, cuts, rank)
        value = self.solver.graph.trace.sizes[origin.tensor]
        size = value.shape[origin.dim]
        if self.island.state_at(origin.tensor, at) != "shard" or not value.dims:
            return size
        dim = self.island.dims.get(value.index, value.dims)[origin.dim]
        if not any(node in self.names for node in leaves(dim)):
            return size
        return self._size(normal_form(dim, self.names, self.solver.graph.by_leaf), size, cuts, rank)

    def _site(self, requirement: Requirement) -> tuple[str, CallSite]:
        call, argument = requirement.call, requirement.argument
        what = f"the {argument.value} in {call.name}(...) of {call.owner or call.module_call!r}"
        head, *rest = argument.path
        inside = [p for p in rest if isinstance(p, int)]
        if call.owner is None or call.position is None or not call.method or len(inside) < len(rest):
            raise self._stuck(requirement, f"{what} stands in no method of a module")
        positional = len(call.args) - int(call.is_method)
        keywords = list(call.kwargs)
        first = head - int(call.is_method) if isinstance(head, int) else positional + keywords.index(head)
        count = positional + len(keywords)
        module = self.solver.graph.modules[call.owner]
        layout = self._expected(requirement)
        reason = ""
        for index in (first, first - count):
            site = CallSite(call.method, call.position, (index, *inside), argument.value, layout)
            key = (type(module), replace(site, layout=None))
            if key not in self.solver.reachable:
                method = getattr(type(module), call.method)
                self.solver.reachable[key] = source.can_rewrite(method, site)
            if not self.solver.reachable[key]:
                return call.owner, site
            reason = reason or self.solver.reachable[key]
        raise self._stuck(requirement, f"{what}: {reason}")

    def _stuck(self, requirement: Requirement, why: str) -> Exception:
        """Leave the attributes alone that spoil a call which nothing else reaches; where there is none, give up."""
        for origin in _origins(requirement.argument.expression):
            if isinstance(origin, Attribute) and _key(origin) in self.found.attributes:
                return _Ban(_key(origin))
        return Unsolved(why)

    def _check_uses(self) -> None:
        """Comparisons must come out as they did, and numbers that left for Python must be the unsplit model's."""
        keys: list[Any] = [*self.found.attributes, *sorted(self.island.touched())]
        for key in keys:
            for comparison in self.solver.checks.get(key, ()):
                self._check_comparison(comparison)
            for expression in self.solver.escapes.get(key, ()):
                self._check_escape(expression)

    def _check_comparison(self, comparison: Comparison) -> None:
        last = len(self.solver.graph.trace.ops)
        for cuts in self.worlds:
            for rank in range(len(cuts["first"])):
                left = self._value(comparison.left, 0, last, cuts, rank)
                right = self._value(comparison.right, 0, last, cuts, rank)
                # `if n_rep == 1: return x` is a short cut for one unit, right for one local unit too.
                short_cut = 1 in (left, right) and any(
                    isinstance(side, Constant) for side in (comparison.left, comparison.right)
                )
                if _compared(comparison.op, left, right) != comparison.result and not short_cut:
                    self._blame((comparison.left, comparison.right), f"{comparison.module!r} compares sizes")

    def _check_escape(self, expression: Expression) -> None:
        last = len(self.solver.graph.trace.ops)
        for cuts in self.worlds:
            for rank in range(len(cuts["first"])):
                here = self._value(expression, 0, last, cuts, rank)
                there = evaluate(expression, lambda origin: origin_value(self.solver, origin))
                if here != there:
                    self._blame((expression,), "a size goes into a number")

    def _blame(self, expressions: Sequence[Expression], why: str) -> None:
        for expression in expressions:
            for origin in origins(expression):
                if isinstance(origin, Attribute) and _key(origin) in self.found.attributes:
                    raise _Ban(_key(origin))
        raise Unsolved(f"{why} that would be local ({', '.join(map(str, expressions))})")


def _compared(op: str, left: int, right: int) -> bool:
    match op:
        case "==":
            return left == right
        case "!=":
            return left != right
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case _:
            return left >= right


def origin_value(solver: Solver, origin: Attribute | Size) -> int:
    """The unsplit model's number."""
    if isinstance(origin, Size):
        return solver.graph.trace.sizes[origin.tensor].shape[origin.dim]
    known = solver.originals.get(_key(origin))
    if known is None:
        at: Any = solver.graph.modules[origin.module]
        for name in origin.attribute.split("."):
            at = getattr(at, name)
        known = solver.originals[_key(origin)] = int(at)
    return known
