"""The split model's data: pieces, hidden trees, the team, and what is put in place for one run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tensor_parallel.comm.joint import copy_to_ranks
from tensor_parallel.comm.rendezvous import Graphs
from tensor_parallel.errors import TensorParallelError
from tensor_parallel.plan import Draw, ResolvedPlan
from tensor_parallel.shard.one_run import Run
from tensor_parallel.shard.pieces import MARK, SplitTensor
from tensor_parallel.shard.routes import Routes
from tensor_parallel.shard.survey import Survey
from tensor_parallel.shard.team import Team

Tensors = dict[str, torch.Tensor | None]
Leaves = dict[int, dict[int, nn.Parameter]]
"""The leaves of the other ranks, by the id of rank 0's and by their owner."""


class Adapter(Protocol):
    """Objects that a forward takes or gives and of which every rank needs its own: caches."""

    def asks_for_spare(self, module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
        """Whether this call of `module` gives out what modules make beside what others read (attention weights)."""
        ...

    def records(self, module: nn.Module) -> str:
        """Whether hooks that the model installed on `module` by itself record its output in this thread now: the
        "whole" output, a rank's "part" of it, or not ("")."""
        ...

    def localise(self, value: Any, shards: ModelShards) -> list[Any] | None:
        """One object a rank for `value`, None where it is no such object."""
        ...

    def adopt(self, outputs: Sequence[Any], shards: ModelShards) -> None:
        """Tie the objects in rank 0's output to those in the other ranks' outputs."""
        ...


@dataclass(slots=True)
class SharedLeaf:
    """A leaf that several ranks use: all but the first get a copy for each run."""

    leaf: torch.Tensor
    ranks: tuple[int, ...]
    one_device: bool


@dataclass(slots=True)
class Binding:
    """Where one rank's tree takes a shared leaf's copy."""

    holder: Tensors
    name: str
    shared: int
    module: nn.Module | None = None


@dataclass(slots=True)
class BufferWatch:
    """One whole buffer of the visible tree, to be handed on to the other ranks when the user changes it."""

    visible: Tensors
    name: str
    hidden: list[Tensors]
    seen: tuple[int, int] | None = None


@dataclass(slots=True)
class CutBuffer:
    """Where the parts of one cut buffer stand: the ranks' own code may put other tensors in their places."""

    key: str
    holders: list[Tensors]
    name: str


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class ModelShards:
    """Everything about one split model. Its visible modules hold it and it holds them weakly, so `del model` frees all.

    tensors: by key (the tensor's first name in the unsplit model).
    visible: rank 0's modules by dotted name.  hidden: the other ranks' roots.
    peers: by rank, modules by name ({} for rank 0).  key_of: a tensor's key by the id of rank 0's part.
    watched: modules at which user code stands.  spare: the innermost modules with spare outputs.
    gathered: the items of outputs ("hidden_states") that the plan takes up as parts, and gathers.
    has_tail: whether the plan says which gather is the last.  under_way: None between runs.
    assigned: ids of the parameters that stand in modules by the split or by assignment.
    assembles: some ranks compute with wholes of what they hold in pieces (see assembly.py).
    empty: tensors were split that have no values yet.
    before: how it was split.  pending: how the model is to be split again at the next call.
    by_hand: there are rules by hand.  proven: the modules whose outputs were seen to be the same on all ranks.
    seen_drawing: by module, whether its first call from outside, not in training, made random calls.
    unmirrored: a callable was set that other ranks need a copy of: the model is split again at the next run.
    earlier: graphs of earlier splits that these parts serve as well.
    lock: runs take turns.
    """

    resolved: ResolvedPlan
    devices: tuple[torch.device, ...]
    team: Team
    output_device: torch.device
    tensors: dict[str, SplitTensor] = field(default_factory=dict)
    visible: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    hidden: list[nn.Module] = field(default_factory=list)
    peers: list[Mapping[str, nn.Module]] = field(default_factory=list)
    key_of: dict[int, str] = field(default_factory=dict)
    shared: list[SharedLeaf] = field(default_factory=list)
    bindings: list[list[Binding]] = field(default_factory=list)
    buffers: list[BufferWatch] = field(default_factory=list)
    cut_buffers: list[CutBuffer] = field(default_factory=list)
    borders_by_call: list[list[Any]] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    watched: set[str] = field(default_factory=set)
    spare: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()
    has_tail: bool = False
    under_way: Run | None = None
    routes: Routes = field(init=False)
    retired: bool = False
    unmirrored: bool = False
    earlier: list[Graphs] = field(default_factory=list)
    assigned: set[int] = field(default_factory=set)
    by_hand: bool = False
    proven: set[str] = field(default_factory=set)
    replan: Any = None
    again: Callable[[nn.Module, Leaves, Sequence[str], Any], None] | None = None
    pending: Any = None
    before: Any = None
    empty: bool = False
    assembles: bool = False
    training: bool | None = None
    seen_drawing: dict[str, bool] = field(default_factory=dict)
    joined: dict[int, torch.Tensor] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def trees(self) -> list[nn.Module]:
        """Every rank's root module, rank 0's is the visible one."""
        return [self.module(0, ""), *self.hidden]

    def module(self, rank: int, name: str) -> nn.Module:
        """`rank`'s module of that dotted name."""
        if rank:
            return self.peers[rank][name]
        found = self.visible[name]()
        if found is None:
            raise TensorParallelError(f"module {name!r} of this split model is gone: the model was deleted")
        return found

    def whole(self, key: str) -> torch.Tensor:
        """The whole tensor, detached; one and the same during one `joining()`."""
        split = self.tensors[key]
        if self.joined is None:
            return split.whole()
        marker = id(split)
        if marker not in self.joined:
            self.joined[marker] = split.whole()
        return self.joined[marker]

    def whole_gradient(self, key: str) -> torch.Tensor | None:
        return self.tensors[key].whole_gradient()

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within it each whole tensor is joined once, so that tied weights stay one tensor."""
        if self.joined is not None:
            yield
            return
        self.joined = {}
        try:
            yield
        finally:
            self.joined = None

    def prepare(self) -> list[dict[int, torch.Tensor] | None]:
        """What a run needs: parts frozen as the plain-named one is, buffers handed on, copies of the shared leaves."""
        grad = torch.is_grad_enabled()
        if grad:
            for split in self.tensors.values():
                if len(split.pieces) > 1:
                    _follow(split)
        self._hand_buffers_on()
        wanted = [i for i, s in enumerate(self.shared) if not s.one_device or (grad and s.leaf.requires_grad)]
        copies: list[dict[int, torch.Tensor] | None] = [None] * len(self.shared)
        if not wanted:
            return copies
        chosen = [self.shared[i] for i in wanted]
        made = copy_to_ranks([s.leaf for s in chosen], [s.ranks for s in chosen], self.devices, owner=self.team.owner)
        for index, by_rank_copy in zip(wanted, made, strict=True):
            copies[index] = by_rank_copy
        return copies

    @property
    def run(self) -> Run:
        """The run under way; for what ranks do in it."""
        if self.under_way is None:
            raise TensorParallelError("no run of this split model is under way")
        return self.under_way

    @contextmanager
    def running(self) -> Iterator[Run]:
        """Around one run, under the lock: all that is kept for it goes with it."""
        self.under_way = run = Run(self.world_size, self.resolved.cuts)
        try:
            yield run
        finally:
            self.under_way = None
            run.end()

    @contextmanager
    def counting_from(self, rank: int, counts: Sequence[int] = ()) -> Iterator[None]:
        """Calls of modules are counted from `counts` within it, by default from 0, as in a run of its own."""
        counted = self.borders_by_call[rank]
        before = [borders.calls for borders in counted]
        for borders, calls in zip(counted, counts or [0] * len(counted), strict=True):
            borders.calls = calls
        try:
            yield
        finally:
            for borders, calls in zip(counted, before, strict=True):
                borders.calls = calls

    def buffers_exchanged(self) -> bool:
        """Whether a cut buffer was assigned or deleted from outside."""
        return any(
            cut.holders[0].get(cut.name) is not self.tensors[cut.key].pieces[0].tensor for cut in self.cut_buffers
        )

    def records(self, module: nn.Module) -> str:
        """What the model's own hooks on `module` record in this thread now, see Adapter."""
        return next((found for adapter in self.adapters if (found := adapter.records(module))), "")

    def is_training(self) -> bool:
        """Whether any module is in training mode (kept until a mode changes)."""
        if self.training is None:
            found = (reference() for reference in self.visible.values())
            self.training = any(module is not None and module.training for module in found)
        return self.training

    @contextmanager
    def bound(self, rank: int, copies: list[dict[int, torch.Tensor] | None]) -> Iterator[None]:
        """`rank`'s tree with its copies in place."""
        placed: list[Binding] = []
        for borders in self.borders_by_call[rank]:
            borders.calls = 0
        try:
            for binding in self.bindings[rank]:
                made = copies[binding.shared]
                if made is not None:
                    binding.holder[binding.name] = made[rank]
                    placed.append(binding)
            refresh_flat_weights(placed)
            yield
        finally:
            for binding in placed:
                binding.holder[binding.name] = self.shared[binding.shared].leaf
            refresh_flat_weights(placed)

    def _hand_buffers_on(self) -> None:
        for watch in self.buffers:
            buffer = watch.visible.get(watch.name)
            if buffer is None or watch.seen == _mark(buffer):
                continue
            for holder in watch.hidden:
                old = holder.get(watch.name)
                if old is None or old.shape != buffer.shape or old.dtype != buffer.dtype or old.is_inference():
                    device = buffer.device if old is None else old.device
                    holder[watch.name] = buffer.detach().to(device, copy=True)
                else:
                    with torch.no_grad():
                        old.copy_(buffer)

    def forget_buffers(self, visible: Tensors) -> None:
        """Hand this module's buffers on before the next run."""
        for watch in self.buffers:
            if watch.visible is visible:
                watch.seen = None

    def note_buffers(self) -> None:
        """Remember the buffers as the ranks left them."""
        for cut in self.cut_buffers:
            pieces = self.tensors[cut.key].pieces
            if cut.holders[0].get(cut.name) is not pieces[0].tensor:
                self.key_of.pop(id(pieces[0].tensor), None)
                for piece in pieces:
                    left = cut.holders[piece.ranks[0]].get(cut.name)
                    piece.tensor = piece.tensor if left is None else left
                self.key_of[id(pieces[0].tensor)] = cut.key
        for watch in self.buffers:
            buffer = watch.visible.get(watch.name)
            watch.seen = None if buffer is None else _mark(buffer)


def refresh_flat_weights(placed: Sequence[Binding]) -> None:
    """torch's RNNs keep a second list of their weights."""
    for module in {id(b.module): b.module for b in placed if b.module is not None}.values():
        names = module._flat_weights_names
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in names]  # type: ignore[union-attr]


