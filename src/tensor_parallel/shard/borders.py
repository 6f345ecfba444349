"""A module's border on one rank: what is reduced, gathered or sliced where tensors enter and leave it.

Compiled once from a ModulePlan, so that a call does no lookups by name. Three forms: *inside* turns each tensor from
how it lies before the border into how it lies after; *outside*, for a call that does not come from a rank, takes and
gives whole tensors; *around*, for a call in a rank that user code shall see whole, stands around an outside call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tensor_parallel.comm.group import Group
from tensor_parallel.errors import PlanError
from tensor_parallel.layout import REPLICATE, RUNTIME, Cuts, DimLayout, Placement, holds_nothing, local_size, runs, take
from tensor_parallel.plan import Boundary, Lookup, ModulePlan
from tensor_parallel.shard.values import Key, change_at, parse_path, tensor_at

Convert = Callable[[torch.Tensor], torch.Tensor]
Form = Literal["inside", "outside", "around"]


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's means of conversion."""

    rank: int
    group: Group
    cuts: Cuts

    def contributes(self, factors: Sequence[str]) -> bool:
        """Whether this rank's part of a sum counts: it holds units, and no rank before it holds the same ones."""
        if holds_nothing(factors, self.cuts, self.rank):
            return False
        mine = [self.cuts[f][self.rank] for f in factors]
        return not any(mine == [self.cuts[f][other] for f in factors] for other in range(self.rank))

    def keeper(self, factors: Sequence[str]) -> int:
        """The first rank whose part of a sum counts."""
        ranks = range(self.group.size())
        return next((r for r in ranks if not holds_nothing(factors, self.cuts, r)), 0)


def _take_at_run_time(tensor: torch.Tensor, dim: int, layout: DimLayout, view: RankView) -> torch.Tensor:
    return take(tensor, tensor.dim() + dim, layout.at_run_time(tensor.size(dim)), view.cuts, view.rank)


def _slicer(placement: Placement, view: RankView) -> Convert:
    """Whole tensor -> this rank's part. Differentiable."""
    steps: list[tuple[int, DimLayout, list[tuple[int, int]] | None]] = []
    for dim, layout in placement.dims:
        at_run_time = any(part.size == RUNTIME for segment in layout.segments for part in segment.parts)
        steps.append((dim, layout, None if at_run_time else runs(layout, view.cuts, view.rank)))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        for dim, layout, ranges in steps:
            if ranges is None:
                tensor = _take_at_run_time(tensor, dim, layout, view)
            elif len(ranges) == 1:
                start, stop = ranges[0]
                tensor = tensor.narrow(dim, start, stop - start)
            else:
                tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges], dim)
        return tensor

    return convert


def _to_whole(placement: Placement, view: RankView) -> Convert | None:
    group, cuts = view.group, view.cuts
    if placement.kind == "partial":
        counts = view.contributes(placement.factors)
        return lambda tensor: group.all_reduce(tensor, contributes=counts)
    if placement.kind == "shard":
        return lambda tensor: group.all_gather(tensor, placement, cuts)
    return None


def _from_whole(placement: Placement, view: RankView) -> Convert | None:
    if placement.kind == "shard":
        share, slicer = _share(view.group), _slicer(placement, view)
        return lambda tensor: slicer(share(tensor))
    if placement.kind == "partial":
        return None if view.keeper(placement.factors) == view.rank else view.group.withheld
    return None


def converter(before: Placement, after: Placement, view: RankView) -> Convert | None:
    """The conversion of a tensor that lies as `before` into one that lies as `after` on this rank; None: no change."""
    if before.kind == after.kind and (before.kind != "shard" or before == after):
        return None
    first, second = _to_whole(before, view), _from_whole(after, view)
    if first is None or second is None:
        return first or second
    return lambda tensor: second(first(tensor))


