"""Plans for people: a short table in which look-alike layers are one row, and sentences about one module or tensor."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import prod

from rich.console import Console, Group, RenderableType
from rich.table import Table

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import RUNTIME, DimLayout, Placement, Ranges, Segment, TensorLayout
from tensor_parallel.plan.plan import Boundary, CallSite, Factor, ModulePlan, Plan, TensorPlan
from tensor_parallel.plan.resolve import ResolvedPlan, bytes_by_rank, resolve

PRINT_WIDTH = 140


def render(what: RenderableType, width: int = PRINT_WIDTH) -> str:
    """What rich would print, as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(what)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def bytes_text(nbytes: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def counted(count: int, noun: str) -> str:
    """1 -> "1 rank", 2 -> "2 ranks"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


# ------------------------------------------------------------------------------ folding


def _ranges_text(numbers: Iterable[str]) -> str:
    """{"0", "1", "2", "5"} -> "0-2,5"; an item that is a range already stays as it is."""
    items = sorted(set(numbers), key=lambda text: (int(text.split("-")[0].split(",")[0]), text))
    found: list[tuple[int, int]] = []
    others: list[str] = []
    for item in items:
        if not item.isdigit():
            others.append(item)
        elif found and int(item) == found[-1][1] + 1:
            found[-1] = (found[-1][0], int(item))
        else:
            found.append((int(item), int(item)))
    return ",".join([f"{a}-{b}" if a != b else str(a) for a, b in found] + others)


def fold(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...], int]]:
    """Rows (dotted name, cells) with look-alikes merged: names that differ in numbers alone and have equal cells become
    one row, `layers.0-29.mlp.weight`.

    Returns (name, cells, how many rows it stands for), in order of first appearance.
    """
    merged = [(name.split("."), cells, 1) for name, cells in rows]
    deepest = max((len(name) for name, _, _ in merged), default=0)
    numbered = [[part.isdigit() for part in name] for name, _, _ in merged]
    for position in reversed(range(deepest)):
        groups: dict[tuple[object, ...], list[int]] = {}
        for row, (name, cells, _) in enumerate(merged):
            here = position < len(name) and numbered[row][position]
            rest = (*name[:position], None, *name[position + 1 :]) if here else tuple(name)
            groups.setdefault((rest, cells, here), []).append(row)
        again, flags = [], []
        for members in groups.values():
            name, cells, _ = merged[members[0]]
            if len(members) > 1:
                name = [*name]
                name[position] = _ranges_text(merged[row][0][position] for row in members)
            again.append((name, cells, sum(merged[row][2] for row in members)))
            flags.append(numbered[members[0]])
        merged, numbered = again, flags
    return [(".".join(name), cells, count) for name, cells, count in merged]


# ------------------------------------------------------------------------------ words


def _factor_text(segment: Segment, factors: Mapping[str, Factor]) -> str:
    """ "head (9 units of 64)" """
    texts = []
    for index, part in enumerate(segment.parts):
        if part.factor is None:
            continue
        factor = factors.get(part.factor)
        inner = prod(p.size for p in segment.parts[index + 1 :])
        of = "" if inner == 1 else " of run-time size" if RUNTIME in [p.size for p in segment.parts] else f" of {inner}"
        unit = re.sub(r" of \d+$", "", factor.unit) if factor else "unit"
        texts.append(f"{unit} ({part.size} unit{'s' * (part.size != 1)}{of})")
    return " x ".join(texts)


def dim_text(dim: DimLayout, factors: Mapping[str, Factor]) -> str:
    """How one dim is cut: "by head (9 units of 64)", "in 3 segments by head (4 units of 16)"."""
    cut = [_factor_text(segment, factors) for segment in dim.segments if segment.factors]
    if not cut:
        return "whole"
    kinds = list(dict.fromkeys(cut))
    whole = len(dim.segments) - len(cut)
    if len(dim.segments) == 1:
        return f"by {kinds[0]}"
    kept = f", {whole} of them whole" if whole else ""
    return f"in {len(dim.segments)} segments{kept}, by {' and by '.join(kinds)}"


def layout_text(layout: TensorLayout, factors: Mapping[str, Factor]) -> str:
    """How a tensor is cut: "dim 0 by head (9 units of 64)"; "whole" where nothing cuts it."""
    cut = [f"dim {index} {dim_text(dim, factors)}" for index, dim in enumerate(layout.dims) if dim.factors]
    return "; ".join(cut) if cut else "whole"


def tensor_text(tensor: TensorPlan, factors: Mapping[str, Factor]) -> str:
    """One cell about one tensor."""
    if not tensor.is_cut:
        return "on rank 0, zeros elsewhere" if tensor.rank0_only else "whole"
    return layout_text(tensor.layout, factors) + (", output gathered" if tensor.gathered else "")


def plan_table(plan: Plan) -> RenderableType:
    """The plan as a short table: parameters by layout, then the collectives of one forward."""
    rows = [
        (key, (tensor_text(t, plan.factors), t.reason, "x".join(map(str, t.layout.shape)) or "scalar"))
        for key, t in plan.tensors.items()
        if not t.is_buffer or t.is_cut
    ]
    ties = {key: t.names[1:] for key, t in plan.tensors.items() if len(t.names) > 1}
    parameters = sum(t.nbytes for t in plan.tensors.values() if not t.is_buffer)
    table = Table(title=f"plan: {len(rows)} tensors, {bytes_text(parameters)} of parameters", title_justify="left")
    for column in ("tensor", "shape", "how it is cut", "why whole"):
        table.add_column(column, overflow="fold")
    for name, (how, why, shape), _ in fold(rows):
        tied = f" = {', '.join(ties[name])}" if name in ties else ""
        table.add_row(name + tied, shape, how, why)
    talk = Table(title="collectives of one forward", title_justify="left")
    for column in ("module", "operation", "calls", "bytes each"):
        talk.add_column(column)
    folded = fold([(t.module, (t.path, t.op, str(t.calls), bytes_text(t.nbytes))) for t in plan.traffic])
    for name, (path, op, calls, nbytes), count in folded:
        where = (name or "the model") + (f" [{path}]" if path else "")
        talk.add_row(where, op.replace("_", "-"), str(count * int(calls)), nbytes)
    return Group(table, talk) if plan.traffic else table


# ------------------------------------------------------------------------------ explain


def _placement_text(placement: Placement, factors: Mapping[str, Factor]) -> str:
    if placement.kind == "partial":
        return "a sum over the ranks still to be taken"
    if placement.kind == "replicate":
        return "whole on every rank"
    return "cut along " + " and ".join(f"dim {dim} {dim_text(layout, factors)}" for dim, layout in placement.dims)


def _boundary_text(boundary: Boundary, entering: bool, factors: Mapping[str, Factor]) -> str:
    name = f"its input {boundary.path}" if entering else f"its output {boundary.path}".rstrip()
    only = "" if boundary.call is None else f" (call {boundary.call} only)"
    before, after = boundary.before.kind, boundary.after.kind
    lies = _placement_text(boundary.before, factors)
    if (before, after) == ("partial", "replicate"):
        what = "is summed over the ranks (all-reduce)"
    elif (before, after) == ("shard", "replicate"):
        what = f"is gathered from the ranks (all-gather); it lay {lies}"
    elif (before, after) == ("replicate", "shard"):
        what = f"is sliced by each rank for itself; it lies {_placement_text(boundary.after, factors)}"
    elif (before, after) == ("replicate", "partial"):
        what = "stays on rank 0 and is zeros elsewhere, for a sum that comes later"
    elif boundary.gathers_gradient:
        what = "is whole and meets cut tensors behind: the parts of its gradient are summed here"
    elif before == after:
        what = f"passes as it is: {lies}"
    else:
        what = f"goes from {lies} to {_placement_text(boundary.after, factors)}"
    return f"{name}{only} {what}."


def _share_text(factor: Factor, ranges: Ranges) -> str:
    shares = [
        f"{start}-{stop - 1}" if stop - start > 1 else str(start) if start < stop else "none" for start, stop in ranges
    ]
    if all(share == (0, factor.units) for share in ranges):
        return f"Over {counted(len(ranges), 'rank')}, every rank has all {factor.units} units of {factor.name}."
    return f"Over {counted(len(ranges), 'rank')}, units of {factor.name} by rank: {'; '.join(shares)}."


def _bytes_text(tensors: Sequence[TensorPlan], resolved: ResolvedPlan) -> str:
    held, whole = bytes_by_rank(resolved, tensors), sum(tensor.nbytes for tensor in tensors)
    ranks = counted(resolved.world_size, "rank")
    return f"Over {ranks}, bytes by rank: {'; '.join(map(bytes_text, held))}; whole: {bytes_text(whole)}."


def _tensor_sentences(key: str, name: str, plan: Plan) -> list[str]:
    tensor = plan.tensors[key]
    shape = " x ".join(map(str, tensor.layout.shape)) or "a scalar"
    tied = [other for other in tensor.names if other != name]
    also = f" It is tied to {', '.join(tied)} and held once." if tied else ""
    if tensor.rank0_only:
        why = f" ({tensor.reason})" if tensor.reason else ""
        return [
            f"{name} ({shape}) is used by rank 0, zeros on the other ranks, so that the sum over the ranks adds it "
            f"once{why}.{also}"
        ]
    if not tensor.is_cut:
        return [f"{name} ({shape}) is whole on every rank: {tensor.reason or 'nothing cuts it'}.{also}"]
    sentences = [f"{name} ({shape}) is cut: {layout_text(tensor.layout, plan.factors)}.{also}"]
    if tensor.gathered:
        sentences.append("It was planned without a trace: the layer is cut by itself and its output gathered.")
    return sentences


def _site_text(site: CallSite) -> str:
    where = "".join(f"[{index}]" for index in site.argument)
    how = "the rank's own size" if site.layout is not None else f"always {site.value}"
    return f"In {site.method}, line {site.position[0]} after its start, argument {where} of a call becomes {how}."


def _module_sentences(name: str, module: ModulePlan, plan: Plan) -> list[str]:
    sentences = [_boundary_text(b, True, plan.factors) for b in module.inputs]
    for lookup in module.lookups:
        sentences.append(
            f"Rows of {lookup.weight} are looked up {dim_text(lookup.rows, plan.factors)}; ids of {lookup.path} that "
            f"another rank holds give zero rows, so the output is a sum over the ranks."
        )
    sentences += [_boundary_text(b, False, plan.factors) for b in module.outputs]
    for size in module.attributes:
        how = dim_text(size.layout, plan.factors)
        sentences.append(f"Its code reads {size.attribute} ({size.layout.size}) as the rank's own: {how}.")
    sentences += [_site_text(site) for site in module.call_sites]
    return [f"{name or 'The model'}: {sentence}" for sentence in sentences]


def _full_name(plan: Plan, name: str, tensors: Iterable[str]) -> str:
    """The name that `name` is, or is the end of."""
    known = {""}
    for full in (*tensors, *plan.modules):
        parts = full.split(".")
        known.update(".".join(parts[:stop]) for stop in range(1, len(parts) + 1))
    if name in known:
        return name
    ends = sorted(full for full in known if full.endswith(f".{name}"))
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise PlanError(f"{name!r} is the end of {len(ends)} names, {', '.join(ends[:4])}...; give more of it")
    close = get_close_matches(name, known, 1)
    raise PlanError(
        f"the plan knows no module or tensor {name!r}{f' (nearest: {close[0]!r})' if close else ''}; give a dotted "
        f"name as named_modules() or named_parameters() show it"
    )


def explain(plan: Plan, name: str, world_size: int | None = None) -> str:
    """What the plan does with one module (its inner modules included) or one tensor, one sentence a line: how each
    tensor is cut, the units and bytes of each rank, what is reduced or gathered at the borders, which integers become
    local, and why something is whole.

    Args:
        name: dotted name of a module or tensor, "" for the model; its end is enough where that is unique.
        world_size: the number of ranks whose shares are named; default: the one that the plan was made for.

    Raises:
        PlanError: the plan knows no such name.
    """
    world_size = plan.world_size if world_size is None else world_size
    by_name = {n: key for key, tensor in plan.tensors.items() for n in tensor.names}
    name = _full_name(plan, name, by_name)
    inside = f"{name}." if name else ""
    found = [n for n in by_name if n == name or n.startswith(inside)]
    modules = [n for n in plan.modules if n == name or n.startswith(inside)]
    sentences = [s for n in found for s in _tensor_sentences(by_name[n], n, plan)]
    resolved = resolve(plan, world_size)
    cuts = resolved.cuts
    factors = dict.fromkeys(f for n in found for f in plan.tensors[by_name[n]].layout.factors)
    sentences += [_share_text(plan.factors[f], cuts[f]) for f in factors]
    if found:
        sentences.append(_bytes_text([plan.tensors[key] for key in dict.fromkeys(by_name[n] for n in found)], resolved))
    for n in modules:
        sentences += _module_sentences(n, plan.modules[n], plan)
    for traffic in plan.traffic:
        if traffic.module == name or traffic.module.startswith(inside):
            sentences.append(
                f"{traffic.module or 'The model'}: {counted(traffic.calls, traffic.op.replace('_', '-'))} of "
                f"{bytes_text(traffic.nbytes)} in one forward."
            )
    return "\n".join(sentences)
