"""Rules by hand, as version 2.0 had them: what happens to tensors, inputs, outputs and attributes whose names fit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import DimLayout, TensorLayout
from tensor_parallel.plan.plan import Factor, HandRule, ModulePlan, Plan, TensorPlan
from tensor_parallel.plan.state_actions import LegacyStateAction, Scale, Split, StateAction

Action = str | Callable[..., Any]
Rules = Mapping[str, Mapping[int | str, Action]]
_T = TypeVar("_T")

UNTOUCHED = "no rule of the given tp.Config fits it"
_WORDS = {"split": 1, "gather": 1, "sum": 0, "scale": 0, "scale_int": 0}
"""What may be done to a value, and how many numbers follow."""


class Config:
    """Rules by hand. Every key is a regular expression that is searched in dotted names.

    state_rules: of parameters and buffers -> a `tp.StateAction`: how a rank's part is made. Plain functions
        `f(tensor, rank)` and pairs of functions (action, undo) are taken with a DeprecationWarning.
    input_rules, output_rules: of modules -> {position or keyword: action}. An action is "split DIM" (this rank's part),
        "gather DIM" (all ranks' parts joined), "sum" (over the ranks), "scale" (a world_size-th), "scale_int" (the same
        of a whole number), or a function `f(value, rank)`. An output that is one tensor has position 0.
    attr_rules: of modules -> {attribute: a function `f(value, rank=...)`}.

    What no rule fits stays whole.

    Raises:
        TypeError: a rule that is none of these.
        PlanError: an action in words that is none of those above.
    """

    def __init__(
        self,
        state_rules: Mapping[str, Any] | None = None,
        input_rules: Rules | None = None,
        output_rules: Rules | None = None,
        attr_rules: Rules | None = None,
    ) -> None:
        self.state_rules = {re.compile(p): _state_action(p, action) for p, action in (state_rules or {}).items()}
        self.input_rules = _compiled("input_rules", input_rules)
        self.output_rules = _compiled("output_rules", output_rules)
        self.attr_rules = _compiled("attr_rules", attr_rules)

    def __repr__(self) -> str:
        counts = {k: len(v) for k, v in vars(self).items()}
        return f"Config({', '.join(f'{name}: {count}' for name, count in counts.items())})"

    def plan(self, module: nn.Module, world_size: int, *, strict: bool = True) -> Plan:
        """What the rules do with `module` on `world_size` ranks, as a plan. It is free of ranks, and can be saved,
        where all its actions are in words and state actions of this library; other ones are made for this many.

        strict: raise for a rule that fits nothing; else warn.

        Raises:
            PlanError: two rules that fit one name and disagree, a rule that fits nothing, an action for another number
                of ranks or a tensor that it cannot divide.
        """
        modules = dict(module.named_modules())
        rules: dict[str, list[HandRule]] = {}
        kinds: dict[Literal["input", "output", "attribute"], Any] = {
            "input": self.input_rules,
            "output": self.output_rules,
            "attribute": self.attr_rules,
        }
        for kind, by_pattern in kinds.items():
            for name, found in _fitting(by_pattern, modules, f"{kind} rules", "modules", strict).items():
                merged: dict[int | str, tuple[str, Action]] = {}
                for pattern, actions in found:
                    for given, action in actions.items():
                        if kind == "attribute" and not hasattr(modules[name], str(given)):
                            near = get_close_matches(str(given), vars(modules[name]), 3)
                            raise PlanError(
                                f"attr rule {pattern!r}: {name or 'the model'} ({type(modules[name]).__name__}) has no "
                                f"attribute {given!r}; the nearest are {near}"
                            )
                        key = int(given) if isinstance(given, str) and given.lstrip("-").isdigit() else given
                        _agree(merged.setdefault(key, (pattern, action)), (pattern, action), f"{name!r}[{key!r}]")
                rules.setdefault(name, []).extend(HandRule(kind, key, action) for key, (_, action) in merged.items())
        tensors, factors = self._tensors(module, world_size, strict)
        plans = {name: ModulePlan(rules=tuple(found)) for name, found in rules.items()}
        return Plan(factors, tensors, plans, world_size=world_size)

    def _tensors(
        self, module: nn.Module, world_size: int, strict: bool
    ) -> tuple[dict[str, TensorPlan], dict[str, Factor]]:
        named: dict[int, tuple[torch.Tensor, list[str], bool]] = {}
        for is_buffer, walk in ((False, module.named_parameters), (True, module.named_buffers)):
            for name, tensor in walk(remove_duplicate=False):
                named.setdefault(id(tensor), (tensor, [], is_buffer))[1].append(name)
        everything = [name for _, names, _ in named.values() for name in names]
        fitting = _fitting(self.state_rules, everything, "state rules", "parameters and buffers", strict)
        tensors: dict[str, TensorPlan] = {}
        factors: dict[str, Factor] = {}
        for tensor, names, is_buffer in named.values():
            found = [entry for name in names for entry in fitting.get(name, [])]
            for other in found[1:]:
                _agree(found[0], other, repr(names[0]))
            action = found[0][1] if found else None
            tensors[names[0]] = _tensor_plan(tensor, tuple(names), is_buffer, action, world_size, factors)
        return tensors, factors


def _tensor_plan(
    tensor: torch.Tensor,
    names: tuple[str, ...],
    is_buffer: bool,
    action: StateAction | None,
    world_size: int,
    factors: dict[str, Factor],
) -> TensorPlan:
    nbytes = tensor.numel() * tensor.element_size()
    whole = TensorLayout(tuple(DimLayout.whole(size) for size in tensor.shape))
    if action is None:
        return TensorPlan(names, whole, nbytes, is_buffer, reason=UNTOUCHED)
    given = getattr(action, "world_size", world_size)
    if given != world_size:
        raise PlanError(f"{names[0]}: {action} is for {given} ranks, and the model is split over {world_size}")
    if world_size == 1:
        return TensorPlan(names, whole, nbytes, is_buffer, reason="there is one rank")
    if isinstance(action, Scale):
        return TensorPlan(names, whole, nbytes, is_buffer, rank0_only=True, reason="added before a sum over the ranks")
    if not isinstance(action, Split):
        return TensorPlan(names, whole, nbytes, is_buffer, action=action, reason="cut by a function of the given rules")
    try:
        name = f"{names[0]} dim {action.dim % max(tensor.dim(), 1)}"
        layout = action.layout(tensor.shape, name)
        units = action.units(tensor.shape[action.dim])
    except PlanError as error:
        raise PlanError(f"{names[0]} of shape {tuple(tensor.shape)}: {error}") from None
    if units < world_size:
        raise PlanError(
            f"{names[0]} of shape {tuple(tensor.shape)}: {action} makes {units} pieces, too few for {world_size} "
            "ranks; split over fewer devices, or leave the rules out: a plan that is found by itself can do it"
        )
    factors[name] = Factor(name, units)
    return TensorPlan(names, layout, nbytes, is_buffer)


def _state_action(pattern: str, action: Any) -> StateAction:
    if isinstance(action, StateAction):
        return action
    pair = action if isinstance(action, tuple) and len(action) == 2 else (action, None)
    if callable(pair[0]) and (pair[1] is None or callable(pair[1])):
        warnings.warn(
            f"state rule {pattern!r}: plain functions are deprecated; give a tp.StateAction, such as "
            "tp.state_actions.Split(world_size, dim)",
            DeprecationWarning,
            stacklevel=3,
        )
        return LegacyStateAction(*pair)
    raise TypeError(
        f"state rule {pattern!r} is {action!r}; a tp.StateAction is needed, such as "
        "tp.state_actions.Split(world_size, dim), or a function f(tensor, rank)"
    )


def _compiled(kind: str, rules: Rules | None) -> dict[re.Pattern[str], Mapping[int | str, Action]]:
    found = {}
    for pattern, actions in (rules or {}).items():
        if not isinstance(actions, Mapping):
            raise TypeError(f"{kind} {pattern!r} is {actions!r}; a dict is needed, such as {{0: 'gather -1'}}")
        for key, action in actions.items():
            if callable(action):
                continue
            words = action.split() if isinstance(action, str) and kind != "attr_rules" else []
            numbers = all(word.lstrip("-").isdigit() for word in words[1:])
            if not words or words[0] not in _WORDS or len(words) - 1 != _WORDS[words[0]] or not numbers:
                known = "a function" if kind == "attr_rules" else f"one of {', '.join(_WORDS)} or a function"
                raise PlanError(f"{kind} {pattern!r}, {key!r}: given {action!r}, required {known}")
        found[re.compile(pattern)] = actions
    return found


def _fitting(
    rules: Mapping[re.Pattern[str], _T], names: Sequence[str] | Mapping[str, Any], kind: str, of: str, strict: bool
) -> dict[str, list[tuple[str, _T]]]:
    """By name, the rules that fit it."""
    found: dict[str, list[tuple[str, _T]]] = {}
    for pattern, action in rules.items():
        fitting = [name for name in names if pattern.search(name)]
        for name in fitting:
            found.setdefault(name, []).append((pattern.pattern, action))
        if not fitting:
            near = get_close_matches(re.sub(r"[\\^$.*()|]+", ".", pattern.pattern).strip("."), list(names), 3, 0.3)
            text = f"{kind}: {pattern.pattern!r} fits none of the {of}; the nearest are {near}"
            if strict:
                raise PlanError(f"{text} (strict=False makes this a warning)")
            warnings.warn(text, stacklevel=4)
    return found


def _agree(one: tuple[str, Any], other: tuple[str, Any], where: str) -> None:
    if one[1] != other[1]:
        raise PlanError(f"{where}: the rules {one[0]!r} and {other[0]!r} both fit it and disagree; make them fit apart")
