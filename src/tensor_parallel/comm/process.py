"""The group of ranks that are processes of torch.distributed.

Each process runs its own backward, so the functions here are pairs that are each other's adjoints over all ranks, and
every rank must walk the same graph: where another rank's tensor counts, this rank's gradient is zeros and not None.

There are two worlds. *Inside* a forward each rank has its own tensor, and the gradient of one that is the same on all
ranks is the sum of the ranks' gradients. The *caller* of a forward has one value, of which each rank has a copy, with
its whole gradient. `enter` and `leave` lead from one to the other and back.

This module imports torch.distributed; nothing that `import tensor_parallel` brings imports this module.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed import distributed_c10d

from tensor_parallel.comm.gather import GatherPlan, plan_gather, whole_layouts
from tensor_parallel.comm.group import Holders
from tensor_parallel.errors import CollectiveError, DeadlineError, DeviceError, RankError, TensorParallelError
from tensor_parallel.layout import Cuts, DimLayout, Part, Placement, Segment, local_size, shard

_MOST_PLANS = 1024
_SLICE = timedelta(seconds=0.25)
"""How long a rank waits before it looks whether another one has failed."""
_HALF = (torch.float16, torch.bfloat16)
_GIVEN = "as given"


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor of the caller's of which several ranks hold the same, for `ProcessGroup.enter`.

    sizes: elements of each of its pieces that several ranks hold; of a tensor that all hold, its own.
    mine: which of them this rank holds; None: none of them, what it holds it holds alone.
    counts: whether this rank computes with it; else it computes with zeros.
    """

    sizes: tuple[int, ...]
    mine: int | None = 0
    counts: bool = True


