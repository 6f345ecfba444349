"""Random draws that all ranks make together.

A process has one generator a device kind: ranks that draw by themselves race for it, and a replicated tensor would get
another mask on each rank, which makes the model wrong. So in this mode a random call is a meeting. Where the plan says
how the tensor lies, the whole model's numbers are drawn once, those of the unsplit model, and each rank takes its part
of them and does the rest in its own thread. Where nobody knows, tensors that are the same on all ranks get the same
numbers, and ranks whose tensors differ draw one after the other.

The masks inside fused attention kernels of CUDA are no numbers that can be taken apart: there split heads draw one rank
after the other. So do multinomial, binomial and recurrent nets on cut tensors: reproducible, but not the numbers of the
unsplit model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tensor_parallel.comm.draws import DRAWING, FILLING, Drawn, Layouts, argument, draws
from tensor_parallel.comm.gather import plan_gather, whole_layouts
from tensor_parallel.comm.threads import ThreadGroup
from tensor_parallel.errors import CollectiveError
from tensor_parallel.layout import holds_nothing, take

Rest = Callable[[], Any]
"""What is left of a random call for the rank's own thread."""


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's random call. saving: the saved-tensor hooks in its thread."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    drawn: Drawn | None
    saving: Any

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    @property
    def tensor(self) -> Any:
        return argument(
            self.args, self.kwargs, 0, "query" if self.func is F.scaled_dot_product_attention else "input", None
        )

    def run(self) -> Any:
        """In any thread, as if in the rank's own."""
        hooks = torch.autograd.graph.saved_tensors_hooks(*self.saving) if self.saving is not None else nullcontext()
        with hooks:
            return self.func(*self.args, **self.kwargs)


class JointRandom(TorchFunctionMode):
    """One rank's view; active in its thread for a run."""

    def __init__(self, group: ThreadGroup, layouts: Layouts | None = None) -> None:
        super().__init__()
        self._rank = group.rank()
        self._meeting = group.rendezvous
        self._layouts = layouts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        # Rank 0 may be at user code, whose draws are the caller's own.
        if func not in DRAWING or not self._meeting.is_rank():
            return func(*args, **given)
        name = getattr(func, "__name__", str(func))
        drawn = self._layouts(self._rank, name) if self._layouts is not None else None
        if not draws(func, args, given):
            return func(*args, **given)
        call = Call(func, args, given, drawn, torch._C._autograd._top_saved_tensors_default_hooks(False))
        rest: Rest = self._meeting.meet(self._rank, "random draw", _draw_for_all, call)
        return rest()


def _draw_for_all(calls: list[Call]) -> Sequence[Rest]:
    names = [call.name for call in calls]
    if len(set(names)) > 1:
        raise CollectiveError(
            f"the ranks draw random numbers differently: {names}; all must make the same random calls"
        )
    parts = _parts(calls) or _parts_of_results(calls)
    if parts is not None:
        return parts
    drawn = calls[0].drawn
    if drawn is None or drawn.placement.kind == "shard":
        same = _same(calls)
    else:
        same = True
    if not same:
        return [_given(call.run()) for call in calls]
    generators = _generators(calls)
    states = [generator.get_state() for generator in generators]
    results = []
    for call in calls:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        results.append(_given(call.run()))
    return results


def _given(result: Any) -> Rest:
    return lambda: result


# --- drawn whole, taken in parts -----------------------------------------------------------------------------------

_DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_, torch.feature_dropout}
)
"""What multiplies its input by a mask that depends on the input's shape alone."""

_LIKE = frozenset({torch.rand_like, torch.randn_like})
_IN_PLACE = frozenset({torch.dropout_})


def _parts(calls: Sequence[Call]) -> list[Rest] | None:
    """What each rank does with its part of the numbers that are drawn here; None where they cannot be taken apart."""
    drawn = calls[0].drawn
    if drawn is None or not all(isinstance(call.tensor, torch.Tensor) for call in calls) or not _is_known(calls[0]):
        return None
    shapes = [_drawn_shape(call) for call in calls]
    cut = _cutter(drawn, shapes)
    if cut is None:
        return None
    with torch.no_grad():
        numbers = _numbers(calls[0], cut.shape, calls[0].tensor)
    parts = [cut(numbers, rank) for rank in range(len(calls))]
    if any(tuple(part.shape) != shape for part, shape in zip(parts, shapes, strict=True)):
        return None
    return [_rest(call, part.to(call.tensor.device)) for call, part in zip(calls, parts, strict=True)]


