"""Autograd functions over one process's tensors, in pairs that are each other's adjoints over all ranks.

Each process runs its own backward, so every rank must walk the same graph: where another rank's tensor counts, this
rank's gradient is zeros and not None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from tensor_parallel.comm.gather import GatherPlan
from tensor_parallel.comm.process_exchange import Exchange, Shared


class Sum(Function):
    """The sum of what the ranks give, on those that take it, zeros on the others; the adjoint exchanges the two."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange, gives: bool, takes: bool) -> torch.Tensor:
        ctx.exchange, ctx.gives, ctx.takes = exchange, gives, takes
        return exchange.sum(tensor, gives, takes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Sum.apply(gradient, ctx.exchange, ctx.takes, ctx.gives), None, None, None  # type: ignore[no-untyped-call]


class Gather(Function):
    """The ranks' parts as a whole, on all; its adjoint is Scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange, plan: GatherPlan) -> torch.Tensor:
        ctx.exchange, ctx.plan, ctx.shape = exchange, plan, tensor.shape
        return exchange.gather(tensor, plan)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Scatter.apply(gradient, ctx.exchange, ctx.plan, ctx.shape), None, None  # type: ignore[no-untyped-call]


class Scatter(Function):
    """This rank's part of the sum of the wholes, zeros where nothing is gathered from it; its adjoint is Gather."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, exchange: Exchange, plan: GatherPlan, shape: Any) -> torch.Tensor:
        ctx.exchange, ctx.plan = exchange, plan
        return exchange.scatter(whole, plan, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Gather.apply(gradient, ctx.exchange, ctx.plan), None, None, None  # type: ignore[no-untyped-call]


class Share(Function):
    """The first's tensor on each of `ranks`, which have its values already; its adjoint is ToFirst."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange, ranks: Sequence[int]) -> torch.Tensor:
        ctx.exchange, ctx.ranks = exchange, ranks
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ToFirst.apply(gradient, ctx.exchange, ctx.ranks), None, None  # type: ignore[no-untyped-call]


class ToFirst(Function):
    """The sum over `ranks` on the first of them, zeros on the others; its adjoint sends the first's to all. A rank that
    is in no list keeps its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange, ranks: Sequence[int]) -> torch.Tensor:
        ctx.exchange, ctx.ranks = exchange, ranks
        return exchange.to_first(tensor, ranks) if len(ranks) > 1 else tensor.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return FromFirst.apply(gradient, ctx.exchange, ctx.ranks), None, None  # type: ignore[no-untyped-call]


class FromFirst(Function):
    """The first's tensor on each of `ranks`; its adjoint is ToFirst."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange, ranks: Sequence[int]) -> torch.Tensor:
        ctx.exchange, ctx.ranks = exchange, ranks
        return exchange.from_first(tensor, ranks) if len(ranks) > 1 else tensor.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ToFirst.apply(gradient, ctx.exchange, ctx.ranks), None, None  # type: ignore[no-untyped-call]


class Keep(Function):
    """A tensor where it is kept, else zeros; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, keep: bool) -> torch.Tensor:
        ctx.keep = keep
        return tensor.detach().clone() if keep else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Keep.apply(gradient, ctx.keep), None  # type: ignore[no-untyped-call]


class Leave(Function):
    """A rank's tensor as the caller's; its adjoint is FirstAlone."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return FirstAlone.apply(gradient, ctx.exchange), None  # type: ignore[no-untyped-call]


class FirstAlone(Function):
    """The caller's gradient on rank 0, zeros elsewhere; its adjoint sends rank 0's to all."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return tensor.detach().clone() if exchange.rank == 0 else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Sum.apply(gradient, ctx.exchange, ctx.exchange.rank == 0, True), None  # type: ignore[no-untyped-call]


class Enter(Function):
    """The caller's tensors as this rank's; its adjoint is Home. Where a rank does not compute with one, zeros."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, shared: tuple[Shared, ...], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.shared = exchange, shared
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return tuple(
            tensor.detach() if item.counts else torch.zeros_like(tensor)
            for item, tensor in zip(shared, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *Home.apply(ctx.exchange, ctx.shared, ctx.like, *gradients)  # type: ignore[no-untyped-call]


class Home(Function):
    """The sums of the ranks' gradients as the caller's; what the caller makes of one goes back to each rank."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, shared: tuple[Shared, ...], like: Any, *gradients: torch.Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.counts = [item.counts and given is not None for item, given in zip(shared, gradients, strict=True)]
        # A gradient that a rank holds alone must not come back as the very tensor.
        return tuple(
            found.clone() if found is given and found is not None else found
            for found, given in zip(exchange.sum_home(shared, gradients, like), gradients, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        counted = zip(ctx.counts, gradients, strict=True)
        return None, None, None, *(gradient if counts else None for counts, gradient in counted)
