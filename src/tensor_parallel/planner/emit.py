"""From the chosen candidates to a plan: data that no longer knows the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from tensor_parallel.comm.draws import DRAWING_NAMES
from tensor_parallel.layout import REPLICATE, DimLayout, Placement, TensorLayout
from tensor_parallel.plan import (
    Boundary,
    CallSite,
    Draw,
    Factor,
    LocalSize,
    Lookup,
    ModulePlan,
    Plan,
    TensorPlan,
    Traffic,
)
from tensor_parallel.planner.graph import Graph
from tensor_parallel.planner.index_types import Cut, Dim, leaves, normal_form
from tensor_parallel.planner.island import Place, Side, State, border_state, inner_state, learns
from tensor_parallel.planner.records import FunctionCall, ModuleCall, Value
from tensor_parallel.planner.select import Candidate, Choice

Names = Mapping[str, tuple[object, tuple[str, ...], bool]]

_ATTENTION = ("scaled_dot_product", "softmax")


class _Names:
    """Factor names: the module that its parameters share, and what one unit is."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.cut: Cut = {}
        self.factors: dict[str, Factor] = {}

    def add(self, candidate: Candidate) -> None:
        noun = self._noun(candidate)
        partner = None
        if candidate.partner is not None:
            partner = self._factor(candidate, candidate.partner, "query_group", "query head of a KV head", None)
            noun = "kv_head"
        self._factor(candidate, candidate.leaf, noun, self._unit(candidate, noun), partner)

    def _factor(self, candidate: Candidate, node: Dim, noun: str, unit: str, partner: str | None) -> str:
        modules = [key.split(".")[:-1] for key in candidate.island.parameters]
        shared = []
        for parts in zip(*modules, strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        name = ".".join([*shared, noun])
        number = 2
        while name in self.used:
            name = ".".join([*shared, f"{noun}_{number}"])
            number += 1
        self.used.add(name)
        self.cut[node] = name
        self.factors[name] = Factor(name, node.size, partner, unit)
        return name

    def _noun(self, candidate: Candidate) -> str:
        island = candidate.island
        if island.lookups:
            return "row"
        graph = candidate.graph
        ops = {c for v in island.states for c in graph.consumers.get(v, ())}
        if any(word in graph.trace.ops[op].name for op in ops for word in _ATTENTION):
            return "head"
        if any(len(graph.trace.parameters[key].shape) > 2 for key in island.parameters):
            return "channel"
        return "unit"

    def _unit(self, candidate: Candidate, noun: str) -> str:
        value = candidate.graph.trace.parameters[candidate.island.parameters[0]]
        for dim in value.dims:
            for segment in normal_form(dim, {candidate.leaf: "cut"}).segments:
                if segment.factors:
                    behind = prod(
                        part.size for part in segment.parts[[p.factor for p in segment.parts].index("cut") + 1 :]
                    )
                    words = noun.replace("_", " ").replace("kv", "KV")
                    return words if behind == 1 else f"{words} of {behind}"
        return noun


class _Emitter:
    def __init__(self, graph: Graph, choice: Choice, names: Names) -> None:
        self.graph, self.choice, self.names = graph, choice, names
        self.factor_names = _Names()
        for candidate in choice.chosen:
            self.factor_names.add(candidate)
        self.cut = self.factor_names.cut
        self.gathered_gradients = self._gathered_gradients()
        self.by_value: dict[int, list[Candidate]] = {}
        self.places: dict[tuple[str, str, str], tuple[Candidate, str]] = {}
        self.parameters = dict(graph.trace.parameters)
        for candidate in choice.chosen:
            for index in candidate.island.touched():
                self.by_value.setdefault(index, []).append(candidate)
            self.places.update({place: (candidate, kind) for place, kind in candidate.island.places.items()})
            self.parameters.update((key, candidate.graph.trace.parameters[key]) for key in candidate.island.parameters)

    # --- tensors --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, TensorPlan]:
        biases = {key for candidate in self.choice.chosen for key in candidate.island.biases}
        found = {}
        for key, (_, names, is_buffer) in self.names.items():
            value = self.parameters[key]
            nbytes = prod(value.shape) * value.dtype.itemsize
            dims = [normal_form(dim, self.cut) for dim in value.dims]
            layout = TensorLayout(tuple(dims) if len(dims) == len(value.shape) else _whole(value))
            if not layout.factors:
                layout = TensorLayout(_whole(value))
            reason = "" if layout.factors else self._reason(key, value, key in biases)
            found[key] = TensorPlan(names, layout, nbytes, is_buffer, key in biases, reason=reason)
        return found

    def _reason(self, key: str, value: Value, bias: bool) -> str:
        if bias:
            return "added to a sum over the ranks: rank 0 adds it"
        if key in self.graph.trace.opaque:
            return self.graph.trace.opaque[key]
        if value.index not in self.graph.consumers:
            return "the traced forward does not use it"
        reasons = []
        for node in dict.fromkeys(node for dim in value.dims for node in leaves(dim)):
            if node in self.choice.reasons and node.size > 1:
                others = len(self.graph.by_leaf.get(node, ())) - 1
                units = f"its {node.size} units are those of {others} other tensors too: " if others > 0 else ""
                reasons.append(units + self.choice.reasons[node])
        return "; ".join(reasons) or "it has one unit"

    # --- modules --------------------------------------------------------------------------------------------------

    def _placement(self, value: Value, state: State | None, candidate: Candidate) -> Placement:
        if state is None:
            return REPLICATE
        value = candidate.graph.values.get(value.index, value)
        own = {candidate.leaf} | ({candidate.partner} if candidate.partner is not None else set())
        cut = {node: name for node, name in self.cut.items() if node in own}
        if state == "partial":
            return Placement("partial", (), tuple(cut.values()))
        rank = len(value.shape)
        dims = [
            (i - rank, normal_form(dim, cut, candidate.graph.by_leaf))
            for i, dim in enumerate(candidate.island.dims.get(value.index, value.dims))
            if any(node in cut for node in leaves(dim))
        ]
        return Placement("shard", tuple(dims))

    def _gathered_gradients(self) -> set[Place]:
        """Where parts of gradients are gathered: for each whole tensor that meets cut ones, the outermost entry that it
        passes, so that one serves queries, keys and values; where it passes none, the exits of what it is made from."""
        found: set[Place] = set()
        for candidate in self.choice.chosen:
            graph, todo = candidate.graph, sorted(candidate.island.meetings)
            seen = set(todo)
            while todo:
                index, op = todo.pop()
                border = _gradient_border(graph, index, op)
                if border is not None:
                    found.add(border)
                    continue
                producer = graph.values[index].producer
                if producer is not None:
                    made_from = {(v.index, producer) for v in graph.trace.ops[producer].inputs() if learns(v)}
                    todo += made_from - seen
                    seen |= made_from
        return found

    def _boundary(self, call: ModuleCall, side: Side, path: str, value: Value) -> tuple[Placement, Placement] | None:
        place = (call.name, side, path)
        if place in self.places:
            candidate, kind = self.places[place]
            states: dict[str, State] = {"all_reduce": "partial", "all_gather": "shard", "slice": "shard"}
            lies = self._placement(value, states[kind], candidate)
            return (REPLICATE, lies) if kind == "slice" else (lies, REPLICATE)
        for owner in self.by_value.get(value.index, ()):
            island, own = owner.island, self._own_call(owner, call)
            if own is None:
                continue
            state = border_state(owner.graph.trace, island.states, island.conversions, value.index, own, side)
            if state is not None:
                lies = self._placement(value, state, owner)
                return lies, lies
        return None

    def _own_call(self, owner: Candidate, call: ModuleCall) -> ModuleCall | None:
        """The call in the candidate's graph: a module planned by itself numbers calls and operators anew."""
        if owner.graph is self.graph:
            return call
        twins = owner.graph.calls.get(call.name, ())
        return next((c for c in twins if (c.number, c.trace) == (call.number, call.trace)), None)

    def _boundaries(self, calls: Sequence[ModuleCall], side: Side) -> tuple[Boundary, ...]:
        found: dict[str, dict[int, Boundary]] = {}
        for call in calls:
            for path, value in (call.inputs if side == "in" else call.outputs).items():
                before, after = self._boundary(call, side, path, value) or (REPLICATE, REPLICATE)
                gathers = before == after == REPLICATE and (call.name, side, path) in self.gathered_gradients
                spare = side == "out" and before == after and before.kind == "shard" and self._is_spare(call, value)
                numbered = found.setdefault(path, {})
                if call.number in numbered:
                    spare = spare and numbered[call.number].spare  # another example may read it
                numbered[call.number] = Boundary(path, before, after, None, gathers, spare)
        result: list[Boundary] = []
        for path, by_number in found.items():
            kinds = list(dict.fromkeys(by_number.values()))
            if kinds == [Boundary(path)]:
                continue
            result += kinds if len(kinds) == 1 else [replace(by_number[n], call=n) for n in sorted(by_number)]
        return tuple(result)

    def _is_spare(self, call: ModuleCall, value: Value) -> bool:
        """Whether nothing after `call` reads the value."""
        return all(op < call.last_op for op in self.graph.consumers.get(value.index, ()))

    def modules(self) -> dict[str, ModulePlan]:
        attributes: dict[str, list[LocalSize]] = {}
        sites: dict[str, list[CallSite]] = {}
        rename = {"first": 0, "partner": 1}
        for candidate in self.choice.chosen:
            sizes = candidate.sizes
            own = [self.cut[candidate.leaf], self.cut.get(candidate.partner) if candidate.partner else None]
            renamed = {old: own[index] or old for old, index in rename.items()}
            for (module, attribute), layout in sizes.attributes.items():
                attributes.setdefault(module, []).append(LocalSize(attribute, _renamed(layout, renamed)))
            for module, site in sizes.sites:
                layout_ = None if site.layout is None else _renamed(site.layout, renamed)
                twin = CallSite(site.method, site.position, site.argument, site.value, layout_)
                if twin not in sites.setdefault(module, []):
                    sites[module].append(twin)
        lookups, draws, last = self._lookups(), self._draws(), self._last()
        found = {}
        for name, calls in self.graph.calls.items():
            plan = ModulePlan(
                self._boundaries(calls, "in"),
                self._boundaries(calls, "out"),
                tuple(lookups.get(name, ())),
                tuple(attributes.get(name, ())),
                tuple(sites.get(name, ())),
                draws.get(name, ()),
                name == last,
                self._called_by_root() if last is not None and not name else (),
            )
            if plan != ModulePlan():
                found[name] = plan
        return found

    def _last(self) -> str | None:
        """The module at whose exit the last collective of every traced forward is, with no module called after it."""
        trace, names = self.graph.trace, set()
        for root in trace.roots():
            inside = [call for call in trace.module_calls if call.trace == root.trace and call.parent is not None]
            gathering = [call for call in inside if self._gathers(call)]
            if not gathering or any(place[0] == root.name for place in self.places):
                return None
            last = max(gathering, key=lambda call: (call.last_op, -call.index))
            later = [call for call in inside if call.index > last.index and call.first_op >= last.last_op]
            if later or sum(call.name == last.name for call in inside) > 1:
                return None
            names.add(last.name)
        return names.pop() if len(names) == 1 else None

    def _called_by_root(self) -> tuple[str, ...]:
        trace = self.graph.trace
        roots = {root.index for root in trace.roots()}
        return tuple(dict.fromkeys(call.name for call in trace.module_calls if call.parent in roots))

    def _gathers(self, call: ModuleCall) -> bool:
        return any(self.places.get((call.name, "out", path), (None, ""))[1] == "all_gather" for path in call.outputs)

    def _draws(self) -> dict[str, tuple[Draw, ...]]:
        """The random calls of each module, call by call where they differ; where examples disagree about one, its
        layout is unknown."""
        found: dict[str, dict[tuple[int, int], Draw]] = {}
        counts: dict[int, int] = {}
        for function in self.graph.trace.function_calls:
            if function.name not in DRAWING_NAMES:
                continue
            call = self.graph.trace.module_calls[function.module_call]
            index = counts[call.index] = counts.get(call.index, -1) + 1
            draw = Draw(index, function.name, self._drawn(function, call), call.number)
            known = found.setdefault(call.name, {}).setdefault((call.number, index), draw)
            if known != draw:
                found[call.name][call.number, index] = replace(known, placement=None)
        return {name: _for_all_calls(tuple(draws.values())) for name, draws in found.items()}

    def _drawn(self, function: FunctionCall, call: ModuleCall) -> Placement | None:
        """How the tensor lies that a random call draws for; None where that cannot be said."""
        tensor = function.args[0] if function.args else None
        if not isinstance(tensor, Value):
            return None
        found: list[Placement] = []
        for owner in self.by_value.get(tensor.index, ()):
            own = self._own_call(owner, call)
            if own is None:
                continue
            at = own.first_op + function.at - call.first_op
            state = inner_state(owner.graph.trace, owner.island, tensor.index, own, at)
            if state is not None:
                found.append(self._placement(tensor, state, owner))
        if not found:
            return REPLICATE
        attention = function.name == "scaled_dot_product_attention"
        if len(found) > 1 or (attention and any(dim == -1 for dim, _ in found[0].dims)):
            return None
        return found[0]

    def _lookups(self) -> dict[str, list[Lookup]]:
        found: dict[str, list[Lookup]] = {}
        for candidate in self.choice.chosen:
            for op in candidate.island.lookups:
                call = candidate.graph.trace.module_calls[op.module_call]
                weight, ids = op.inputs()[:2]
                path = next(path for path, value in call.inputs.items() if value is ids)
                lookup = Lookup(path, "weight", normal_form(weight.dims[0], self.cut))
                if lookup not in found.setdefault(call.name, []):
                    found[call.name].append(lookup)
        return found

    def traffic(self) -> tuple[Traffic, ...]:
        result = []
        for (name, side, path), (_, kind) in self.places.items():
            calls = [call for call in self.graph.calls[name] if call.trace == 0]
            values = [(call.inputs if side == "in" else call.outputs).get(path) for call in calls]
            nbytes = [prod(v.shape) * v.dtype.itemsize for v in values if v is not None]
            if kind == "all_reduce" and nbytes:
                result.append(Traffic(name, path, "all_reduce", len(nbytes), nbytes[0]))
            elif kind == "all_gather" and nbytes:
                result.append(Traffic(name, path, "all_gather", len(nbytes), nbytes[0]))
        order = {name: i for i, name in enumerate(self.graph.calls)}
        return tuple(sorted(result, key=lambda t: (order[t.module], t.path)))


def _gradient_border(graph: Graph, value: int, op: int) -> Place | None:
    for call, path in graph.entries.get(value, ()):
        if call.first_op <= op < call.last_op and call.name:
            return call.name, "in", path
    for call, path in reversed(graph.exits.get(value, ())):
        if not call.first_op <= op < call.last_op and call.name:
            return call.name, "out", path
    return None


def _for_all_calls(draws: tuple[Draw, ...]) -> tuple[Draw, ...]:
    """The draws without the number of the call, where every call makes the same ones."""
    by_call: dict[int | None, list[Draw]] = {}
    for draw in draws:
        by_call.setdefault(draw.call, []).append(replace(draw, call=None))
    first, *others = by_call.values()
    return tuple(first) if all(other == first for other in others) else draws


def _whole(value: Value) -> tuple[DimLayout, ...]:
    return tuple(DimLayout.whole(size) for size in value.shape)


def _renamed(layout: DimLayout, names: Mapping[str, str]) -> DimLayout:
    from tensor_parallel.layout import Part, Segment

    return DimLayout(
        tuple(
            Segment(tuple(Part(p.size, None if p.factor is None else names[p.factor]) for p in s.parts))
            for s in layout.segments
        )
    )


def emit(graph: Graph, choice: Choice, names: Names, world_size: int) -> Plan:
    """The plan of a choice."""
    emitter = _Emitter(graph, choice, names)
    return Plan(
        factors=emitter.factor_names.factors,
        tensors=emitter.tensors(),
        modules=emitter.modules(),
        traffic=emitter.traffic(),
        paths=tuple(graph.trace.paths),
        reads=graph.trace.reads.deciding(graph.modules[""]),
        world_size=world_size,
    )
