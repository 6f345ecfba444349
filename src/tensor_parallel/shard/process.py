"""One rank's part of a module, in a process of its own: the module, its parameters cut to this rank's, computing with
collectives over a process group. Borders, sizes, lookups and pieces are those of the ranks that are threads.

A call from outside takes and gives whole tensors, the same on all ranks. It leads the caller's tensors and those
parameters of which several ranks hold the same to the ranks' world and its output back (`ProcessGroup.enter`, `leave`),
so every rank's caller gets whole gradients of both.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import _StopRecomputationError

from tensor_parallel.checkpoint_entry import handled_by
from tensor_parallel.comm.draws import Layouts
from tensor_parallel.comm.process import ProcessGroup
from tensor_parallel.comm.process_exchange import Shared
from tensor_parallel.errors import RankError, TensorParallelError
from tensor_parallel.plan import ResolvedPlan
from tensor_parallel.shard.borders import Borders, cross
from tensor_parallel.shard.classes import Swapped
from tensor_parallel.shard.hooks import has_user_code, record, run_own_hooks, spare_modules
from tensor_parallel.shard.one_run import KnownDraws, Run
from tensor_parallel.shard.regions import random_states
from tensor_parallel.shard.shards import Adapter, Binding, refresh_flat_weights
from tensor_parallel.shard.values import distinct_leaves, map_leaves
from tensor_parallel.shard.watch import Watch

Randomness = Callable[["ProcessShard", Layouts], AbstractContextManager[Any]]
"""(this rank's part, how tensors lie) -> what makes random calls of this rank those of the unsplit model."""
Copies = dict[int, torch.Tensor]
"""By number of the shared parameter, what this rank computes with in its place."""


class ProcessShard:
    """Everything about this process's part of one module.

    shared: the parameters of which several ranks hold the same.  places: where they stand.
    """

    def __init__(
        self, resolved: ResolvedPlan, group: ProcessGroup, adapters: Sequence[Adapter], randomness: Randomness
    ) -> None:
        plans = resolved.plan.modules
        self.resolved, self.group, self.rank = resolved, group, group.rank()
        self.devices = (group.device,) * group.size()
        self.shared: list[Shared] = []
        self.places: list[Binding] = []
        self.counted: list[Any] = []
        self.spare = spare_modules(plans)
        outputs = [boundary.path for plan in plans.values() for boundary in plan.outputs]
        self.gathered = frozenset(path.partition(".")[0] for path in outputs if path and not path[0].isdigit())
        self.by_hand = any(plan.rules for plan in plans.values())
        self.run = Run(group.size(), resolved.cuts)
        self._adapters, self._randomness = adapters, randomness
        self.root: weakref.ref[nn.Module] | None = None
        self._inside: int | None = None
        self._copies: Copies | None = None
        self._standing_at: str | None = None
        self._wants_spare = False
        self._seen_drawing: dict[str, bool] = {}
        self._lock = threading.Lock()

    def rank_here(self) -> int | None:
        """The rank, while its own code runs in the calling thread."""
        return self.rank if self._inside == threading.get_ident() else None

    def records(self, module: nn.Module) -> str:
        """What the model's own hooks on `module` record now, see Adapter."""
        return next((found for adapter in self._adapters if (found := adapter.records(module))), "")

    def is_watched(self, module: nn.Module, name: str) -> bool:
        """Whether whole values are wanted at the module."""
        if has_user_code(module) or (self._wants_spare and name in self.spare):
            return True
        return bool(torch_modules._has_any_global_hook())  # type: ignore[no-untyped-call]

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, slot: ProcessSlot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call from outside of `module` on this rank; all ranks make it."""
        if self._copies is not None and self._inside is None:
            return self._call_within(module, slot, args, kwargs)
        with self._lock:
            self.group.begin()
            self._wants_spare = any([adapter.asks_for_spare(module, kwargs) for adapter in self._adapters])
            try:
                with self._random(module, slot.name):
                    copies, (args, kwargs) = self._enter_all((args, kwargs))
                    with self.inside(copies, [0] * len(self.counted)), handled_by(self):
                        output = cross(slot.outside, slot.own_forward, module, args, kwargs)
                return self.leave(output)
            except (RankError, _StopRecomputationError):  # nobody waits for this rank
                raise
            except Exception as error:
                self.group.abort(error)
                raise
            finally:
                watch = self._watch()
                if watch is not None:
                    watch.routes.settle()

    def _call_within(self, module: nn.Module, slot: ProcessSlot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that user code inside a run asks for; the parameters are this rank's already."""
        own_call, self._standing_at = self._standing_at == slot.name, None
        counts = None if own_call else [0] * len(self.counted)
        args, kwargs = self.enter((args, kwargs))
        with self.inside(self._copies or {}, counts):
            output = cross(slot.outside, slot.own_forward, module, args, kwargs)
        return self.leave(output)

    @contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """Around user code at the module `name`: what it calls, it calls from outside."""
        before = self._inside, self._standing_at
        self._inside, self._standing_at = None, name
        try:
            yield
        finally:
            self._inside, self._standing_at = before

    @contextmanager
    def inside(self, copies: Copies, counts: Sequence[int] | None = None) -> Iterator[None]:
        """Around this rank's own code, with what it computes with in place. counts: of the modules' calls."""
        before, placed = (self._inside, self._copies), []
        known = [borders.calls for borders in self.counted]
        if counts is not None:
            self._count_from(counts)
        try:
            if self._copies is not copies:
                for place in self.places:
                    if place.shared in copies:
                        placed.append((place, place.holder[place.name]))
                        place.holder[place.name] = copies[place.shared]
                refresh_flat_weights([place for place, _ in placed])
            self._inside, self._copies = threading.get_ident(), copies
            yield
        finally:
            self._inside, self._copies = before
            for place, tensor in placed:
                place.holder[place.name] = tensor
            refresh_flat_weights([place for place, _ in placed])
            if counts is not None:
                self._count_from(known)

    def _count_from(self, counts: Sequence[int]) -> None:
        for borders, calls in zip(self.counted, counts, strict=True):
            borders.calls = calls

    # --- checkpoints: torch's own, recomputed as in the forward (see checkpoint_entry.Handler) -----------------------

    plainly = False

    def applies(self) -> bool:
        return self.rank_here() is not None

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        copies, counts = self._copies or {}, [borders.calls for borders in self.counted]

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if self.rank_here() is not None:  # the forward itself, reentrant
                return function(*args, **kwargs)
            with self.inside(copies, counts), handled_by(self), self._randomly():
                return function(*args, **kwargs)

        return recompute

    def region(self, *_: Any) -> AbstractContextManager[None]:
        raise TensorParallelError("torch's own checkpointing serves where each rank is a process")

    # --- random numbers ----------------------------------------------------------------------------------------------

    def _randomly(self) -> AbstractContextManager[Any]:
        return self._randomness(self, self.run.draw_layout)

    @contextmanager
    def _random(self, module: nn.Module, name: str) -> Iterator[None]:
        """Around a run: random calls in training, and where a first call was seen to make some, are rank 0's."""
        known = True if any(inner.training for inner in module.modules()) else self._seen_drawing.get(name)
        if known is False:
            yield
            return
        self._take_random_states()
        before = random_states(self.devices[:1])
        with self._randomly():
            yield
        if known is None:
            after = random_states(self.devices[:1])
            self._seen_drawing[name] = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def _take_random_states(self) -> None:
        """Rank 0's, of the generators that this rank's devices use."""
        device = self.group.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state, on_device = self.group.broadcast_object((torch.get_rng_state(), cuda))
        if self.rank:
            torch.set_rng_state(state)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, device)

    # --- the caller's world and this rank's --------------------------------------------------------------------------

    def _enter_all(self, value: Any) -> tuple[Copies, Any]:
        """(what stands in the shared parameters' place, the inputs as this rank's own), by one node."""
        watch = self._watch()
        if watch is not None:
            watch.check()
        grad = torch.is_grad_enabled()
        held: dict[int, torch.Tensor] = {}
        for place in self.places:
            found = place.holder[place.name]
            if found is not None:
                held.setdefault(place.shared, found)
        followed = [index for index, tensor in held.items() if grad and tensor.requires_grad]
        copies = {
            index: torch.zeros_like(tensor)
            for index, tensor in held.items()
            if not self.shared[index].counts and index not in followed
        }
        given = _differentiable(value) if grad else {}
        tensors = [held[index] for index in followed] + list(given.values())
        if tensors:
            shared = [self.shared[index] for index in followed] + [_by_all(tensor) for tensor in given.values()]
            made = self.group.enter(tensors, shared)
            copies.update(zip(followed, made, strict=False))
            value = _exchanged(value, dict(zip(given, made[len(followed) :], strict=True)))
        return copies, value

    def enter(self, value: Any) -> Any:
        """The caller's value, its tensors as this rank's own."""
        given = _differentiable(value)
        if not given or not torch.is_grad_enabled():
            return value
        made = self.group.enter(list(given.values()), [_by_all(tensor) for tensor in given.values()])
        return _exchanged(value, dict(zip(given, made, strict=True)))

    def leave(self, value: Any) -> Any:
        """A value that is the same on all ranks, its tensors as the caller's."""
        if not torch.is_grad_enabled():
            return value
        return _exchanged(value, {key: self.group.leave(tensor) for key, tensor in _differentiable(value).items()})

    def _watch(self) -> Watch | None:
        """None where the root is gone, and an inner module runs on."""
        root = None if self.root is None else self.root()
        return None if root is None else root.__dict__["_tp_slot"].watch


