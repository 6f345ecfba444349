"""The group of ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch

from tensor_parallel.comm.gather import GatherPlan, plan_gather
from tensor_parallel.comm.group import Holders
from tensor_parallel.comm.joint import (
    assemble_to_ranks,
    copy_to_ranks,
    gather_to_ranks,
    share_from_first,
    sum_into,
    sum_to_ranks,
)
from tensor_parallel.comm.rendezvous import Rendezvous
from tensor_parallel.errors import CollectiveError
from tensor_parallel.layout import Cuts, Placement

Call = tuple[str, int]
"""One recorded collective: its name, and the bytes of the whole tensor."""

_MOST_PLANS = 1024
_LARGE = 2**18
"""Bytes from which on a second meeting costs less than one rank's copying alone."""


@dataclass(frozen=True, slots=True)
class _Unfilled:
    """A sum that is still to be worked out from its parts."""

    total: torch.Tensor
    parts: list[torch.Tensor]


class _Meeting(Rendezvous):
    """A rendezvous that knows the collectives."""

    def __init__(self, devices: Sequence[torch.device], deadline: float) -> None:
        super().__init__(devices, deadline)
        self._everyone = (True,) * self.size
        self._plans: dict[Any, tuple[GatherPlan, Placement, Cuts]] = {}

    def sum_up(self, values: list[tuple[torch.Tensor, bool]]) -> Sequence[Any]:
        """Large sums are left for each rank to add itself, all at once."""
        parts = [tensor if contributes else None for tensor, contributes in values]
        first = next((part for part in parts if part is not None), None)
        if first is None:
            return [torch.zeros_like(tensor) for tensor, _ in values]
        shape, dtype = first.shape, first.dtype
        if any([part is not None and (part.shape != shape or part.dtype != dtype) for part in parts]):
            raise CollectiveError(f"all_reduce of different tensors: {_each(parts)}; all must have one shape and dtype")
        present = [part for part in parts if part is not None]
        if len(present) == 1 or first.nbytes < _LARGE or len(set(self.devices)) > 1:
            return sum_to_ranks(parts, self.devices, self._everyone, self)
        sums = sum_to_ranks(parts, self.devices, self._everyone, self, filled=False)
        return [_Unfilled(total, present) for total in sums if total is not None]

    def join(self, values: list[tuple[torch.Tensor, Placement, Cuts]]) -> Sequence[torch.Tensor]:
        plan, parts = self._parts(values)
        return gather_to_ranks(parts, plan, self._everyone, self)  # type: ignore[return-value]

    def _parts(
        self, values: list[tuple[torch.Tensor, Placement, Cuts]]
    ) -> tuple[GatherPlan, list[torch.Tensor | None]]:
        tensors = [value[0] for value in values]
        _, placement, cuts = values[0]
        if any(value[1] is not placement and value[1] != placement for value in values):
            raise CollectiveError(f"all_gather with different placements: {[value[1] for value in values]}")
        plan = self._plan(placement, cuts, tuple(tensor.shape for tensor in tensors))
        parts = [tensor if gives else None for tensor, gives in zip(tensors, plan.givers, strict=True)]
        if len({part.dtype for part in parts if part is not None}) > 1:
            raise CollectiveError(f"all_gather of different dtypes: {_each(parts)}; all must have one dtype")
        return plan, parts

    def _plan(self, placement: Placement, cuts: Cuts, shapes: tuple[torch.Size, ...]) -> GatherPlan:
        key = (id(placement), id(cuts), shapes)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _MOST_PLANS:  # lengths differ from call to call
                self._plans.clear()
            found = plan_gather(placement, cuts, shapes, self.devices), placement, cuts
            self._plans[key] = found
        return found[0]

    def join_first(self, values: list[tuple[torch.Tensor, Placement, Cuts]]) -> Sequence[Any]:
        """For rank 0 the whole; large ones are left for each rank to copy its part into, (whole, plan)."""
        plan, parts = self._parts(values)
        nbytes = prod(plan.shape) * values[0][0].element_size()
        in_parts = nbytes >= _LARGE and len(set(self.devices)) == 1
        first = [True] + [False] * (self.size - 1)
        whole = gather_to_ranks(parts, plan, first, self, filled=not in_parts)[0]
        return [(whole, plan if in_parts else None)] * self.size

    def assemble(self, values: list[tuple[torch.Tensor, Sequence[int]]]) -> Sequence[Any]:
        shape = values[0][1]
        if any(tuple(other) != tuple(shape) for _, other in values):
            raise CollectiveError(f"assembly of different tensors: {[tuple(s) for _, s in values]}")
        return assemble_to_ranks([tensor for tensor, _ in values], shape, self.devices, self)

    def share(self, values: list[tuple[torch.Tensor, Holders | None]]) -> Sequence[torch.Tensor]:
        tensors = [tensor for tensor, _ in values]
        found = list(tensors)
        for ranks in values[0][1] or (range(self.size),):
            held = [tensors[rank] for rank in ranks]
            if any([tensor.shape != held[0].shape or tensor.dtype != held[0].dtype for tensor in held]):
                raise CollectiveError(
                    f"broadcast of different tensors: {_each(tensors)}; all must have the same values"
                )
            if len(held) > 1:
                for rank, tensor in zip(ranks, share_from_first(held, ranks[0], self), strict=True):
                    found[rank] = tensor
        return found

    def hand_out(self, values: list[Sequence[torch.Tensor]]) -> Sequence[list[torch.Tensor]]:
        given, ranks = values[0], range(self.size)
        copies = copy_to_ranks(given, [ranks] * len(given), self.devices, apart=True, owner=self)
        return [list(given), *([copy[rank] for copy in copies] for rank in ranks[1:])]

    def choose(self, values: list[tuple[Any, int]]) -> Sequence[Any]:
        sources = {source for _, source in values}
        if len(sources) > 1:
            raise CollectiveError(f"broadcast_object from different ranks: {[source for _, source in values]}")
        return [values[sources.pop()][0]] * self.size

    def divide(self, values: list[tuple[int, ...]]) -> Sequence[_Meeting | None]:
        ranks = values[0]
        if any(other != ranks for other in values):
            raise CollectiveError(f"subgroup of different ranks: {values}; every rank must name the same ones")
        made = self.child(ranks)
        return [made if rank in ranks else None for rank in range(self.size)]