LastExit = Callable[[Convert, Placement, RankView], Convert]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one argument is: by position, else by keyword. `lasting`: not for its gradient alone."""

    position: int | None
    keyword: str | None
    path: tuple[Key, ...]
    convert: Convert
    call: int | None = None
    lasting: bool = True

    def apply(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        if self.position is not None and self.position < len(args):
            args[self.position] = change_at(args[self.position], self.path, self.convert)
        elif self.keyword is not None and self.keyword in kwargs:
            kwargs[self.keyword] = change_at(kwargs[self.keyword], self.path, self.convert)

    def find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
        if self.position is not None and self.position < len(args):
            return tensor_at(args[self.position], self.path)
        return tensor_at(kwargs.get(self.keyword), self.path) if self.keyword is not None else None


@dataclass(frozen=True, slots=True)
class _Exit:
    path: tuple[Key, ...]
    convert: Convert
    call: int | None = None


def _place(signature: inspect.Signature, path: str) -> tuple[int | None, str | None, tuple[Key, ...]]:
    """(position, keyword, rest of the path) of an argument named by `path` in a forward without its `self`."""
    name, *rest = parse_path(path)
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.name != str(name):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL and rest and isinstance(rest[0], int):
            return index + rest[0], None, tuple(rest[1:])
        if parameter.kind is parameter.VAR_KEYWORD and rest:
            return None, str(rest[0]), tuple(rest[1:])
        by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        by_name = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        return (index if by_position else None), (parameter.name if by_name else None), tuple(rest)
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None, str(name), tuple(rest)
    raise PlanError(f"the forward has no argument {path!r}: it takes {signature}")


class _RowLookup:
    """An embedding's ids on one rank: shifted to the rank's rows, those of other ranks masked out. An id that is no row
    at all stays out of range, so that the embedding refuses it as it did unsplit."""

    __slots__ = ("entry", "ranges", "size")

    def __init__(self, entry: _Entry, rows: DimLayout, view: RankView) -> None:
        self.entry = entry
        self.ranges = runs(rows, view.cuts, view.rank)
        self.size = rows.size

    def local(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids in the rank's own rows, where they are another rank's)."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            elsewhere = self._between(ids, stop, self.size)
            if start:
                elsewhere = elsewhere | self._between(ids, 0, start)
            return (ids - start).masked_fill(elsewhere, 0), elsewhere
        found, elsewhere, offset = ids.clone(), self._between(ids, 0, self.size), 0
        for start, stop in self.ranges:
            here = self._between(ids, start, stop)
            found = torch.where(here, ids - start + offset, found)
            elsewhere = elsewhere & ~here
            offset += stop - start
        return found.masked_fill(elsewhere, 0), elsewhere

    @staticmethod
    def _between(ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return (ids >= start) & (ids < stop)


class Borders:
    """What one module does at its border on one rank, in one form."""

    __slots__ = ("by_call", "calls", "entries", "exits", "lasting", "lookups")

    def __init__(self, entries: list[_Entry], exits: list[_Exit], lookups: list[_RowLookup]) -> None:
        self.entries = entries
        self.lasting = [entry for entry in entries if entry.lasting]
        self.exits = exits
        self.lookups = lookups
        self.calls = 0
        self.by_call = any(e.call is not None for e in entries) or any(e.call is not None for e in exits)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any], Any]:
        """(arguments, keywords, what `leave` needs)."""
        entries = self.entries if torch.is_grad_enabled() else self.lasting
        if not entries and not self.lookups:
            return args, kwargs, None
        changed, keywords, masks = list(args), dict(kwargs), None
        for entry in entries:
            if entry.call is None or entry.call == self.calls:
                entry.apply(changed, keywords)
        for lookup in self.lookups:
            ids = lookup.entry.find(changed, keywords)
            if ids is not None:
                local, masks = lookup.local(ids)
                entry = lookup.entry
                at = _Entry(entry.position, entry.keyword, entry.path, lambda _, new=local: new)  # type: ignore[misc]
                at.apply(changed, keywords)
        return changed, keywords, masks

    def leave(self, output: Any, elsewhere: torch.Tensor | None) -> Any:
        """The module's output, converted; `elsewhere` marks ids whose rows are other ranks'."""
        if elsewhere is not None:
            output = output.masked_fill(elsewhere.unsqueeze(-1), 0)
        for step in self.exits:
            if step.call is None or step.call == self.calls:
                output = change_at(output, step.path, step.convert)
        if self.by_call:
            self.calls += 1
        return output


def cross(
    borders: Borders | None, forward: Callable[..., Any], module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """A rank's `forward` of `module`, with what happens at the border before and after it."""
    if borders is None:
        return forward(module, *args, **kwargs)
    changed, keywords, elsewhere = borders.enter(tuple(args), kwargs)
    return borders.leave(forward(module, *changed, **keywords), elsewhere)