class ProcessGroup:
    """This process's view of the ranks of a torch.distributed group; a Group. Copies are the same group.

    A rank that waits for another one longer than the group's own timeout raises DeadlineError; where another rank
    failed in the same run, RankError within a second (gloo; other backends end a wait as they do).
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """group: None for all processes.  device: where this rank's tensors are.

        Raises:
            TensorParallelError: torch.distributed is not initialised, or this process is none of the group.
            DeviceError: the group's backend has nothing for such a device.
        """
        self._group = _checked(group)
        self._device = device
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        known = check_group(group)
        if device.type not in known:
            raise DeviceError(
                f"device {device}: the process group's backend ({dist.get_backend(self._group)}) is for "
                f"{' and '.join(known)}; give such a device, or a group with a backend for {device.type}"
            )
        self._store: dist.Store = distributed_c10d._get_process_group_store(self._group)
        self._timeout: timedelta = self._group._get_backend(device).options._timeout
        self._sliced = dist.get_backend(self._group) == "gloo"
        self._run = 0
        self._broken = ""
        self._plans: dict[Any, tuple[GatherPlan, Placement, Cuts]] = {}

    def __repr__(self) -> str:
        return f"<ProcessGroup rank {self._rank} of {self._size} on {self._device}>"

    def __copy__(self) -> ProcessGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ProcessGroup belongs to this process and cannot be pickled")

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._device

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # --- the caller's world and the ranks' ---------------------------------------------------------------------------

    def enter(self, tensors: Sequence[torch.Tensor], shared: Sequence[Shared]) -> list[torch.Tensor]:
        """The caller's tensors as this rank's own, all by one node: backward gives the caller the sum over the ranks
        that hold the same, by one all-reduce for each dtype. One that got no gradient on any rank gets none. All ranks
        call it with the same tensors in the same order."""
        return list(_Enter.apply(self, tuple(shared), *tensors))  # type: ignore[no-untyped-call]

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is the same on all ranks as the caller's: in backward rank 0 alone takes the caller's gradient,
        which is one and the same on all ranks."""
        found: torch.Tensor = _Leave.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found

    # --- the Group protocol ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, *, contributes: bool = True) -> torch.Tensor:
        """See Group.

        Raises:
            DeadlineError, RankError: see ProcessGroup; so for every collective.
        """
        found: torch.Tensor = _Sum.apply(tensor, self, contributes, True)  # type: ignore[no-untyped-call]
        return found

    def all_gather(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """See Group. The other ranks' shapes are worked out from this rank's.

        Raises:
            CollectiveError: this rank's tensor has not the shape of its part.
        """
        found: torch.Tensor = _Gather.apply(tensor, self, self._plan(placement, cuts, tensor.shape))  # type: ignore[no-untyped-call]
        return found

    def gather_first(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """As all_gather: the caller has use for it on every rank."""
        return self.all_gather(tensor, placement, cuts)

    def stand_by(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor: every rank goes on, for its own caller."""
        return tensor

    def release(self) -> None:
        """Nobody stands by."""

    def withheld(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Group."""
        found: torch.Tensor = _Keep.apply(tensor, False)  # type: ignore[no-untyped-call]
        return found

    def assemble(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """See Group."""
        sizes = self._on_each_rank(tensor.numel())
        ends = list(itertools.accumulate(sizes))
        layout = DimLayout((Segment((Part(ends[-1], _GIVEN),)),))
        cuts = {_GIVEN: tuple(zip([0, *ends[:-1]], ends, strict=True))}
        return self.all_gather(tensor.reshape(-1), shard(-1, layout), cuts).view(list(shape))

    def broadcast(self, tensor: torch.Tensor, holders: Holders | None = None) -> torch.Tensor:
        """See Group."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        lists = [list(range(self._size))] if holders is None else holders
        mine = next((tuple(ranks) for ranks in lists if self._rank in ranks), ())
        found: torch.Tensor = _Share.apply(tensor, self, mine)  # type: ignore[no-untyped-call]
        return found

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See Group."""
        known = self.broadcast_object([(t.shape, t.dtype, t.requires_grad) for t in tensors])
        if self._rank == 0:
            given = list(tensors)
        else:
            given = [torch.zeros(s, dtype=d, device=self._device).requires_grad_(r) for s, d, r in known]
        made = [_Sum.apply(tensor, self, self._rank == 0, True) for tensor in given]  # type: ignore[no-untyped-call]
        return list(tensors) if self._rank == 0 and not any(r for *_, r in known) else made

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """See Group; pickled."""
        if not 0 <= source < self._size:
            raise ValueError(f"source is {source}; the group has ranks 0 to {self._size - 1}")
        holder = [value]
        self._blocking("broadcast_object", lambda: dist.broadcast_object_list(holder, group=self._group, group_src=source))
        return holder[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value (pickled), by rank."""
        found: list[Any] = [None] * self._size
        self._blocking("gather_objects", lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def barrier(self) -> None:
        self._add(torch.zeros(1, device=self._device), "barrier")

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """See Group. Where this group is not of all processes, no two of its subgroups may share ranks."""
        everywhere = dist.get_process_group_ranks(self._group)
        wanted = tuple(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or not all(0 <= rank < self._size for rank in wanted):
            raise ValueError(f"ranks {list(wanted)} must be different ranks from 0 to {self._size - 1}, at least one")
        local = self._size < dist.get_world_size()
        if local and self._rank not in wanted:
            return None
        made = dist.new_group([everywhere[rank] for rank in wanted], use_local_synchronization=local, sort_ranks=False)
        return ProcessGroup(made, self._device) if self._rank in wanted else None

    # --- failures ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A run begins, on all ranks: what failed in an earlier one is over."""
        self._run += 1

    def abort(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one in the run under way: they raise RankError with this error's text."""
        text = "".join(traceback.format_exception(error)).strip()
        self._store.set(f"tensor_parallel failed {self._run}", f"rank {self._rank} failed: {text}")

    def _failure(self) -> str:
        """What another rank says of the run under way, or of a run that left the group unusable."""
        for key in (f"tensor_parallel failed {self._run}", "tensor_parallel broken"):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""

    def _break(self, name: str, error: BaseException) -> NoReturn:
        said = self._failure()
        self._broken = said or f"{name} on rank {self._rank} failed: {error}"
        self._store.set("tensor_parallel broken", self._broken)
        if said:
            raise RankError(f"{name} on rank {self._rank}: {said}") from None
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise DeadlineError(
                f"{name}: rank {self._rank} of {self._size} waited {self._timeout.total_seconds():g} s for the others, "
                "the timeout of its process group; every rank must make the same calls of the model and of backward"
            ) from error
        raise RankError(f"{name}: rank {self._rank} of {self._size} lost the others: {error}") from error

    def _refuse_broken(self) -> None:
        if self._broken:
            raise RankError(
                f"this process group is not usable any more, make a new one and split again; before: {self._broken}"
            )

    def _blocking(self, name: str, work: Callable[[], Any]) -> None:
        self._refuse_broken()
        try:
            work()
        except (RuntimeError, dist.DistError) as error:
            self._break(name, error)

    def _finish(self, name: str, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it."""
        self._refuse_broken()
        end = time.monotonic() + self._timeout.total_seconds()
        try:
            work = start()
            while work is not None:
                try:
                    _ = work.wait(_SLICE) if self._sliced else work.wait()
                    return
                except RuntimeError as error:
                    late = "timed out" in str(error).lower()
                    if not (late and self._sliced) or time.monotonic() > end or self._failure():
                        raise
        except (RuntimeError, dist.DistError) as error:
            self._break(name, error)

    # --- what the functions are made of ------------------------------------------------------------------------------

    def _add(self, own: torch.Tensor, name: str = "all_reduce") -> torch.Tensor:
        """The sum over the ranks, into `own` where it can be."""
        wide = self._size > 2 and own.dtype in _HALF
        total = own.float() if wide else own
        self._finish(name, lambda: dist.all_reduce(total, group=self._group, async_op=True))
        return total.to(own.dtype) if wide else total

    def _sum(self, tensor: torch.Tensor, gives: bool, takes: bool) -> torch.Tensor:
        make = torch.clone if gives else torch.zeros_like
        total = self._add(make(tensor.detach(), memory_format=torch.contiguous_format))
        return total if takes else total.zero_()

    def _plan(self, placement: Placement, cuts: Cuts, shape: torch.Size) -> GatherPlan:
        key = (id(placement), id(cuts), shape)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _MOST_PLANS:  # lengths differ from call to call
                self._plans.clear()
            whole, dims = whole_layouts(placement, cuts, self._rank, shape)
            shapes = []
            for rank in range(self._size):
                own = list(whole)
                for dim, layout in dims:
                    own[dim] = local_size(layout, cuts, rank)
                shapes.append(tuple(own))
            devices = (self._device,) * self._size
            found = plan_gather(placement, cuts, shapes, devices), placement, cuts
            self._plans[key] = found
        return found[0]

    def _gathered(self, tensor: torch.Tensor, plan: GatherPlan) -> torch.Tensor:
        sizes = [0 if shape is None else prod(shape) for shape in plan.local_shapes]
        most = max(sizes)
        own = tensor.new_zeros(most)
        if plan.givers[self._rank]:
            own[: sizes[self._rank]].copy_(tensor.detach().reshape(-1))
        every = tensor.new_empty(self._size * most)
        self._finish("all_gather", lambda: dist.all_gather_single(every, own, group=self._group, async_op=True))
        rows = every.view(self._size, most)
        parts = [
            None if shape is None else rows[rank, : sizes[rank]].view(shape)
            for rank, shape in enumerate(plan.local_shapes)
        ]
        return plan.gather(parts, tensor, self._device)

    def _scattered(self, whole: torch.Tensor, plan: GatherPlan, shape: torch.Size) -> torch.Tensor:
        total = self._sum(whole, True, True)
        return plan.scatter(total, self._rank) if plan.givers[self._rank] else total.new_zeros(shape)

    def _to_first(self, tensor: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        """On the first of `ranks` the sum of theirs, in their order; zeros on the others."""
        own = tensor.detach().contiguous()
        if len(ranks) == self._size:
            return self._sum(own, True, self._rank == 0)
        first, *others = ranks
        if self._rank != first:
            self._finish("broadcast", lambda: dist.isend(own, group=self._group, group_dst=first))
            return torch.zeros_like(own)
        total = own.clone()
        for rank in others:
            part = torch.empty_like(own)
            self._finish("broadcast", lambda part=part, rank=rank: dist.irecv(part, group=self._group, group_src=rank))  # type: ignore[misc]
            total += part
        return total

    def _from_first(self, tensor: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        """The first's tensor, on each of `ranks`."""
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        if len(ranks) == self._size:
            return self._sum(own, self._rank == 0, True)
        first, *others = ranks
        if self._rank != first:
            self._finish("broadcast", lambda: dist.irecv(own, group=self._group, group_src=first))
            return own
        for rank in others:
            self._finish("broadcast", lambda rank=rank: dist.isend(own, group=self._group, group_dst=rank))  # type: ignore[misc]
        return own

    def _on_each_rank(self, number: int) -> list[int]:
        own = torch.zeros(self._size, dtype=torch.long, device=self._device)
        own[self._rank] = number
        return [int(found) for found in self._add(own).tolist()]

    def _sum_home(
        self, shared: Sequence[Shared], gradients: Sequence[torch.Tensor | None], like: Sequence[tuple[Any, Any]]
    ) -> list[torch.Tensor | None]:
        """The sums of `enter`'s backward, by dtype in one flat tensor: in it each piece has its place, and each tensor
        a number that tells whether any gradient arrived. like: (shape, dtype) of each tensor."""
        found: list[torch.Tensor | None] = [
            gradient if item.mine is None else None for item, gradient in zip(shared, gradients, strict=True)
        ]
        for dtype in dict.fromkeys(dtype for _, dtype in like):
            places, end = {}, 0
            for index in (index for index, (_, other) in enumerate(like) if other == dtype):
                places[index] = [end + start for start in itertools.accumulate(shared[index].sizes, initial=0)]
                end = places[index][-1]
            flat = torch.zeros(end + len(places), dtype=dtype, device=self._device)
            for number, (index, starts) in enumerate(places.items()):
                gradient, item = gradients[index], shared[index]
                if gradient is not None and item.mine is not None and item.counts:
                    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
                    flat[starts[item.mine] : starts[item.mine + 1]].copy_(dense.reshape(-1))
                    flat[end + number] = 1
            flat = self._add(flat)
            arrived = flat[end:].tolist()
            for number, (index, starts) in enumerate(places.items()):
                mine = shared[index].mine
                if mine is not None and arrived[number]:
                    found[index] = flat[starts[mine] : starts[mine + 1]].view(like[index][0]).clone()
        return found


def check_group(group: Any) -> list[str]:
    """The kinds of devices that the group's backend is for.

    Raises:
        TensorParallelError: torch.distributed is not initialised, or this process is none of the group.
    """
    return sorted(found.type for found in _checked(group)._device_types)


def _checked(group: Any) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise TensorParallelError(
            "make_distributed_shard needs an initialised process group: call torch.distributed.init_process_group in "
            "every process (under torchrun, without arguments) before it"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group is a {type(group).__name__}; a torch.distributed.ProcessGroup is needed")
    found: dist.ProcessGroup | None = dist.group.WORLD if group is None else group
    if found is None or dist.get_rank(found) < 0:
        raise TensorParallelError("this process is not a rank of the process group that was given")
    return found


# --- pairs of adjoints -----------------------------------------------------------------------------------------------


class _Sum(Function):
    """The sum of what the ranks give, on those that take it, zeros on the others; the adjoint exchanges the two."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, gives: bool, takes: bool) -> torch.Tensor:
        ctx.group, ctx.gives, ctx.takes = group, gives, takes
        return group._sum(tensor, gives, takes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.group, ctx.takes, ctx.gives), None, None, None  # type: ignore[no-untyped-call]


class _Gather(Function):
    """The ranks' parts as a whole, on all; its adjoint is _Scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, plan: GatherPlan) -> torch.Tensor:
        ctx.group, ctx.plan, ctx.shape = group, plan, tensor.shape
        return group._gathered(tensor, plan)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Scatter.apply(gradient, ctx.group, ctx.plan, ctx.shape), None, None  # type: ignore[no-untyped-call]


class _Scatter(Function):
    """This rank's part of the sum of the wholes, zeros where nothing is gathered from it; its adjoint is _Gather."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: ProcessGroup, plan: GatherPlan, shape: torch.Size) -> torch.Tensor:
        ctx.group, ctx.plan = group, plan
        return group._scattered(whole, plan, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Gather.apply(gradient, ctx.group, ctx.plan), None, None, None  # type: ignore[no-untyped-call]


class _Share(Function):
    """The first's tensor on each of `ranks`, which have its values already; its adjoint is _ToFirst."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, ranks: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _ToFirst.apply(gradient, ctx.group, ctx.ranks), None, None  # type: ignore[no-untyped-call]


class _ToFirst(Function):
    """The sum over `ranks` on the first of them, zeros on the others; its adjoint sends the first's to all. A rank that
    is in no list keeps its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, ranks: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return group._to_first(tensor, ranks) if len(ranks) > 1 else tensor.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _FromFirst.apply(gradient, ctx.group, ctx.ranks), None, None  # type: ignore[no-untyped-call]


class _FromFirst(Function):
    """The first's tensor on each of `ranks`; its adjoint is _ToFirst."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, ranks: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return group._from_first(tensor, ranks) if len(ranks) > 1 else tensor.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _ToFirst.apply(gradient, ctx.group, ctx.ranks), None, None  # type: ignore[no-untyped-call]


class _Keep(Function):
    """A tensor where it is kept, else zeros; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, keep: bool) -> torch.Tensor:
        ctx.keep = keep
        return tensor.detach().clone() if keep else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Keep.apply(gradient, ctx.keep), None  # type: ignore[no-untyped-call]


class _Leave(Function):
    """A rank's tensor as the caller's; its adjoint is _FirstAlone."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _FirstAlone.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _FirstAlone(Function):
    """The caller's gradient on rank 0, zeros elsewhere; its adjoint sends rank 0's to all."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.detach().clone() if group.rank() == 0 else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.group, ctx.group.rank() == 0, True), None  # type: ignore[no-untyped-call]


class _Enter(Function):
    """The caller's tensors as this rank's; its adjoint is _Home. Where a rank does not compute with one, zeros."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, shared: tuple[Shared, ...], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.shared = group, shared
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return tuple(
            tensor.detach() if item.counts else torch.zeros_like(tensor)
            for item, tensor in zip(shared, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *_Home.apply(ctx.group, ctx.shared, ctx.like, *gradients)  # type: ignore[no-untyped-call]


class _Home(Function):
    """The sums of the ranks' gradients as the caller's; what the caller makes of one goes back to each rank."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, shared: tuple[Shared, ...], like: Any, *gradients: torch.Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.counts = [item.counts and given is not None for item, given in zip(shared, gradients, strict=True)]
        # A gradient that a rank holds alone must not come back as the very tensor.
        return tuple(
            found.clone() if found is given and found is not None else found
            for found, given in zip(group._sum_home(shared, gradients, like), gradients, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        counted = zip(ctx.counts, gradients, strict=True)
        return None, None, None, *(gradient if counts else None for counts, gradient in counted)
