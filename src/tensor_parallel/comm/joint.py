"""Joint autograd nodes: one node over all ranks' tensors, so that one backward in the caller's thread crosses them all.

Each node's backward is its true adjoint, written with these same functions, so that it can be differentiated again:
a sum's adjoint is a sum with sources and targets exchanged, a gather's is a scatter and the other way round, a copy's
is a sum in rank order. No node returns one of its inputs, and no two of its results share storage. Tensors are listed
by rank; None stands for a tensor that does not take part or a gradient that did not arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensor_parallel.comm.failures import Owner, explained, note_allocation
from tensor_parallel.comm.gather import GatherPlan

Parts = Sequence[torch.Tensor | None]
Devices = Sequence[torch.device]
Receives = Sequence[bool]
Results = list[torch.Tensor | None]


def backward_order() -> int:
    """The number of this thread's next autograd node; backward runs the ready node with the highest one first."""
    return torch._C._autograd._get_sequence_nr()


def align_backward_order(order: int) -> None:
    """Raise this thread's number to `order`. Numbers are per thread: without one count for all ranks, the order in
    which backward adds up gradients, and so their last bits, would depend on which rank came last."""
    for _ in range(order - backward_order()):
        torch._C._functions.UndefinedGrad()


def add_in_order(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum on `device`, added from the left; where half precision would round more than once, in float32. One part
    alone comes back as it is."""
    first = parts[0] if parts[0].device == device else parts[0].to(device)
    if len(parts) == 1:
        return first
    wide = len(parts) > 2 and first.dtype in (torch.float16, torch.bfloat16)
    total = first.float() if wide else first
    for part in parts[1:]:
        total = total + (part if part.device == device else part.to(device))
    return total.to(first.dtype) if wide else total


def sum_to_ranks(parts: Parts, devices: Devices, receives: Receives, owner: Owner, *, filled: bool = True) -> Results:
    """The sum of the parts that take part, for each rank that receives it, on its device. Where it shall not be filled,
    the caller adds into it (`sum_into`)."""
    if _needs_node(parts):
        wanted = tuple(devices), tuple(receives), owner, filled
        return list(_SumToRanks.apply(*wanted, *parts))  # type: ignore[no-untyped-call]
    return _sum(parts, devices, receives, filled)


def sum_into(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write the sum of at least two parts, added from the left, into a tensor on their device."""
    with torch.no_grad():
        if len(parts) == 2:
            torch.add(parts[0].detach(), parts[1].detach(), out=target.detach())
        else:
            target.detach().copy_(add_in_order([part.detach() for part in parts], target.device))


def gather_to_ranks(
    parts: Parts, plan: GatherPlan, receives: Receives, owner: Owner, *, filled: bool = True
) -> Results:
    """The whole tensor, for each rank that receives it; a part that is None counts as zeros. Where it shall not be
    filled, the caller copies the parts into it."""
    if _needs_node(parts):
        return list(_GatherToRanks.apply(plan, tuple(receives), owner, filled, *parts))  # type: ignore[no-untyped-call]
    return _gather(parts, plan, receives, filled)


def scatter_to_ranks(wholes: Parts, plan: GatherPlan, receives: Receives, owner: Owner) -> Results:
    """The adjoint of gather_to_ranks: the sum of the wholes, cut for each rank that receives a part of it; zeros where
    the gather does not read a rank's part."""
    if _needs_node(wholes):
        return list(_ScatterToRanks.apply(plan, tuple(receives), owner, *wholes))  # type: ignore[no-untyped-call]
    return _scatter(wholes, plan, receives, views=True)


def copy_to_ranks(
    tensors: Sequence[torch.Tensor],
    holders: Sequence[Sequence[int]],
    devices: Devices,
    *,
    apart: bool = False,
    owner: Owner | None = None,
) -> list[dict[int, torch.Tensor]]:
    """For each tensor a copy for every rank of its `holders` but the first, which uses the tensor itself: by rank.

    One autograd node over all of them; its backward adds the copies' gradients in rank order (None counts as zero), so
    that a leaf gets them in one sum. On the tensor's own device a copy shares its memory, unless it shall be `apart`
    because ranks may write into it. Where no gradient is needed the copies are plain detached ones.
    """
    ranks = [tuple(held[1:]) for held in holders]
    found: list[dict[int, torch.Tensor]] = [{} for _ in tensors]
    live = [i for i, t in enumerate(tensors) if t.requires_grad and ranks[i]] if torch.is_grad_enabled() else []
    if live:
        to = tuple(tuple(holders[i]) for i in live), tuple(devices)
        copies = iter(_CopyToRanks.apply(*to, apart, owner, *(tensors[i] for i in live)))  # type: ignore[no-untyped-call]
        for i in live:
            found[i] = {rank: next(copies) for rank in ranks[i]}
        # Last of all: a leaf then adds up its owner's gradients first, whatever the numbers of the threads.
        found[live[0]][ranks[live[0]][0]].grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]
    for i, tensor in enumerate(tensors):
        if ranks[i] and not found[i]:
            found[i] = {rank: _copy(tensor, rank, devices[rank], apart) for rank in ranks[i]}
    return found


