"""What ranks that are processes send each other, without autograd, and what happens when one of them does not answer.

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
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from tensor_parallel.comm.gather import GatherPlan
from tensor_parallel.errors import DeadlineError, DeviceError, RankError, TensorParallelError

_SLICE = timedelta(seconds=0.25)
"""How long a rank waits before it looks whether another one has failed."""
_HALF = (torch.float16, torch.bfloat16)


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


class Exchange:
    """One process's link to the ranks of a torch.distributed group.

    A rank that waits for another one longer than the group's own timeout raises DeadlineError; where another rank
    failed in the same run, RankError within a second (gloo; other backends end a wait as they do).
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """group: None for all processes.  device: where this rank's tensors are.

        Raises:
            TensorParallelError: torch.distributed is not initialised, or this process is none of the group.
            DeviceError: the group's backend has nothing for such a device.
        """
        self.group = check_group(group)
        check_device(self.group, device)
        self.device = device
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        store, number = distributed_c10d._get_process_group_store(self.group), "tensor_parallel exchanges"
        own = store.add(number, 1) if self.rank == 0 else 0
        # Every exchange has keys of its own, under a name that the ranks agree on.
        self._store = PrefixStore(f"tensor_parallel {gather_objects(self.group, own)[0]}", store)
        self._timeout: timedelta = self.group._get_backend(device).options._timeout
        self._sliced = dist.get_backend(self.group) == "gloo"
        self._run = 0
        self._broken = ""

    def begin(self) -> None:
        """A run begins, on all ranks: what failed in an earlier one is over."""
        self._run += 1

    def abort(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one in the run under way: they raise RankError with this error's text."""
        text = "".join(traceback.format_exception(error)).strip()
        self._store.set(f"failed {self._run}", f"rank {self.rank} failed: {text}")
        self._run += 1  # where all ranks failed alike, what they do next is not in that run

    def _failure(self) -> str:
        """What another rank says of the run under way, or of a run that left the group unusable."""
        for key in (f"failed {self._run}", "broken"):
            if self._store.check([key]):
                return bytes(self._store.get(key)).decode()
        return ""

    def _break(self, name: str, error: BaseException) -> NoReturn:
        said = self._failure()
        self._broken = said or f"{name} on rank {self.rank} failed: {error}"
        self._store.set("broken", self._broken)
        if said:
            raise RankError(f"{name} on rank {self.rank}: {said}") from None
        raise _lost(name, self.group, error) from error

    def _refuse_broken(self) -> None:
        if self._broken:
            raise RankError(
                f"this process group is not usable any more, make a new one and split again; before: {self._broken}"
            )

    def blocking(self, name: str, work: Callable[[], Any]) -> None:
        self._refuse_broken()
        try:
            work()
        except (RuntimeError, dist.DistError) as error:
            self._break(name, error)

    def finish(self, name: str, start: Callable[[], Any]) -> None:
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

    # --- sums and parts ---------------------------------------------------------------------------------------------

    def add(self, own: torch.Tensor, name: str = "all_reduce") -> torch.Tensor:
        """The sum over the ranks, into `own` where it can be."""
        wide = self.size > 2 and own.dtype in _HALF
        total = own.float() if wide else own
        self.finish(name, lambda: dist.all_reduce(total, group=self.group, async_op=True))
        return total.to(own.dtype) if wide else total

    def sum(self, tensor: torch.Tensor, gives: bool, takes: bool) -> torch.Tensor:
        make = torch.clone if gives else torch.zeros_like
        total = self.add(make(tensor.detach(), memory_format=torch.contiguous_format))
        return total if takes else total.zero_()

    def gather(self, tensor: torch.Tensor, plan: GatherPlan) -> torch.Tensor:
        sizes = [0 if shape is None else prod(shape) for shape in plan.local_shapes]
        most = max(sizes)
        own = tensor.new_zeros(most)
        if plan.givers[self.rank]:
            own[: sizes[self.rank]].copy_(tensor.detach().reshape(-1))
        every = tensor.new_empty(self.size * most)
        self.finish("all_gather", lambda: dist.all_gather_single(every, own, group=self.group, async_op=True))
        rows = every.view(self.size, most)
        parts = [
            None if shape is None else rows[rank, : sizes[rank]].view(shape)
            for rank, shape in enumerate(plan.local_shapes)
        ]
        return plan.gather(parts, tensor, self.device)

    def scatter(self, whole: torch.Tensor, plan: GatherPlan, shape: torch.Size) -> torch.Tensor:
        total = self.sum(whole, True, True)
        return plan.scatter(total, self.rank) if plan.givers[self.rank] else total.new_zeros(shape)

    def to_first(self, tensor: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        """On the first of `ranks` the sum of theirs, in their order; zeros on the others."""
        own = tensor.detach().contiguous()
        if len(ranks) == self.size:
            return self.sum(own, True, self.rank == 0)
        first, *others = ranks
        if self.rank != first:
            self.finish("broadcast", lambda: dist.isend(own, group=self.group, group_dst=first))
            return torch.zeros_like(own)
        total = own.clone()
        for rank in others:
            part = torch.empty_like(own)
            self.finish("broadcast", lambda part=part, rank=rank: dist.irecv(part, group=self.group, group_src=rank))  # type: ignore[misc]
            total += part
        return total

    def from_first(self, tensor: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        """The first's tensor, on each of `ranks`."""
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        if len(ranks) == self.size:
            return self.sum(own, self.rank == 0, True)
        first, *others = ranks
        if self.rank != first:
            self.finish("broadcast", lambda: dist.irecv(own, group=self.group, group_src=first))
            return own
        for rank in others:
            self.finish("broadcast", lambda rank=rank: dist.isend(own, group=self.group, group_dst=rank))  # type: ignore[misc]
        return own

    def on_each_rank(self, number: int) -> list[int]:
        own = torch.zeros(self.size, dtype=torch.long, device=self.device)
        own[self.rank] = number
        return [int(found) for found in self.add(own).tolist()]

    def sum_home(
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
            flat = torch.zeros(end + len(places), dtype=dtype, device=self.device)
            for number, (index, starts) in enumerate(places.items()):
                gradient, item = gradients[index], shared[index]
                if gradient is not None and item.mine is not None and item.counts:
                    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
                    flat[starts[item.mine] : starts[item.mine + 1]].copy_(dense.reshape(-1))
                    flat[end + number] = 1
            flat = self.add(flat)
            arrived = flat[end:].tolist()
            for number, (index, starts) in enumerate(places.items()):
                mine = shared[index].mine
                if mine is not None and arrived[number]:
                    found[index] = flat[starts[mine] : starts[mine + 1]].view(like[index][0]).clone()
        return found


def check_group(group: Any) -> dist.ProcessGroup:
    """The process group, None standing for that of all processes.

    Raises:
        TensorParallelError: torch.distributed is not initialised, or this process is none of the group.
    """
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


def device_kinds(group: dist.ProcessGroup) -> list[str]:
    """The kinds of devices that the group has a backend for."""
    return sorted(found.type for found in group._device_types)


def check_device(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise DeviceError where the group has no backend for the device."""
    known = device_kinds(group)
    if device.type not in known:
        raise DeviceError(
            f"device {device}: the process group's backend ({dist.get_backend(group)}) is for {' and '.join(known)}; "
            f"give such a device, or a group with a backend for {device.type}"
        )


def gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Every rank's value (pickled), by rank.

    Raises:
        DeadlineError, RankError: see Exchange.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, value, group=group)
    except (RuntimeError, dist.DistError) as error:
        raise _lost("gather_objects", group, error) from error
    return found


def _lost(name: str, group: dist.ProcessGroup, error: BaseException) -> RankError:
    """What a rank raises that gets no answer."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return DeadlineError(
            f"{name}: rank {rank} of {size} waited for the others as long as its process group allows (its timeout); "
            "every rank must make the same calls of make_distributed_shard, of the model and of backward"
        )
    return RankError(f"{name}: rank {rank} of {size} lost the others: {error}")
