"""Whether a plan fits a model: the check before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from torch import nn

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import RUNTIME, DimLayout, Placement
from tensor_parallel.plan.plan import ModulePlan, Plan

_CURE = "make the plan anew with make_plan(module, world_size)"


def _nearest(name: str, names: object) -> str:
    close = get_close_matches(name, [str(n) for n in names], 1)  # type: ignore[attr-defined]
    return f" (nearest: {close[0]!r})" if close else ""


def _named_tensors(module: nn.Module) -> dict[str, tuple[object, tuple[int, ...], bool]]:
    """name -> (identity, shape, is a buffer) of every parameter and buffer, each of its names."""
    found: dict[str, tuple[object, tuple[int, ...], bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[name] = (parameter, tuple(parameter.shape), False)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        found[name] = (buffer, tuple(buffer.shape), True)
    return found


def _check_tensors(plan: Plan, module: nn.Module) -> None:
    tensors = _named_tensors(module)
    seen: dict[str, str] = {}
    for key, planned in plan.tensors.items():
        if not planned.names or planned.names[0] != key:
            raise PlanError(f"tensor {key!r}: its names are {list(planned.names)}, the first must be its key; {_CURE}")
        for name in planned.names:
            if name in seen:
                raise PlanError(f"tensor {name!r} is planned twice, under {seen[name]!r} and {key!r}; {_CURE}")
            seen[name] = key
            if name not in tensors:
                raise PlanError(f"tensor {name!r} of the plan is not in the model{_nearest(name, tensors)}; {_CURE}")
            tensor, shape, is_buffer = tensors[name]
            if shape != planned.layout.shape:
                raise PlanError(
                    f"tensor {name!r}: the plan is for shape {planned.layout.shape}, the model's is {shape}; {_CURE}"
                )
            if is_buffer != planned.is_buffer:
                here, there = ("buffer", "parameter") if planned.is_buffer else ("parameter", "buffer")
                raise PlanError(f"tensor {name!r} is a {here} in the plan and a {there} in the model; {_CURE}")
            if tensor is not tensors[key][0] and not is_buffer:
                raise PlanError(f"tensor {name!r} is tied to {key!r} in the plan but not in the model; {_CURE}")
    owners: dict[int, str] = {}
    for name, (tensor, shape, is_buffer) in tensors.items():
        if name not in seen:
            raise PlanError(
                f"{'buffer' if is_buffer else 'parameter'} {name!r} of shape {shape} is missing in the plan; {_CURE}"
            )
        owner = owners.setdefault(id(tensor), seen[name])
        if owner != seen[name] and not is_buffer:
            raise PlanError(f"tensor {name!r} is tied to {owner!r} in the model but not in the plan; {_CURE}")


def _placements(planned: ModulePlan) -> Iterator[tuple[str, Placement]]:
    for kind, boundaries in (("input", planned.inputs), ("output", planned.outputs)):
        for boundary in boundaries:
            for placement in (boundary.before, boundary.after):
                yield f"{kind} {boundary.path!r}", placement


def _layouts(plan: Plan) -> Iterator[tuple[str, DimLayout]]:
    """(where, layout) of every dim layout in the plan."""
    for key, tensor in plan.tensors.items():
        for index, dim in enumerate(tensor.layout.dims):
            yield f"tensor {key!r} dim {index}", dim
    for name, planned in plan.modules.items():
        where = f"module {name!r}"
        for label, placement in _placements(planned):
            yield from ((f"{where} {label} dim {index}", dim) for index, dim in placement.dims)
        yield from ((f"{where} lookup {lookup.path!r}", lookup.rows) for lookup in planned.lookups)
        yield from ((f"{where} attribute {size.attribute!r}", size.layout) for size in planned.attributes)
        for site in planned.call_sites:
            if site.layout is not None:
                yield f"{where} call site in {site.method}", site.layout


def _check_factors(plan: Plan) -> None:
    for name, factor in plan.factors.items():
        if factor.name != name:
            raise PlanError(f"factor {factor.name!r} is filed under {name!r}; {_CURE}")
        if factor.units < 1:
            raise PlanError(f"factor {name!r} has {factor.units} units, at least 1 is required; {_CURE}")
        if factor.partner is not None and factor.partner not in plan.factors:
            raise PlanError(f"factor {name!r}: its partner {factor.partner!r} is not among the factors; {_CURE}")
    for where, layout in _layouts(plan):
        for segment in layout.segments:
            for part in segment.parts:
                if part.factor is None:
                    continue
                if part.factor not in plan.factors:
                    known = _nearest(part.factor, plan.factors)
                    raise PlanError(f"{where}: factor {part.factor!r} is not among the factors{known}; {_CURE}")
                units = plan.factors[part.factor].units
                if part.size not in (units, RUNTIME):
                    raise PlanError(
                        f"{where}: given {part.size} units of factor {part.factor!r}, required {units}; {_CURE}"
                    )
    _check_sums(plan)


def _check_sums(plan: Plan) -> None:
    for name, planned in plan.modules.items():
        for label, placement in _placements(planned):
            for known_as in placement.factors:
                if known_as not in plan.factors:
                    raise PlanError(
                        f"module {name!r} {label}: factor {known_as!r} is not among the factors"
                        f"{_nearest(known_as, plan.factors)}; {_CURE}"
                    )


def _has_attribute(module: nn.Module, dotted: str) -> bool:
    holder: object = module
    for name in dotted.split("."):
        if not hasattr(holder, name):
            return False
        holder = getattr(holder, name)
    return True


def _check_modules(plan: Plan, module: nn.Module) -> None:
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, planned in plan.modules.items():
        if name not in modules:
            raise PlanError(f"module {name!r} of the plan is not in the model{_nearest(name, modules)}; {_CURE}")
        here = modules[name]
        kind = type(here).__name__
        for lookup in planned.lookups:
            if not _has_attribute(here, lookup.weight):
                raise PlanError(f"module {name!r} ({kind}) has no weight {lookup.weight!r} to look up in; {_CURE}")
        for size in planned.attributes:
            if not _has_attribute(here, size.attribute):
                raise PlanError(f"module {name!r} ({kind}) has no attribute {size.attribute!r}; {_CURE}")
        for site in planned.call_sites:
            if not callable(getattr(type(here), site.method, None)):
                raise PlanError(f"module {name!r} ({kind}) has no method {site.method!r}; {_CURE}")


def check_plan(plan: Plan, module: nn.Module) -> None:
    """Check that `plan` is whole in itself and fits `module`, an unsplit model. Changes nothing.

    Raises:
        PlanError: names the first difference: a tensor (with the given and the required shape), a module, an attribute
            or a factor, and the cure.
    """
    _check_tensors(plan, module)
    _check_modules(plan, module)
    _check_factors(plan)