def _copy(tensor: torch.Tensor, rank: int, device: torch.device, apart: bool) -> torch.Tensor:
    try:
        return tensor.detach().to(device, copy=True) if apart else tensor.detach().to(device)
    except Exception as error:
        note_allocation(error, rank, device)
        raise


def _add(parts: Sequence[torch.Tensor], rank: int, device: torch.device) -> torch.Tensor:
    """`add_in_order` for `rank`, on its device."""
    try:
        return add_in_order(parts, device)
    except Exception as error:
        note_allocation(error, rank, device)
        raise


def assemble_to_ranks(parts: Sequence[torch.Tensor], shape: Sequence[int], devices: Devices, owner: Owner) -> Results:
    """The tensor whose flat stretches the ranks hold, for each rank; on one device all share its memory: nobody may
    write into it. In backward each stretch gets its part of the sum of the gradients, in rank order."""
    if _needs_node(parts):
        return list(_Assemble.apply(tuple(shape), tuple(devices), owner, *parts))  # type: ignore[no-untyped-call]
    return _assemble(parts, shape, devices)


def _assemble(parts: Sequence[torch.Tensor], shape: Sequence[int], devices: Devices) -> Results:
    try:
        whole = torch.cat([part.detach().to(devices[0]) for part in parts]).view(shape)
    except Exception as error:
        note_allocation(error, 0, devices[0])
        raise
    return [whole, *(_copy(whole, rank, devices[rank], False) for rank in range(1, len(devices)))]


def share_from_first(tensors: Sequence[torch.Tensor], rank: int, owner: Owner) -> list[torch.Tensor]:
    """The same values on every rank; the first one's, which is `rank`, alone take the gradient: the sum of all, in rank
    order."""
    if not (torch.is_grad_enabled() and tensors[0].requires_grad):
        return [tensors[0], *(tensor.detach() for tensor in tensors[1:])]
    return list(_ShareFromFirst.apply(rank, owner, tuple(tensors[1:]), tensors[0]))  # type: ignore[no-untyped-call]


def _needs_node(parts: Parts) -> bool:
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)


def _hand_out(total: torch.Tensor, devices: Devices, receives: Receives, fresh: bool) -> Results:
    """`total` itself (where it is fresh) or a copy of it for each rank that receives it."""
    results: Results = []
    for rank, (device, wanted) in enumerate(zip(devices, receives, strict=True)):
        if not wanted:
            results.append(None)
        elif fresh and device == total.device:
            results.append(total)
            fresh = False
        else:
            results.append(_fresh_copy(total, rank, device))
    return results


