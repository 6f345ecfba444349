"""The group of ranks that are processes of torch.distributed.

This module imports torch.distributed; nothing that `import tensor_parallel` brings imports this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tensor_parallel.comm.gather import GatherPlan, plan_gather, whole_layouts
from tensor_parallel.comm.group import Holders
from tensor_parallel.comm.process_exchange import Exchange, Shared
from tensor_parallel.comm.process_nodes import Enter, Gather, Keep, Leave, Share, Sum
from tensor_parallel.layout import Cuts, DimLayout, Part, Placement, Segment, local_size, shard

_MOST_PLANS = 1024
_GIVEN = "as given"


class ProcessGroup:
    """This process's view of the ranks of a torch.distributed group; a Group. Copies are the same group.

    There are two worlds. *Inside* a forward each rank has its own tensor, and the gradient of one that is the same on
    all ranks is the sum of the ranks' gradients. The *caller* of a forward has one value, of which each rank has a
    copy, with its whole gradient. `enter` and `leave` lead from one to the other and back.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """group: None for all processes.  device: where this rank's tensors are.

        Raises:
            TensorParallelError, DeviceError: see Exchange.
        """
        self._exchange = Exchange(group, device)
        self._rank, self._size, self._device = self._exchange.rank, self._exchange.size, device
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
        return list(Enter.apply(self._exchange, tuple(shared), *tensors))  # type: ignore[no-untyped-call]

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is the same on all ranks as the caller's: in backward rank 0 alone takes the caller's gradient,
        which is one and the same on all ranks."""
        found: torch.Tensor = Leave.apply(tensor, self._exchange)  # type: ignore[no-untyped-call]
        return found

    # --- the Group protocol ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, *, contributes: bool = True) -> torch.Tensor:
        """See Group.

        Raises:
            DeadlineError, RankError: see Exchange; so for every collective.
        """
        found: torch.Tensor = Sum.apply(tensor, self._exchange, contributes, True)  # type: ignore[no-untyped-call]
        return found

    def all_gather(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """See Group. The other ranks' shapes are worked out from this rank's.

        Raises:
            CollectiveError: this rank's tensor has not the shape of its part.
        """
        found: torch.Tensor = Gather.apply(tensor, self._exchange, self._plan(placement, cuts, tensor.shape))  # type: ignore[no-untyped-call]
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
        found: torch.Tensor = Keep.apply(tensor, False)  # type: ignore[no-untyped-call]
        return found

    def assemble(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """See Group."""
        sizes = self._exchange.on_each_rank(tensor.numel())
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
        found: torch.Tensor = Share.apply(tensor, self._exchange, mine)  # type: ignore[no-untyped-call]
        return found

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See Group."""
        known = self.broadcast_object([(t.shape, t.dtype, t.requires_grad) for t in tensors])
        if self._rank == 0:
            given = list(tensors)
        else:
            given = [torch.zeros(s, dtype=d, device=self._device).requires_grad_(r) for s, d, r in known]
        made = [Sum.apply(tensor, self._exchange, self._rank == 0, True) for tensor in given]  # type: ignore[no-untyped-call]
        return list(tensors) if self._rank == 0 and not any(r for *_, r in known) else made

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """See Group; pickled."""
        if not 0 <= source < self._size:
            raise ValueError(f"source is {source}; the group has ranks 0 to {self._size - 1}")
        holder = [value]
        work = lambda: dist.broadcast_object_list(holder, group=self._exchange.group, group_src=source)  # noqa: E731
        self._exchange.blocking("broadcast_object", work)
        return holder[0]

    def barrier(self) -> None:
        self._exchange.add(torch.zeros(1, device=self._device), "barrier")

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """See Group. Where this group is not of all processes, no two of its subgroups may share ranks."""
        everywhere = dist.get_process_group_ranks(self._exchange.group)
        wanted = tuple(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or not all(0 <= rank < self._size for rank in wanted):
            raise ValueError(f"ranks {list(wanted)} must be different ranks from 0 to {self._size - 1}, at least one")
        local = self._size < dist.get_world_size()
        if local and self._rank not in wanted:
            return None
        made = dist.new_group([everywhere[rank] for rank in wanted], use_local_synchronization=local, sort_ranks=False)
        return ProcessGroup(made, self._device) if self._rank in wanted else None

    def begin(self) -> None:
        """A run begins, on all ranks: what failed in an earlier one is over."""
        self._exchange.begin()

    def abort(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one in the run under way: they raise RankError with this error's text."""
        self._exchange.abort(error)

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
