"""Sizes that a method's code computes where no attribute gives them (`B, T, C = x.shape; y.view(B, T, C)`): the method
is compiled anew with those arguments passed through the instance's own table of local sizes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import RUNTIME, Cuts, DimLayout, local_size
from tensor_parallel.plan import CallSite
from tensor_parallel.plan.source import MethodSource, wrapped_cell, wrapper_chain

TABLE = "_tp_call_sizes"
"""Attribute of a module: what each call site makes of the size that the code computed."""


def site_key(site: CallSite) -> str:
    """The site's place in its class, the same for every module of that class."""
    return f"{site.method}:{':'.join(map(str, site.position))}:{','.join(map(str, site.argument))}"


class LocalValue:
    """What one rank makes of the size at one call site."""

    __slots__ = ("cuts", "layout", "local", "rank", "whole")

    def __init__(self, site: CallSite, cuts: Cuts, rank: int) -> None:
        self.layout: DimLayout | None = None
        self.whole: int | None = None
        self.cuts, self.rank = cuts, rank
        if site.layout is None:
            self.local = site.value
        elif any(part.size == RUNTIME for segment in site.layout.segments for part in segment.parts):
            self.layout, self.local = site.layout, RUNTIME
        else:
            self.whole, self.local = site.layout.size, local_size(site.layout, cuts, rank)

    def __call__(self, value: Any, *inside: int) -> Any:
        """The local size for the whole one, `value`; with `inside` for that item of the tuple or list `value`.

        Raises:
            PlanError: the code computed another size than the plan was made for.
        """
        if inside:
            return self._item(value, inside)
        if self.layout is not None:
            try:
                return local_size(self.layout.at_run_time(value), self.cuts, self.rank)
            except ValueError as error:
                raise PlanError(f"{_caller()}: {error}; the plan was not made for this call") from error
        if self.whole is None or value in (self.whole, self.local):
            return self.local
        raise PlanError(
            f"{_caller()} computed the size {value}; the plan was made for {self.whole} ({self.local} on rank "
            f"{self.rank}): make the plan with example_inputs that take this path"
        )

    def _item(self, values: Any, inside: tuple[int, ...]) -> tuple[Any, ...]:
        items = list(values)
        index, *rest = inside
        if not -len(items) <= index < len(items):
            raise PlanError(f"{_caller()} computed the sizes {items}; the plan was made for one at index {index}")
        items[index] = self(items[index], *rest)
        return tuple(items)


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def local_value(site: CallSite, cuts: Cuts, rank: int) -> LocalValue:
    """What `rank` makes of the whole size at `site`. A size that is local already stays, any other than the planned one
    raises PlanError naming function and line; a layout with a RUNTIME part is solved from each whole size."""
    return LocalValue(site, cuts, rank)


def call_sizes(sites: Iterable[CallSite], cuts: Cuts, rank: int) -> dict[str, LocalValue]:
    """The table of a module with these call sites on `rank`: `module.__dict__["_tp_call_sizes"]`."""
    return {site_key(site): local_value(site, cuts, rank) for site in sites}


def with_local_sizes(function: Callable[..., Any], sites: Sequence[CallSite]) -> FunctionType:
    """A function equal to the method `function` but for the arguments at `sites`, all of this method: each goes through
    `self._tp_call_sizes[site_key(site)]`.

    Signature, defaults, closure (the class of `super()` included), globals, docs, annotations and line numbers stay. A
    method under decorators made by `functools.wraps` gets equal ones around it.

    Raises:
        PlanError: a site is not to be reached, or the source not to be had (plan.source.can_rewrite says so before).
    """
    chain = wrapper_chain(function)
    if isinstance(chain, str):
        raise PlanError(f"call sites cannot be reached: {chain}")
    source = MethodSource.read(chain[-1])
    if isinstance(source, str):
        raise PlanError(f"call sites cannot be reached: {source}")
    instance = source.instance_name()
    if instance is None:
        raise PlanError(f"call sites cannot be reached: {chain[-1].__qualname__} does not keep its first argument")

    def wrap(site: CallSite, expression: ast.expr, inside: tuple[int, ...]) -> ast.expr:
        table = ast.Attribute(ast.Name(instance, ast.Load()), TABLE, ast.Load())
        entry = ast.Subscript(table, ast.Constant(site_key(site)), ast.Load())
        return ast.Call(entry, [expression, *map(_literal, inside)], [])

    code = source.rewritten(sites, wrap)
    cells = dict(zip(chain[-1].__code__.co_freevars, chain[-1].__closure__ or (), strict=True))
    made = _equal_function(chain[-1], code, tuple(cells[name] for name in code.co_freevars))
    for wrapper, wrapped in zip(chain[-2::-1], chain[:0:-1], strict=True):
        closure = list(wrapper.__closure__ or ())
        index = wrapped_cell(wrapper, wrapped)
        if index is None:
            raise PlanError(f"call sites cannot be reached: {wrapper.__qualname__} changed while it was read")
        closure[index] = CellType(made)
        outer = _equal_function(wrapper, wrapper.__code__, tuple(closure))
        outer.__dict__["__wrapped__"] = made
        made = outer
    return made


def _literal(index: int) -> ast.expr:
    return ast.Constant(index) if index >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-index))


def _equal_function(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = dict(function.__kwdefaults__) if function.__kwdefaults__ else None
    made.__annotations__ = function.__annotations__
    made.__qualname__, made.__doc__, made.__module__ = function.__qualname__, function.__doc__, function.__module__
    made.__dict__.update(function.__dict__)
    return made