def _each(parts: Sequence[torch.Tensor | None]) -> str:
    named = [(rank, part) for rank, part in enumerate(parts) if part is not None]
    return "; ".join(f"rank {r}: {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}" for r, p in named)


class ThreadGroup:
    """One rank's view of the ranks of one process; a Group. Copies are the same group."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self.record: list[Call] | None = None
        """Where this rank's all_reduce and all_gather are listed, see recording.recorded."""

    def __repr__(self) -> str:
        return f"<ThreadGroup rank {self._rank} of {self.size()} on {self.device}>"

    def __copy__(self) -> ThreadGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ThreadGroup belongs to the threads of this process and cannot be pickled")

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._meeting.devices[self._rank]

    @property
    def rendezvous(self) -> Rendezvous:
        """What the ranks share, for whoever runs them."""
        return self._meeting

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.size

    def all_reduce(self, tensor: torch.Tensor, *, contributes: bool = True) -> torch.Tensor:
        """See Group.

        Raises:
            CollectiveError: the ranks' tensors differ in shape or dtype, or the ranks called different collectives.
            DeadlineError, RankError: see Rendezvous.meet; so for every collective.
        """
        if self.record is not None:
            self.record.append(("all_reduce", tensor.nbytes))
        meeting = self._meeting
        result = meeting.meet(self._rank, "all_reduce", meeting.sum_up, (tensor, contributes))
        if type(result) is _Unfilled:
            total, parts = result.total, result.parts
            sum_into(total, parts)
            meeting.meet(self._rank, "all_reduce", _nothing, None, ordered=False)  # nobody writes into a part before
            return total
        reduced: torch.Tensor = result
        return reduced

    def all_gather(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """See Group.

        Raises:
            CollectiveError: a rank's tensor has not the shape of its part.
        """
        meeting = self._meeting
        result: torch.Tensor = meeting.meet(self._rank, "all_gather", meeting.join, (tensor, placement, cuts))
        if self.record is not None:
            self.record.append(("all_gather", result.nbytes))
        return result

    def gather_first(self, tensor: torch.Tensor, placement: Placement, cuts: Cuts) -> torch.Tensor:
        """See Group. Of a large tensor each rank copies its part itself, all at once; where that is done the others get
        the very tensor of rank 0."""
        meeting = self._meeting
        whole, plan = meeting.meet(self._rank, "all_gather", meeting.join_first, (tensor, placement, cuts))
        if self.record is not None:
            self.record.append(("all_gather", whole.nbytes))
        if plan is not None:
            with torch.no_grad():
                plan.put(whole.detach(), tensor.detach(), self._rank)
            meeting.meet(self._rank, "all_gather", _nothing, None, ordered=False)
        result: torch.Tensor = whole
        return result

    def stand_by(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See Group."""
        meeting = self._meeting
        if self._rank == 0:
            meeting.standing_by = lambda: self._go_on(tensor)
            meeting.work_alone(True)
            return tensor
        over = meeting.meet(self._rank, "stand by", _from_first, None, ordered=False)
        return None if over else self.broadcast_tensors(())[0]

    def _go_on(self, tensor: torch.Tensor) -> None:
        self._meeting.work_alone(False)
        self._meeting.meet(0, "stand by", _from_first, False, ordered=False)
        self.broadcast_tensors([tensor])

    def release(self) -> None:
        """See Group."""
        meeting = self._meeting
        if meeting.standing_by is not None:
            meeting.standing_by = None
            meeting.work_alone(False)
            meeting.meet(0, "stand by", _from_first, True, ordered=False)

    def withheld(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return torch.zeros_like(tensor)

    def assemble(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """See Group."""
        result: torch.Tensor = self._meeting.meet(self._rank, "assemble", self._meeting.assemble, (tensor, shape))
        if self.record is not None:
            self.record.append(("assemble", result.nbytes))
        return result

    def broadcast(self, tensor: torch.Tensor, holders: Holders | None = None) -> torch.Tensor:
        """See Group. The result shares the tensor's memory; without gradients it is the tensor.

        Raises:
            CollectiveError: the ranks' tensors differ in shape or dtype.
        """
        if not torch.is_grad_enabled():
            return tensor
        meeting = self._meeting
        result: torch.Tensor = meeting.meet(self._rank, "broadcast", meeting.share, (tensor, holders))
        return result

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See Group."""
        meeting = self._meeting
        result: list[torch.Tensor] = meeting.meet(self._rank, "broadcast_tensors", meeting.hand_out, tensors)
        return result

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """See Group; every rank gets the very object."""
        if not 0 <= source < self.size():
            raise ValueError(f"source is {source}; the group has ranks 0 to {self.size() - 1}")
        return self._meeting.meet(self._rank, "broadcast_object", self._meeting.choose, (value, source))

    def barrier(self) -> None:
        self._meeting.meet(self._rank, "barrier", _nothing, None)

    def subgroup(self, ranks: Sequence[int]) -> ThreadGroup | None:
        wanted = tuple(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or not all(0 <= rank < self.size() for rank in wanted):
            raise ValueError(f"ranks {list(wanted)} must be different ranks from 0 to {self.size() - 1}, at least one")
        made = self._meeting.meet(self._rank, "subgroup", self._meeting.divide, wanted)
        return None if made is None else ThreadGroup(made, wanted.index(self._rank))

    def abort(self, error: BaseException) -> None:
        self._meeting.abort(error, self._rank)


def _from_first(values: list[Any]) -> list[Any]:
    return [values[0]] * len(values)


def _nothing(values: list[Any]) -> list[Any]:
    return values


def thread_groups(devices: Sequence[torch.device], deadline: float = 600.0) -> list[ThreadGroup]:
    """One group object a rank, for ranks on `devices` (a device may be named several times).

    deadline: seconds that a rank waits for the others in one collective.
    """
    if not devices or deadline <= 0:
        raise ValueError(f"a group needs a device and a deadline above 0, not {list(devices)} and {deadline}")
    meeting = _Meeting(devices, deadline)
    return [ThreadGroup(meeting, rank) for rank in range(len(devices))]