def _by_all(tensor: torch.Tensor) -> Shared:
    return Shared((tensor.numel(),))


def _differentiable(value: Any) -> dict[int, torch.Tensor]:
    """The tensors in nested values that gradients may go to, each once, by id."""
    found = distinct_leaves(value)
    return {key: leaf for key, leaf in found.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad}


def _exchanged(value: Any, table: dict[int, torch.Tensor]) -> Any:
    return map_leaves(value, lambda leaf: table.get(id(leaf), leaf)) if table else value


class ProcessSlot:
    """What one module knows about the split; kept in its `__dict__`.  watch: the root's."""

    __slots__ = ("around", "draws", "inside", "name", "outside", "own_forward", "rank", "rank_here", "shards", "watch")

    def __init__(self, shards: ProcessShard, name: str, own_forward: Callable[..., Any]) -> None:
        self.shards, self.name, self.own_forward = shards, name, own_forward
        self.rank, self.rank_here = shards.rank, shards.rank_here
        self.inside: Borders | None = None
        self.outside: Borders | None = None
        self.around: Borders | None = None
        self.draws = KnownDraws()
        self.watch: Watch | None = None

    def drawing(self) -> AbstractContextManager[None]:
        """Around the module's own forward: its random calls are those that the plan knows."""
        return self.shards.run.drawing(self.rank, self.draws.of_next_call())


