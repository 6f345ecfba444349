"""What a split did: how much is split, what each device holds, what the ranks say to each other, what stayed whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from tensor_parallel.layout import Cuts, TensorLayout
from tensor_parallel.plan import Plan, ResolvedPlan, TensorPlan, Traffic, bytes_by_rank, resolve
from tensor_parallel.plan.table import bytes_text, counted, fold, plan_table, render
from tensor_parallel.shard import ModelShards, bytes_held, up_to_date


@dataclass(frozen=True)
class Report:
    """What a split did to one model, or what a plan would do.

    devices: by rank; "any" where a plan alone is reported.

    split_fraction: share of parameter bytes that an island cuts, by segment: no rank holds them whole. 0 on one device.
    gathered_fraction: share of parameter bytes cut one layer at a time with the output gathered, for want of a trace.
    bytes_per_device: bytes of the parameters held by each rank, by rank; each storage once, every copy of a replicated
        parameter counted where it lies.
    collectives: collectives of one forward, from the plan; `traffic` lists each with its bytes.
    kept_whole: parameter -> why some rank holds it whole.
    """

    devices: tuple[str, ...]
    split_fraction: float
    gathered_fraction: float
    bytes_per_device: list[int]
    collectives: int
    traffic: tuple[Traffic, ...]
    kept_whole: dict[str, str]
    parameter_bytes: int
    plan: Plan = field(repr=False)

    def __rich__(self) -> RenderableType:
        title = (
            f"{counted(len(self.devices), 'rank')}: "
            f"{self.split_fraction:.1%} of {bytes_text(self.parameter_bytes)} split, "
            f"{self.gathered_fraction:.1%} split and gathered layer by layer, "
            f"{counted(self.collectives, 'collective')} a forward"
        )
        held = Table()
        for column in ("rank", "device", "parameters held", "of the model"):
            held.add_column(column, justify="right")
        for rank, (device, nbytes) in enumerate(zip(self.devices, self.bytes_per_device, strict=True)):
            share = nbytes / self.parameter_bytes if self.parameter_bytes else 0.0
            held.add_row(str(rank), device, bytes_text(nbytes), f"{share:.1%}")
        parts: list[RenderableType] = [Text(title, style="bold"), held]
        if len(self.devices) > 1:  # on one device nothing of the plan is done
            parts.append(plan_table(self.plan))
        late = {n: why for n, why in self.kept_whole.items() if self.plan.tensors[n].is_cut}
        if late and len(self.devices) > 1:
            table = Table(title="cut by the plan, but whole over these ranks", title_justify="left")
            table.add_column("tensor")
            table.add_column("why")
            for name, (why,), _ in fold([(name, (why,)) for name, why in late.items()]):
                table.add_row(name, why)
            parts.append(table)
        return Group(*parts)

    def __str__(self) -> str:
        return render(self)


def cut_share(layout: TensorLayout, cuts: Cuts, world_size: int) -> float:
    """The share of a tensor's elements that no rank holds whole: those in segments that are cut on every rank."""
    by_dim: list[Mapping[tuple[str, ...], int]] = []
    full: dict[str, set[int]] = {}
    for dim in layout.dims:
        sizes: dict[tuple[str, ...], int] = {}
        for segment in dim.segments:
            sizes[segment.factors] = sizes.get(segment.factors, 0) + segment.size
            for part in segment.parts:
                if part.factor is not None:
                    ranges = cuts[part.factor]
                    full[part.factor] = {r for r in range(world_size) if ranges[r] == (0, part.size)}
        by_dim.append(sizes)
    cut = total = 0
    for block in product(*(sizes.items() for sizes in by_dim)):
        elements = 1
        holders = set(range(world_size))
        for factors, size in block:
            elements *= size
            holders = holders.intersection(*(full[f] for f in factors))
        total += elements
        cut += 0 if holders else elements
    return cut / total if total else 0.0


def _why_whole(tensor: TensorPlan, world_size: int) -> str:
    if world_size == 1:
        return "there is one device"
    if not tensor.is_cut:
        return tensor.reason or "nothing cuts it"
    named = ", ".join(tensor.layout.factors)
    return f"{named}: too few units for {counted(world_size, 'rank')}, so that one rank holds all of them"


def _parameter_bytes(shards: ModelShards, key: str) -> int:
    """Bytes of the whole parameter in its present dtype."""
    tensor = shards.tensors[key]
    elements = 1
    for size in tensor.plan.layout.shape:
        elements *= size
    return elements * (tensor.pieces[0].tensor.element_size() if tensor.pieces else 0)


def report(split: nn.Module | Plan, world_size: int | None = None) -> Report:
    """What splitting did to a model, or what a plan would do; prints as tables.

    split: a split model, or a plan.
    world_size: of a plan: over how many ranks; default: the number that it was made for.

    Raises:
        TensorParallelError: the model is not split.
        PlanError: world_size below 1.
        ValueError: a world_size for a model that is split over another number of ranks.
    """
    if isinstance(split, Plan):
        resolved = resolve(split, split.world_size if world_size is None else world_size)
        parameters = {key: tensor for key, tensor in split.tensors.items() if not tensor.is_buffer}
        sizes = {key: tensor.nbytes for key, tensor in parameters.items()}
        return _report(resolved, sizes, bytes_by_rank(resolved, parameters.values()), ["any"] * resolved.world_size)
    shards = up_to_date(split)
    if world_size not in (None, shards.world_size):
        raise ValueError(
            f"report: world_size is {world_size}, but the model is split over {counted(shards.world_size, 'rank')}; "
            "leave it out, or give a plan (tp.make_plan) in place of the model"
        )
    keys = [key for key, tensor in shards.tensors.items() if not tensor.plan.is_buffer]
    sizes = {key: _parameter_bytes(shards, key) for key in keys}
    return _report(shards.resolved, sizes, bytes_held(shards), [str(device) for device in shards.devices])


def _report(resolved: ResolvedPlan, sizes: Mapping[str, int], held: list[int], devices: Sequence[str]) -> Report:
    """sizes: bytes of each whole parameter.  held: bytes by rank."""
    world_size, cuts, plan = resolved.world_size, resolved.cuts, resolved.plan
    split = gathered = 0.0
    kept: dict[str, str] = {}
    for key, nbytes in sizes.items():
        tensor = plan.tensors[key]
        share = cut_share(tensor.layout, cuts, world_size)
        split += 0.0 if tensor.gathered else share * nbytes
        gathered += share * nbytes if tensor.gathered else 0.0
        if share == 0.0:
            kept[key] = _why_whole(tensor, world_size)
    traffic = plan.traffic if world_size > 1 else ()
    total = sum(sizes.values())
    return Report(
        devices=tuple(devices),
        split_fraction=split / total if total else 0.0,
        gathered_fraction=gathered / total if total else 0.0,
        bytes_per_device=held,
        collectives=sum(t.calls for t in traffic),
        traffic=traffic,
        kept_whole=kept,
        parameter_bytes=total,
        plan=plan,
    )