def _is_known(call: Call) -> bool:
    """Whether the numbers of the whole tensor can be drawn by themselves."""
    func = call.func
    known = func in _DROPOUTS or func in _LIKE or func in FILLING or func is F.gumbel_softmax
    if not known and not (func is F.scaled_dot_product_attention and not call.tensor.is_cuda):
        return False
    if func in FILLING and any(isinstance(value, torch.Tensor) for value in _flat((call.args[1:], call.kwargs))):
        return False
    whole = call.drawn is None or call.drawn.placement.kind != "shard"
    return not (whole and (func in _LIKE or func in FILLING))


def own_part(call: Call, rank: int, size: int) -> Rest | None:
    """As `_parts`, for a rank of `size` that is a process and draws the whole tensor's numbers for itself: all ranks'
    generators are in one state."""
    drawn = call.drawn
    if drawn is None or not isinstance(call.tensor, torch.Tensor) or not _is_known(call):
        return None
    shape = _drawn_shape(call)
    cut = _cutter(drawn, [shape] * size, rank)
    if cut is None:
        return None
    with torch.no_grad():
        part = cut(_numbers(call, cut.shape, call.tensor), rank)
    return _rest(call, part) if tuple(part.shape) == shape else None


_BY_ELEMENT = frozenset(
    {
        *(F.alpha_dropout, torch.alpha_dropout, F.feature_alpha_dropout, torch.feature_alpha_dropout),
        *(F.rrelu, torch.rrelu, torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.poisson),
    }
)
"""What draws for each element by its value, or works more than a mask into it."""


def _parts_of_results(calls: Sequence[Call]) -> list[Rest] | None:
    """As `_parts`, where the numbers depend on the values: the whole tensor is put together, the call made once, and
    each rank gets its part of what came out, with each element's derivative for the gradient."""
    call, drawn = calls[0], calls[0].drawn
    if call.func not in _BY_ELEMENT or drawn is None or drawn.placement.kind != "shard":
        return None
    given = [[v for v in _flat((c.args, c.kwargs)) if isinstance(v, torch.Tensor)] for c in calls]
    shapes = [tuple(c.tensor.shape) for c in calls]
    if any(tensor.shape != c.tensor.shape for c, own in zip(calls, given, strict=True) for tensor in own):
        return None
    try:
        plan = plan_gather(drawn.placement, drawn.cuts, shapes, tuple(c.tensor.device for c in calls))
    except CollectiveError:  # a path that the plan was not made for
        return None
    cut = _cutter(drawn, shapes)
    if cut is None:
        return None
    wholes = {
        id(own[0]): plan.gather([tensor.detach() for tensor in own], own[0], own[0].device)
        for own in zip(*given, strict=True)
    }
    whole = wholes[id(call.tensor)].requires_grad_(call.tensor.is_floating_point() and call.func not in FILLING)
    args = tuple(wholes.get(id(value), value) for value in call.args)
    kwargs = {name: wholes.get(id(value), value) for name, value in call.kwargs.items() if name != "inplace"}
    unsaved: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(unsaved, unsaved):
        result, slope = call.func(*args, **kwargs), None
        if result.requires_grad:
            (slope,) = torch.autograd.grad(result.sum(), whole)
    found = [(cut(result.detach(), rank), None if slope is None else cut(slope, rank)) for rank in range(len(calls))]
    return [_result(c, *own) for c, own in zip(calls, found, strict=True)]


def _result(call: Call, value: torch.Tensor, slope: torch.Tensor | None) -> Rest:
    tensor, value = call.tensor, value.to(call.tensor.device)

    def rest() -> Any:
        followed = slope is not None and tensor.requires_grad and torch.is_grad_enabled()
        if call.func in FILLING or call.kwargs.get("inplace", False):
            if not followed or slope is None:
                return _fill(tensor, value)
            return tensor.mul_(slope.to(tensor.device)).add_(value - tensor.detach())
        return value + (tensor - tensor.detach()) * slope.to(tensor.device) if followed and slope is not None else value

    return rest


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Whole numbers -> a rank's part of them."""

    shape: tuple[int, ...]
    dims: Sequence[tuple[int, Any]]
    drawn: Drawn

    def __call__(self, numbers: torch.Tensor, rank: int) -> torch.Tensor:
        for dim, layout in self.dims:
            numbers = take(numbers, numbers.dim() + dim, layout, self.drawn.cuts, rank)
        return numbers


def _cutter(drawn: Drawn, shapes: Sequence[tuple[int, ...]], known: int | None = None) -> _Cutter | None:
    """known: the one rank whose shape is known; None: all are."""
    placement, cuts = drawn.placement, drawn.cuts
    if placement.kind != "shard":
        return _Cutter(shapes[0], (), drawn) if len(set(shapes)) == 1 else None
    first = next((rank for rank in range(len(shapes)) if not holds_nothing(placement.cut_by, cuts, rank)), 0)
    first = first if known is None else known
    try:
        return _Cutter(*whole_layouts(placement, cuts, first, shapes[first]), drawn)
    except CollectiveError:  # a path that the plan was not made for: the ranks draw as if nobody knew
        return None