class ProcessModule(Swapped):
    """First base of every class made for one rank's modules in a process."""

    _tp_slot: ProcessSlot

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        slot = self._tp_slot
        if slot.rank_here() is None:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        shards = slot.shards
        recording = shards.records(self) if self._forward_hooks else ""
        if shards.is_watched(self, slot.name) or recording == "whole":
            return self._call_whole(slot, args, kwargs)
        if self._forward_pre_hooks:
            args = run_own_hooks(self, args)
        output = cross(slot.inside, slot.own_forward, self, args, kwargs)
        if recording:
            record(self, args, kwargs, output)
        return output

    def _call_whole(self, slot: ProcessSlot, args: Any, kwargs: Any) -> Any:
        """A call that user code, or a recorder that is switched on, sees as the caller would: whole values, and in
        backward whole gradients."""
        shards = slot.shards
        if shards.by_hand:
            raise NotImplementedError(
                f"{slot.name} has a hook or a patched forward, and rules by hand do not say how to make whole what it "
                "gets on a rank; leave the config out, or take the hook off"
            )
        if slot.around is not None:
            args, kwargs, _ = slot.around.enter(args, kwargs)
        args, kwargs = shards.leave((args, kwargs))
        with shards.outside(slot.name):
            result = super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        result = shards.enter(result)
        if slot.around is None:
            return result
        if isinstance(result, Mapping) or dataclasses.is_dataclass(result):
            result = copy.copy(result)  # the user's code may have kept it, and what is cut below is for this rank
        return slot.around.leave(result, None)

    def __setattr__(self, name: str, value: Any) -> None:
        self._note_route(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._note_route(name)
        super().__delattr__(name)

    def _note_route(self, name: str) -> None:
        """An attribute is set from outside: whether the plan still holds is seen at the next run."""
        slot: ProcessSlot | None = self.__dict__.get("_tp_slot")
        if slot is not None and slot.rank_here() is None:
            watch = slot.shards._watch()
            if watch is not None:
                watch.routes.note(self, slot.name, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            f"a copy of {self._tp_slot.name or type(self).__name__}, one rank's part of a split model, is not there "
            "yet; copy the module before make_distributed_shard"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._tp_slot.name or type(self).__name__}, one rank's part of a split model, cannot be pickled; save "
            "its state_dict, which holds this rank's parts"
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        where = self._tp_slot.name or type(self).__name__
        raise NotImplementedError(f"compile() of {where}, in one rank's part of a split model, is not there yet")


class SavingModule(ProcessModule):
    """For the root where its class saves itself to files."""

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "save_pretrained of one rank's part would write that part as if it were the whole; save `state_dict()` "
            "under a name with the rank in it"
        )