def _mark(buffer: torch.Tensor) -> tuple[int, int]:
    return id(buffer), -1 if buffer.is_inference() else buffer._version


def _follow(split: SplitTensor) -> None:
    wanted = split.pieces[0].tensor.requires_grad
    for piece in split.pieces[1:]:
        if piece.tensor.requires_grad != wanted:
            piece.tensor.requires_grad_(wanted)


class Slot:
    """What one module of one rank's tree knows about the split; kept in its `__dict__`.

    A visible module's slot keeps the split model's data alive; a hidden one's refers to it weakly.  survey: the root's.
    assembled: the parameters that a rank computes with the whole of.  wholes: those that it has now.
    """

    __slots__ = (
        "_owned",
        "_seen",
        "around",
        "assembled",
        "draws",
        "inside",
        "loading",
        "name",
        "outside",
        "own_forward",
        "rank",
        "rank_here",
        "survey",
        "watched",
        "wholes",
    )

    def __init__(self, shards: ModelShards, rank: int, name: str, own_forward: Callable[..., Any]) -> None:
        self._owned = shards if rank == 0 else None
        self._seen = weakref.ref(shards)
        self.rank = rank
        self.name = name
        self.rank_here = shards.team.rank_here
        self.own_forward = own_forward
        self.inside: Any = None
        self.outside: Any = None
        self.around: Any = None
        self.watched = False
        self.draws: Mapping[int, Draw] = {}
        self.loading = False
        self.survey: Survey | None = None
        self.assembled: Mapping[str, SplitTensor] = {}
        self.wholes: dict[Any, torch.Tensor] = {}

    @property
    def shards(self) -> ModelShards:
        shards = self._seen()
        if shards is None:
            raise TensorParallelError(f"module {self.name!r} belonged to a split model that was deleted")
        return shards

    def drawing(self) -> AbstractContextManager[None]:
        """Around the module's own forward on its rank: its random calls are those that the plan knows."""
        return self.shards.run.drawing(self.rank, self.draws)

    def peers(self) -> list[nn.Module]:
        """The same module in the other ranks' trees."""
        return [self.shards.peers[rank][self.name] for rank in range(1, self.shards.world_size)]


def slot_of(module: nn.Module) -> Slot | None:
    """The module's slot, None where it is not part of a split model."""
    return module.__dict__.get("_tp_slot")


def shards_of(model: nn.Module) -> ModelShards:
    """The data of a split model (of any of its modules).

    Raises:
        TensorParallelError: the model is not split, or split over processes.
    """
    slot = slot_of(model)
    if slot is None:
        raise TensorParallelError(f"{type(model).__name__} is not split; split it with tp.tensor_parallel first")
    shards = slot.shards
    if not isinstance(shards, ModelShards):
        raise TensorParallelError(
            f"{type(model).__name__} is one rank's part of a model that is split over processes; its parameters, "
            "gradients and state_dict are this rank's parts, and to work with whole ones there is not there yet"
        )
    return shards


def survey_of(shards: ModelShards) -> Survey | None:
    """The visible tree's survey, None where the model is gone and an inner module of it runs on."""
    root = shards.visible[""]()
    return None if root is None else root.__dict__["_tp_slot"].survey


def plain_name(name: str) -> str:
    """`weight` for `weight@2`."""
    return name.partition(MARK)[0]