def _drawn_shape(call: Call) -> tuple[int, ...]:
    """Of the tensor that is drawn for; of attention weights batch, heads, queries, keys."""
    if call.func is not F.scaled_dot_product_attention:
        return tuple(call.tensor.shape)
    key = argument(call.args, call.kwargs, 1, "key", None)
    return (*call.tensor.shape[:-1], key.shape[-2])


def _numbers(call: Call, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The numbers of the whole tensor: of dropouts a mask that holds 0 and 1 / (1 - p)."""
    func = call.func
    if func is F.scaled_dot_product_attention:
        half = like.dtype in (torch.float16, torch.bfloat16)  # torch works these out in float32
        ones = torch.ones(shape, dtype=torch.float32 if half else like.dtype, device=like.device)
        return F.dropout(ones, argument(call.args, call.kwargs, 4, "dropout_p", 0.0), True)
    if func is F.gumbel_softmax:
        return like.new_empty(shape).exponential_().log().neg()
    rest, named = call.args[1:], {k: v for k, v in call.kwargs.items() if k not in ("input", "inplace")}
    whole = _empty_like(like, shape)
    if func in _DROPOUTS:
        plain = torch.dropout if func in _IN_PLACE else func
        return plain(whole.fill_(1), *rest[: 3 if plain is torch.dropout else 2], **named)  # without `inplace`
    result = func(whole, *rest, **named)
    return whole if func in FILLING else result


def _empty_like(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Dims in memory in `like`'s order: some generators fill memory from its start."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    made = torch.empty([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return made.permute([order.index(dim) for dim in range(like.dim())])


def _rest(call: Call, part: torch.Tensor) -> Rest:
    func = call.func
    if func is F.scaled_dot_product_attention:
        return lambda: _attention(part, *call.args, **call.kwargs)
    if func in _DROPOUTS:
        position = 3 if func is not torch.dropout else len(call.args)
        if func in _IN_PLACE or argument(call.args, call.kwargs, position, "inplace", False):
            return lambda: call.tensor.mul_(part)
        return lambda: call.tensor * part
    if func in FILLING:
        return lambda: _fill(call.tensor, part)
    if func is F.gumbel_softmax:
        return lambda: _gumbel_softmax(part, *call.args, **call.kwargs)
    return lambda: part.clone().requires_grad_(bool(call.kwargs.get("requires_grad", False)))


def _fill(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(part)


def _attention(
    mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch's own attention computes where it drops weights on a CPU, step by step in the same order, for a given
    mask: half precision in float32, the scale's root on both sides, rows that are masked altogether giving zeros."""
    dtype, wide = query.dtype, mask.dtype
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    root = abs(factor) ** 0.5
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = (query * (root if factor >= 0 else -root)) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        weights = weights.softmax(-1)
    else:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=wide).masked_fill_(~attn_mask, -torch.inf)
        weights = torch._safe_softmax(weights + attn_mask, -1)
    output: torch.Tensor = ((weights * mask) @ value).to(dtype)
    return output


def _gumbel_softmax(
    noise: torch.Tensor, logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """What torch's own computes, for given noise."""
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter_(dim, chosen, 1.0) - soft.detach() + soft


# --- without a layout ----------------------------------------------------------------------------------------------


def _generators(calls: Sequence[Call]) -> list[torch.Generator]:
    """Every generator that the calls may draw from; all ranks' devices of one kind start from the first one's state."""
    found: dict[int, torch.Generator] = {id(torch.default_generator): torch.default_generator}
    for call in calls:
        for value in _flat((call.args, call.kwargs)):
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif isinstance(value, torch.Tensor) and value.is_cuda:
                generator = torch.cuda.default_generators[value.get_device()]
                found[id(generator)] = generator
    return list(found.values())


def _same(calls: Sequence[Call]) -> bool:
    """Whether all ranks ask for the same draw: equal shapes, equal values. Values are compared with room for rounding:
    ranks work out replicated tensors each by themselves."""
    first = list(_flat((calls[0].args, calls[0].kwargs)))
    filling = [calls[0].func in FILLING] * len(first)
    for call in calls[1:]:
        other = list(_flat((call.args, call.kwargs)))
        if len(other) != len(first) or not all(map(_alike, first, other, filling)):
            return False
    return True


def _alike(a: Any, b: Any, shape_only: bool) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and (isinstance(a, torch.device | torch.Generator) or bool(a == b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if shape_only or a is b:
        return True
    with torch.no_grad():
        return torch.allclose(a, b.to(a.device), rtol=1e-3, atol=1e-6, equal_nan=True)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield key
            yield from _flat(value[key])
    elif isinstance(value, list | tuple):
        yield len(value)
        for item in value:
            yield from _flat(item)
    else:
        yield value
