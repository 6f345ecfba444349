"""Parameters cut into pieces: one leaf a piece, owned by the first rank that holds it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tensor_parallel.comm.failures import note_allocation
from tensor_parallel.errors import PlanError
from tensor_parallel.layout import Cuts, TensorLayout, holders, holds_nothing, join, local_shape, regions, runs
from tensor_parallel.plan import ResolvedPlan, TensorPlan

MARK = "@"
"""`weight@2` is rank 2's part of `weight` in rank 0's visible module."""


@dataclass(slots=True)
class Piece:
    """One piece of a tensor: the ranks that hold it, the first of which owns the leaf."""

    ranks: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(slots=True)
class SplitTensor:
    """One parameter or buffer of the model, in pieces.

    names: its names in the model, the first is its key.
    """

    plan: TensorPlan
    pieces: list[Piece]
    cuts: Cuts
    world_size: int
    names: tuple[str, ...] = field(default=())

    @property
    def is_cut(self) -> bool:
        return self.plan.is_cut

    def whole(self, device: torch.device | None = None) -> torch.Tensor:
        """The whole tensor, detached, on `device` (None: rank 0's): the leaf's own data where nothing cuts it and it
        lies there, else a new one."""
        return self.joined([piece.tensor.detach() for piece in self.pieces], device)

    def whole_gradient(self, device: torch.device | None = None) -> torch.Tensor | None:
        """The whole gradient, None where none arrived at any piece; `device` as of `whole`."""
        if all(piece.tensor.grad is None for piece in self.pieces):
            return None
        found = [piece.tensor.grad for piece in self.pieces]
        filled = [
            torch.zeros_like(piece.tensor) if grad is None else grad.detach()
            for grad, piece in zip(found, self.pieces, strict=True)
        ]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in filled]
        return self.joined(dense, device) if self.plan.action is None else self._pulled_back(dense, device)

    def _pulled_back(self, gradients: Sequence[torch.Tensor], device: torch.device | None) -> torch.Tensor:
        """The gradient of the whole that a function makes the parts of: by the function's own derivative."""
        whole = self.whole(device).requires_grad_()
        with torch.enable_grad():
            parts = [self.plan.action(whole, rank) for rank in range(self.world_size)]  # type: ignore[misc]
        if not all(part.requires_grad for part in parts):  # it computes past autograd: all that is left is the way back
            return self.joined(gradients, device)
        given = [gradient.to(part.device) for gradient, part in zip(gradients, parts, strict=True)]
        return torch.autograd.grad(parts, whole, given)[0]

    def put(self, whole: torch.Tensor) -> None:
        """Copy a whole tensor's values into the pieces."""
        with torch.no_grad():
            for piece in self.pieces:
                if self.plan.action is not None:
                    piece.tensor.copy_(self.part(whole, piece.ranks[0], piece.tensor.device))
                elif self.is_cut:
                    pick(piece.tensor, whole, self.plan.layout, self.cuts, piece.ranks[0])
                else:
                    piece.tensor.copy_(whole)

    def lies_as(self, other: SplitTensor) -> bool:
        """Whether the pieces are the same leaves, each of them the same part of the whole; factors may have other
        names."""
        if [(p.ranks, id(p.tensor)) for p in self.pieces] != [(p.ranks, id(p.tensor)) for p in other.pieces]:
            return False
        mine, theirs = (
            [[runs(dim, t.cuts, p.ranks[0]) for dim in t.plan.layout.dims] for p in t.pieces] for t in (self, other)
        )
        return mine == theirs and self.plan.action == other.plan.action

    def part(self, whole: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
        """`rank`'s part of a whole tensor (its stand-in, where it holds nothing), a tensor of its own on `device`."""
        return cut(whole, self.plan, self.cuts, rank, device)

    def assign(self, whole: torch.Tensor) -> None:
        """Make the pieces those of `whole`, its dtype included; each stays on its own device and the same object."""
        for piece in self.pieces:
            device = piece.tensor.device
            if self.is_cut:
                piece.tensor.data = self.part(whole.detach(), piece.ranks[0], device)
            else:
                piece.tensor.data = whole.detach().to(device)

    def joined(self, found: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
        """The whole of one tensor a piece, as `whole` of the pieces themselves."""
        if not self.is_cut:
            return found[0] if device is None else found[0].to(device)
        parts = [found[0]] * self.world_size
        for piece, tensor in zip(self.pieces, found, strict=True):
            parts[piece.ranks[0]] = tensor
        if self.plan.action is not None:
            whole = self.plan.action.undo(parts)
            return whole if device is None else whole.to(device)
        return join(parts, self.plan.layout, self.cuts, device)


def pick(local: torch.Tensor, whole: torch.Tensor, layout: TensorLayout, cuts: Cuts, rank: int) -> None:
    """Copy `rank`'s part of `whole` into `local`, block by block and so without another tensor of its size."""
    for block, part in regions(whole, local, layout, cuts, rank):
        part.copy_(block)


def cut(whole: torch.Tensor, plan: TensorPlan, cuts: Cuts, rank: int, device: torch.device) -> torch.Tensor:
    """`rank`'s part of `whole` (its stand-in, where it holds nothing) as a tensor of its own on `device`."""
    home = whole.device if whole.is_meta else device
    try:
        with torch.no_grad():
            if plan.action is not None:
                return plan.action(whole.detach(), rank).detach().to(device, copy=True).contiguous()
            local = torch.empty(local_shape(plan.layout, cuts, rank), dtype=whole.dtype, device=home)
            pick(local, whole.detach(), plan.layout, cuts, rank)
    except Exception as error:
        note_allocation(error, rank, home)
        raise
    return local


def moved(tensor: torch.Tensor, rank: int, device: torch.device, *, copy: bool = False) -> torch.Tensor:
    """`tensor` on `rank`'s device."""
    try:
        return tensor.to(device, copy=copy)
    except Exception as error:
        note_allocation(error, rank, device)
        raise


def part_of(whole: torch.Tensor, plan: TensorPlan, cuts: Cuts, rank: int) -> torch.Tensor:
    """What `rank` keeps of a whole tensor, where that lies: its part or stand-in, the tensor itself where nothing cuts
    it, zeros where only rank 0 uses it."""
    if plan.is_cut:
        return cut(whole, plan, cuts, rank, whole.device)
    return torch.zeros_like(whole) if plan.rank0_only and rank else whole


def held_by(plan: TensorPlan, cuts: Cuts, world_size: int) -> list[tuple[int, ...]]:
    """The ranks that hold the same piece, for each piece."""
    if plan.action is not None:
        return [(rank,) for rank in range(world_size)]
    return [tuple(ranks) for ranks in holders(plan.layout, cuts, world_size)]


def check_tensor(plan: TensorPlan, resolved: ResolvedPlan, tensor: torch.Tensor) -> None:
    """Raise PlanError where `plan` cannot be applied to `tensor`; nothing is changed."""
    name = plan.names[0]
    if tuple(tensor.shape) != plan.layout.shape:
        raise PlanError(
            f"{name} has shape {tuple(tensor.shape)}, its plan is for {plan.layout.shape}; make a plan of this model"
        )
    if not plan.is_cut:
        return
    if plan.rank0_only:
        raise PlanError(f"{name} is planned both cut and on rank 0 only; it can be one of them")
    if not plan.is_buffer and type(tensor) is not nn.Parameter:
        raise PlanError(f"{name} is a {type(tensor).__name__}: only a plain nn.Parameter can be cut; plan it whole")
    if plan.action is None and holds_nothing(plan.layout.factors, resolved.cuts, 0):
        raise PlanError(f"rank 0 holds nothing of {name}; give rank 0 at least one unit of {plan.layout.factors}")
    for dim, layout in enumerate(plan.layout.dims):
        held = {tuple(resolved.cuts[f] for f in segment.factors) for segment in layout.segments}
        if layout.factors and len(held) > 1:
            raise PlanError(
                f"{name} dim {dim} has segments that different ranks hold ({sorted(layout.factors)} cut only some of "
                "them); such tensors cannot be cut yet; plan it whole"
            )


def cut_parameter(
    parameter: nn.Parameter,
    plan: TensorPlan,
    resolved: ResolvedPlan,
    devices: Sequence[torch.device],
    leaves: Mapping[int, nn.Parameter],
) -> tuple[SplitTensor, list[torch.Tensor]]:
    """Replace `parameter`'s data by rank 0's part, in place (where it has to be, by another leaf).

    Returns its pieces, and what each rank's tree holds at rest: a leaf, a stand-in where the rank holds nothing, zeros
    where only rank 0 uses the tensor. Until it returns, the memory of the whole and of all its pieces is held.
    leaves: of the other ranks by owner, where they were there before: optimisers hold them.
    """
    world_size, cuts = resolved.world_size, resolved.cuts
    if not plan.is_cut:
        if not parameter.is_meta:
            parameter.data = moved(parameter.data, 0, devices[0])
        if parameter.grad is not None and parameter.grad.device != devices[0]:
            parameter.grad = moved(parameter.grad, 0, devices[0])
        leaf = _leaf_of(parameter)
        if not plan.rank0_only:
            split = SplitTensor(plan, [Piece(tuple(range(world_size)), leaf)], cuts, world_size)
            return split, [leaf] * world_size
        # An empty one's zeros need no loading.
        zeros = [_zeros_like(leaf, rank, devices[rank]) for rank in range(1, world_size)]
        if leaf.is_meta:
            zeros = [nn.Parameter(tensor, requires_grad=False) for tensor in zeros]  # loaders want parameters
        return SplitTensor(plan, [Piece((0,), leaf)], cuts, world_size), [leaf, *zeros]

    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and gradient.shape != parameter.shape:  # of before its data were exchanged for others
        log = logging.getLogger(__name__)
        log.warning(
            "%s has shape %s and a gradient of %s: dropped",
            plan.names[0],
            *map(list, (parameter.shape, gradient.shape)),
        )
        gradient = None
    at_rest: list[torch.Tensor | None] = [None] * world_size
    pieces: list[Piece] = []
    for ranks in held_by(plan, cuts, world_size):
        owner = ranks[0]
        data = cut(parameter, plan, cuts, owner, devices[owner])
        own = data if owner == 0 else _leaf_for(leaves.get(owner), data, parameter.requires_grad)
        pieces.append(Piece(ranks, own))
    for rank in set(range(world_size)).difference(*(piece.ranks for piece in pieces)):
        stand_in = cut(parameter, plan, cuts, rank, devices[rank])
        at_rest[rank] = nn.Parameter(stand_in, requires_grad=False) if stand_in.is_meta else stand_in
    parameter.data = pieces[0].tensor
    pieces[0].tensor = _leaf_of(parameter)
    for piece in pieces:
        if gradient is not None:
            owner = piece.ranks[0]
            piece.tensor.grad = cut(gradient, plan, cuts, owner, devices[owner])
        for rank in piece.ranks:
            at_rest[rank] = piece.tensor
    return SplitTensor(plan, pieces, cuts, world_size), [t for t in at_rest if t is not None]


def own_part(
    parameter: nn.Parameter, plan: TensorPlan, resolved: ResolvedPlan, rank: int, device: torch.device
) -> nn.Parameter:
    """Replace `parameter`'s data, and its gradient's, by `rank`'s part on `device` (its stand-in, where it holds
    nothing), in place, or where it has to be by another leaf."""
    gradient, parameter.grad = parameter.grad, None
    if plan.is_cut:
        parameter.data = cut(parameter, plan, resolved.cuts, rank, device)
        gradient = None if gradient is None else cut(gradient, plan, resolved.cuts, rank, device)
    else:
        parameter.data = parameter.data.to(device)
        gradient = None if gradient is None else gradient.to(device)
    leaf = _leaf_of(parameter)
    leaf.grad = gradient
    return leaf


def _zeros_like(leaf: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    except Exception as error:
        note_allocation(error, rank, device)
        raise


def _leaf_for(known: nn.Parameter | None, data: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    if known is None:
        return nn.Parameter(data, requires_grad=requires_grad)
    known.data = data
    known.requires_grad_(requires_grad)
    return _leaf_of(known)


def _leaf_of(parameter: nn.Parameter) -> nn.Parameter:
    """`parameter`, or a new leaf with its data where a graph from before still lives: autograd's node for the old one
    would go on asking for gradients of the whole shape, on the old device."""
    if not parameter.requires_grad:
        return parameter
    known = torch.autograd.graph.get_gradient_edge(parameter).node._input_metadata[0]
    if list(known.shape) == list(parameter.shape) and known.device == parameter.device:
        return parameter
    leaf = nn.Parameter(parameter.data)
    leaf.grad, parameter.grad = parameter.grad, None
    parameter.data = torch.empty(0)
    return leaf


def cut_buffer(
    buffer: torch.Tensor, plan: TensorPlan | None, resolved: ResolvedPlan, rank: int, device: torch.device
) -> torch.Tensor:
    """`rank`'s own copy of a buffer, or of its part of it, on `device`."""
    if plan is None or not plan.is_cut:
        return buffer.detach() if buffer.is_meta else moved(buffer.detach(), rank, device, copy=True)
    return cut(buffer, plan, resolved.cuts, rank, device)
