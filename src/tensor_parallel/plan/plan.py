"""A plan: what is cut, where ranks talk, and which integers become local. Data only: it names parameters, dims, units,
partners and blocks, never ranks or devices, so that one plan serves any world size."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tensor_parallel.layout import REPLICATE, DimLayout, Placement, TensorLayout
from tensor_parallel.plan.state_actions import StateAction

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a dim that ranks cut: `units` pieces that move as one (heads, KV groups, hidden units, vocabulary).

    partner: the factor that takes the ranks this one is too small for (query groups beside KV heads).
    unit: what one unit is, for people ("head of 16", "hidden unit").
    """

    name: str
    units: int
    partner: str | None = None
    unit: str = "unit"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One parameter or buffer.

    names: every name it has in the model (tied weights have several), the first in the model's own order is its key.
    layout: how ranks cut it; a layout without factors is a whole tensor.
    rank0_only: rank 0 uses it and the others use zeros: a bias that is added before a sum over the ranks.
    gathered: cut one layer by itself with its output gathered, because there was no trace.
    nbytes: bytes of the whole tensor.
    reason: why it is whole; "" where it is cut.
    action: makes each rank's part, where a rule by hand has a function for it; the layout is whole then.
    """

    names: tuple[str, ...]
    layout: TensorLayout
    nbytes: int
    is_buffer: bool = False
    rank0_only: bool = False
    gathered: bool = False
    reason: str = ""
    action: StateAction | None = None

    @property
    def is_cut(self) -> bool:
        return bool(self.layout.factors) or self.action is not None


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that crosses a module's border: how it lies before and after. Where the two differ, ranks talk or slice:
    partial -> replicate is an all-reduce, shard -> replicate an all-gather, replicate -> shard a slice.

    path: entering, the forward's parameter name and then keys or indices ("hidden_states", "args.0", "pair.1");
        leaving, "" for the output itself, else its keys or indices ("0", "logits").
    call: only for the call with this index (from 0) of the module in one forward; None for all.
    gathers_gradient: a whole tensor that meets cut ones behind this border. Each rank's gradient of it is a part; they
        are summed here at rank 0, so that what lies before (a norm that computes in float32) rounds once, as unsplit.
        Right without it too: the parts would go back one by one.
    spare: an output that stays cut and that no code beyond this border reads (attention weights, unless asked for).
    """

    path: str
    before: Placement = REPLICATE
    after: Placement = REPLICATE
    call: int | None = None
    gathers_gradient: bool = False
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding whose rows are cut: ids outside a rank's rows give zero rows, the outputs are partial sums.

    path: the ids, as in Boundary.  weight: the parameter's name inside the module.
    """

    path: str
    weight: str
    rows: DimLayout


@dataclass(frozen=True, slots=True)
class LocalSize:
    """An integer that the module's code reads and that must be a rank's own.

    attribute: a plain attribute of the module ("num_heads", "split_size") or of an object it holds
        ("config.num_attention_heads").
    layout: what the integer counts; its local value is the layout's local size.
    """

    attribute: str
    layout: DimLayout


@dataclass(frozen=True, slots=True)
class CallSite:
    """A size argument of one call in a method of the module that must be a rank's own, where no attribute gives it.

    method: name of the method on the module's class.
    position: (line from the method's first line, column, end line, end column) of the call expression, as in
        `codeobject.co_positions()`, columns in bytes; lines from the code object's `co_firstlineno`.
    argument: index path of the argument in the call: (1,) the second one, (0, 2) the third item of the first, a tuple.
    layout: what the integer counts: None keeps `value` whatever the code computes.
    value: the value in the traced forward.
    """

    method: str
    position: tuple[int, int, int, int]
    argument: tuple[int, ...]
    value: int
    layout: DimLayout | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """A call in the module's own forward that may draw random numbers (a dropout), in eval mode too.

    index: it is the forward's index-th such call.  function: its name.
    placement: of the tensor that it draws for, of attention its weights (batch, heads, queries, keys); None: unknown.
    """

    index: int
    function: str
    placement: Placement | None


@dataclass(frozen=True, slots=True)
class HandRule:
    """One rule by hand at a module, done to the letter (see `tp.Config`).

    kind: "input", "output" or "attribute".  key: position or keyword, of an attribute its name.
    action: in words ("split -1", "gather -1", "sum", "scale", "scale_int"), or a function of a value and the rank.
    """

    kind: Literal["input", "output", "attribute"]
    key: int | str
    action: str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Everything that one module does differently on a rank.

    inputs and outputs list each tensor that is not replicated on both sides; what is not listed is replicated.
    last: with its output the ranks have met for the last time in the traced forwards.
    rules: by hand.
    calls: of the root, where a module is `last`: the modules that its own code calls.
    """

    inputs: tuple[Boundary, ...] = ()
    outputs: tuple[Boundary, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    attributes: tuple[LocalSize, ...] = ()
    call_sites: tuple[CallSite, ...] = ()
    draws: tuple[Draw, ...] = ()
    last: bool = False
    calls: tuple[str, ...] = ()
    rules: tuple[HandRule, ...] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective of one forward: calls of it, and bytes of the whole tensor in the traced forward."""

    module: str
    path: str
    op: Literal["all_reduce", "all_gather"]
    calls: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """How to split one model, for any world size.

    factors: by name.  tensors: every parameter and buffer, by key.  modules: by dotted name ("" is the root).
    traffic: the collectives of one forward.  paths: the calls that the plan was traced with, for people.
    reads: the plain attributes that the traced forwards read, of whatever module: whether any other value may lead
        along another path (False: another float may stand in a float's place).
    world_size: the one that steered the choice of what to cut.
    """

    factors: Mapping[str, Factor]
    tensors: Mapping[str, TensorPlan]
    modules: Mapping[str, ModulePlan] = field(default_factory=dict)
    traffic: tuple[Traffic, ...] = ()
    paths: tuple[str, ...] = ()
    reads: Mapping[str, bool] = field(default_factory=dict)
    world_size: int = 2

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this plan as JSON; see `serialize.save`."""
        from tensor_parallel.plan import serialize

        serialize.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file is no plan of this version; names the place.
        """
        from tensor_parallel.plan import serialize

        return serialize.load(path)

    def to_json(self) -> str:
        """This plan as JSON text."""
        from tensor_parallel.plan import serialize

        return serialize.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of a text that `to_json` gave.

        Raises:
            PlanError: the text is no plan of this version; names the place.
        """
        from tensor_parallel.plan import serialize

        return serialize.from_json(text)

    def explain(self, name: str, world_size: int | None = None) -> str:
        """What this plan does with one module or tensor over `world_size` ranks (default: those that it was made for),
        one sentence a line: cuts, each rank's units and bytes, collectives, and why something is whole.

        Raises:
            PlanError: the plan knows no such name.
        """
        from tensor_parallel.plan import table

        return table.explain(self, name, world_size)

    def __rich__(self) -> RenderableType:
        from tensor_parallel.plan import table

        return table.plan_table(self)

    def __str__(self) -> str:
        from tensor_parallel.plan import table

        return table.render(table.plan_table(self))