def _fresh_copy(tensor: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
    try:
        return tensor.to(device, copy=True) if device != tensor.device else tensor.clone()
    except Exception as error:
        note_allocation(error, rank, device)
        raise


def _sum(parts: Parts, devices: Devices, receives: Receives, filled: bool = True) -> Results:
    present = [part for part in parts if part is not None]
    if not present or not any(receives):
        return [None] * len(parts)
    if not filled:
        like = present[0]
        pairs = zip(devices, receives, strict=True)
        return [like.new_empty(like.shape, device=device) if wanted else None for device, wanted in pairs]
    first = receives.index(True)
    total = _add(present, first, devices[first])
    return _hand_out(total, devices, receives, fresh=len(present) > 1 or total is not present[0])


def _gather(parts: Parts, plan: GatherPlan, receives: Receives, filled: bool = True) -> Results:
    present = next((part for part in parts if part is not None), None)
    if present is None or not any(receives):
        return [None] * len(parts)
    first = receives.index(True)
    device = plan.devices[first]
    try:
        if not filled:
            return [present.new_empty(plan.shape, device=device) if wanted else None for wanted in receives]
        whole = plan.gather(parts, present, device)
    except Exception as error:
        note_allocation(error, first, device)
        raise
    return _hand_out(whole, plan.devices, receives, fresh=True)


def _scatter(wholes: Parts, plan: GatherPlan, receives: Receives, views: bool = False) -> Results:
    present = [(rank, whole) for rank, whole in enumerate(wholes) if whole is not None]
    if not present or not any(receives):
        return [None] * len(wholes)
    first, like = present[0]
    total = _add([whole for _, whole in present], first, like.device)
    results: Results = []
    for rank, device in enumerate(plan.devices):
        try:
            results.append(plan.scatter(total, rank, views=views).to(device) if receives[rank] else None)
        except Exception as error:
            note_allocation(error, rank, device)
            raise
    return results


class _SumToRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, devices: Devices, receives: Receives, owner: Owner, filled: bool, *parts: torch.Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.devices, ctx.receives, ctx.owner = devices, receives, owner
        return tuple(_sum(parts, devices, receives, filled))

    @staticmethod
    @explained
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.owner.check_backward()
        return None, None, None, None, *sum_to_ranks(grads, ctx.devices, ctx.needs_input_grad[4:], ctx.owner)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(_sum(tangents[4:], ctx.devices, ctx.receives))


class _GatherToRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: GatherPlan, receives: Receives, owner: Owner, filled: bool, *parts: torch.Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.receives, ctx.owner = plan, receives, owner
        return tuple(_gather(parts, plan, receives, filled))

    @staticmethod
    @explained
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.owner.check_backward()
        return None, None, None, None, *scatter_to_ranks(grads, ctx.plan, ctx.needs_input_grad[4:], ctx.owner)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(_gather(tangents[4:], ctx.plan, ctx.receives))


class _ScatterToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: GatherPlan, receives: Receives, owner: Owner, *wholes: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.receives, ctx.owner = plan, receives, owner
        return tuple(_scatter(wholes, plan, receives))

    @staticmethod
    @explained
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.owner.check_backward()
        return None, None, None, *gather_to_ranks(grads, ctx.plan, ctx.needs_input_grad[3:], ctx.owner)


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], devices: Devices, owner: Owner, *parts: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.sizes, ctx.homes = owner, [part.numel() for part in parts], [part.device for part in parts]
        return tuple(_assemble(parts, shape, devices))

    @staticmethod
    @explained
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.owner.check_backward()
        arrived = [(rank, grad) for rank, grad in enumerate(grads) if grad is not None]
        if not arrived:
            return (None,) * (3 + len(ctx.sizes))
        first, like = arrived[0]
        total = _add([grad for _, grad in arrived], first, like.device)
        parts = torch.split(total.reshape(-1), ctx.sizes)
        return None, None, None, *(part.to(home) for part, home in zip(parts, ctx.homes, strict=True))


class _ShareFromFirst(torch.autograd.Function):
    """The first rank goes through the node too: its gradient is then added in rank order with the others."""

    @staticmethod
    def forward(ctx: Any, rank: int, owner: Owner, others: Sequence[torch.Tensor], first: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.rank, ctx.owner, ctx.home = rank, owner, first.device
        ctx.devices = [tensor.device for tensor in others]
        return first.detach(), *(tensor.detach() for tensor in others)

    @staticmethod
    @explained
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        arrived = [grad for grad in grads if grad is not None]
        return None, None, None, _add(arrived, ctx.rank, ctx.home) if arrived else None

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, ___: Any, tangent: torch.Tensor | None) -> Any:
        homes = [ctx.home, *ctx.devices]
        return tuple(None if tangent is None else tangent.to(device, copy=True) for device in homes)


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        holders: Sequence[Sequence[int]],
        devices: Devices,
        apart: bool,
        owner: Owner | None,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.holders, ctx.homes = owner, holders, [tensor.device for tensor in tensors]
        return tuple(
            _copy(tensor, rank, devices[rank], apart)
            for tensor, (_, *ranks) in zip(tensors, holders, strict=True)
            for rank in ranks
        )

    @staticmethod
    @explained
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found: list[torch.Tensor | None] = [None] * 4
        rest = iter(grads)
        for (first, *ranks), home in zip(ctx.holders, ctx.homes, strict=True):
            arrived = [grad for grad in (next(rest) for _ in ranks) if grad is not None]
            found.append(_add(arrived, first, home) if arrived else None)
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, ___: Any, ____: Any, *tangents: Any) -> Any:
        counted = zip(tangents, ctx.holders, strict=True)
        return tuple(None if tangent is None else tangent.clone() for tangent, (_, *ranks) in counted for _ in ranks)
