"""Any module -> a plan: trace its forward, type its dims, simulate every way to cut them, choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tensor_parallel.errors import PlanError
from tensor_parallel.plan import Plan
from tensor_parallel.planner.effects import Effect, Rule, Rules, infer
from tensor_parallel.planner.emit import emit
from tensor_parallel.planner.fallback import layerwise_plan
from tensor_parallel.planner.graph import Graph
from tensor_parallel.planner.hidden import drop_hidden
from tensor_parallel.planner.isolate import closed, isolated
from tensor_parallel.planner.records import Trace
from tensor_parallel.planner.rules import DEFAULT_RULES
from tensor_parallel.planner.select import Choice, Exchange, choose
from tensor_parallel.planner.sizes import Solver
from tensor_parallel.planner.trace import parameter_names, trace

__all__ = ["DEFAULT_RULES", "Effect", "Exchange", "Rule", "Rules", "layerwise_plan", "make_plan"]


def make_plan(
    module: nn.Module,
    world_size: int,
    example_inputs: Sequence[Mapping[str, Any] | tuple[Any, ...]],
    *,
    rules: Rules = DEFAULT_RULES,
    exchange: Exchange | None = None,
) -> Plan:
    """Find the split of a module from its own forward.

    world_size: steers what is worth cutting; the plan resolves for any.
    example_inputs: what to call the forward with, a dict of keywords or a tuple each; the plan holds for all of them.
    rules: what operators do to cut dims; `DEFAULT_RULES.with_rule(name, rule)` adds one.
    exchange: what a collective costs.

    Raises:
        PlanError: world_size below 1, or the forward writes into its parameters.
        TraceError: the forward refuses the inputs or cannot be traced.
    """
    if world_size < 1:
        raise PlanError(f"world_size is {world_size}; at least 1 rank is needed")
    traced = trace(module, example_inputs)
    _refuse_written(traced)
    effects = infer(traced.ops, rules)
    graph = Graph.of(traced, effects, dict(module.named_modules()))
    # Fewer than two ranks deal out nothing; the plan is then made as for two.
    world, rate, choice = max(world_size, 2), exchange or Exchange(), Choice()
    choose(graph, world, rate, Solver(graph), choice)
    drop_hidden(choice, traced)
    for name, part in graph.modules.items():
        own = [key for key in (f"{name}.{k}" if name else k for k in part._parameters) if key in traced.parameters]
        if any(len(traced.parameters[k].shape) > 1 for k in own) and not choice.taken.uses(own) and closed(graph, name):
            alone = isolated(graph, name, rules)
            choose(alone, world, rate, Solver(alone), choice)
    drop_hidden(choice, traced)
    return emit(graph, choice, parameter_names(module), world_size)


def _refuse_written(traced: Trace) -> None:
    """Ranks of one process share whole parameters: writes of several threads into one would meet."""
    kept = [op.inputs()[0] for op in traced.ops if op.name == "kept in a buffer"]
    written = sorted({value.parameter for value in kept if value.parameter is not None and not value.is_buffer})
    if written:
        raise PlanError(
            f"the forward writes into {', '.join(written)} in place, as an embedding with max_norm does; ranks share "
            "parameters that are whole, so such a model cannot be split yet: do it outside the forward"
        )