def _converted(boundary: Boundary, view: RankView, form: Form, *, leaving: bool) -> Convert | None:
    if form == "inside":
        return converter(boundary.before, boundary.after, view)
    if form == "outside" and leaving and boundary.before.kind == "shard":
        # Only rank 0's output leaves.
        return lambda tensor: view.group.gather_first(tensor, boundary.before, view.cuts)
    if (form == "outside") == leaving:
        return converter(boundary.before, REPLICATE, view)
    return converter(REPLICATE, boundary.after, view)


def _share(group: Group, holders: list[list[int]] | None = None) -> Convert:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return group.broadcast(tensor, holders) if torch.is_grad_enabled() and tensor.is_floating_point() else tensor

    return convert


def _unless_whole(convert: Convert, placement: Placement, view: RankView) -> Convert:
    """For a tensor that a module further in may have given whole already, because somebody asked for it or the model
    records it. Where a part can be as large as the whole the two cannot be told apart."""
    ranks = range(view.group.size())
    sizes = [
        (dim, layout.size)
        for dim, layout in placement.dims
        if all(part.size != RUNTIME for segment in layout.segments for part in segment.parts)
        and all(local_size(layout, view.cuts, rank) != layout.size for rank in ranks)
    ]
    if not sizes:
        return convert

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if all(tensor.size(dim) == size for dim, size in sizes) else convert(tensor)

    return converted


def _shared_exit(boundary: Boundary, view: RankView) -> Convert | None:
    """For an output that stays cut, with pieces that several ranks hold (KV heads fewer than ranks): each of them has a
    part of its piece's gradient."""
    if boundary.before.kind != "shard" or boundary.before != boundary.after:
        return None
    factors = boundary.before.cut_by
    found: dict[Any, list[int]] = {}
    for rank in range(view.group.size()):
        if not holds_nothing(factors, view.cuts, rank):
            found.setdefault(tuple(view.cuts[f][rank] for f in factors), []).append(rank)
    holders = list(found.values())
    return _share(view.group, holders) if any(len(ranks) > 1 for ranks in holders) else None


def compile_borders(
    plan: ModulePlan,
    module: nn.Module,
    signature: inspect.Signature,
    view: RankView,
    form: Form,
    last: LastExit | None = None,
) -> Borders | None:
    """The border of `module` on one rank, in one form; None where nothing happens at it.

    last: for the module of the last gather, what is done there instead.

    Raises:
        PlanError: the plan names an argument that the forward does not take, or cuts an embedding that cannot be.
    """
    entries, exits = [], []
    for boundary in plan.inputs:
        convert = _converted(boundary, view, form, leaving=False)
        lasting = convert is not None
        if convert is None and boundary.gathers_gradient and form != "around":
            convert = _share(view.group)
        if convert is not None:
            entries.append(_Entry(*_place(signature, boundary.path), convert, boundary.call, lasting))
    for boundary in plan.outputs:
        if form == "around" and boundary.spare:
            continue  # nobody reads it but who asked for it, and wants it whole
        convert = _converted(boundary, view, form, leaving=True)
        if convert is not None and form == "inside" and last is not None and boundary.after == REPLICATE:
            convert = last(convert, boundary.before, view)
        inner = boundary.spare or boundary.path
        if convert is not None and inner and boundary.before.kind == "shard" and form != "around":
            convert = _unless_whole(convert, boundary.before, view)
        if convert is None and form == "inside":
            convert = _share(view.group) if boundary.gathers_gradient else _shared_exit(boundary, view)
        if convert is not None:
            exits.append(_Exit(parse_path(boundary.path), convert, boundary.call))
    lookups = [_lookup(lookup, module, signature, view) for lookup in plan.lookups if form != "around"]
    return Borders(entries, exits, lookups) if entries or exits or lookups else None


def _lookup(lookup: Lookup, module: nn.Module, signature: inspect.Signature, view: RankView) -> _RowLookup:
    if getattr(module, "max_norm", None) is not None or getattr(module, "scale_grad_by_freq", False):
        raise PlanError(
            f"{type(module).__name__} with max_norm or scale_grad_by_freq cannot be cut by rows; keep its weight whole"
        )
    entry = _Entry(*_place(signature, lookup.path), lambda ids: ids)
    return _RowLookup(entry, lookup.rows, view)
