"""Activation checkpointing inside a split model: the k-th checkpoint of every rank is one region of all of them.

A region keeps, of what autograd would save in it, nothing but places. The first of them that backward asks for makes
all ranks run their part again, in their threads, from the inputs and the random state of the forward. The inputs are
saved by an autograd node outside the region, so that whatever stands around it (another region, the caller's own
saved-tensor hooks) treats them as its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import CheckpointError

from tensor_parallel.checkpoint_entry import handled_by
from tensor_parallel.errors import TensorParallelError
from tensor_parallel.shard.memory import explain_if_out_of_memory
from tensor_parallel.shard.shards import ModelShards
from tensor_parallel.shard.transforms import refuse_transforms

Facts = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape, dtype and device of a tensor."""


class _SaveInputs(torch.autograd.Function):
    """Keeps tensors as autograd keeps them: through the saved-tensor hooks in force."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("this node leads nowhere")


@dataclass(slots=True)
class _Part:
    """One rank's part of a region.

    keeper: the node that saved the tensors among the arguments.  inputs: the positional arguments, _KEPT in place of
    each such tensor.  autocast: (device type, on, dtype) and device: the default one, as they were.
    counts: calls of modules before the region.  facts: of each saved tensor.
    found: saved tensors that were recomputed and not taken yet, by place.
    """

    function: Callable[..., Any]
    keeper: Any
    inputs: list[Any]
    kwargs: dict[str, Any]
    autocast: list[tuple[str, bool, torch.dtype]]
    device: Any
    counts: list[int]
    facts: list[Facts] = field(default_factory=list)
    found: dict[int, torch.Tensor] = field(default_factory=dict)

    def arguments(self) -> list[Any]:
        """The region's arguments, cut off from the graph before it."""
        saved = iter(self.keeper.saved_tensors)
        return [_cut_off(next(saved)) if item is _KEPT else item for item in self.inputs]


_KEPT = object()


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass(slots=True, eq=False)
class _Place:
    """What autograd holds in place of a saved tensor."""

    region: Region
    rank: int
    index: int


class Region:
    """One checkpoint of all ranks."""

    def __init__(self, shards: ModelShards, preserve: bool, check: bool) -> None:
        self._shards = shards
        self._check = check
        self._random = random_states(shards.devices) if preserve else None
        self._parts: dict[int, _Part] = {}
        self._backward = -1
        self._lock = threading.RLock()

    @contextmanager
    def saving(
        self, rank: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Around `rank`'s call of the function in the forward."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        anchor = _SaveInputs.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        part = self._parts[rank] = _Part(
            function,
            anchor.grad_fn,
            [_KEPT if isinstance(arg, torch.Tensor) else arg for arg in args],
            kwargs,
            _autocast_state(),
            _default_device(),
            [borders.calls for borders in self._shards.borders_by_call[rank]],
        )

        def keep(tensor: torch.Tensor) -> _Place:
            part.facts.append(_facts(tensor))
            return _Place(self, rank, len(part.facts) - 1)

        in_regions = self._shards.run.in_regions
        with torch.autograd.graph.saved_tensors_hooks(keep, _take):
            in_regions[rank] += 1
            try:
                yield
            finally:
                in_regions[rank] -= 1

    def take(self, rank: int, index: int) -> torch.Tensor:
        """The saved tensor at a place; given once in one backward, so that memory is freed as backward goes.

        Raises:
            CheckpointError: the recomputation saves other tensors than the forward did.
        """
        if self._shards.team.rank_here() is not None:
            raise NotImplementedError(
                "a gradient was taken inside a rank (torch.autograd.grad or backward in the model's own forward) "
                "through a checkpoint, which all ranks recompute together; take it outside, or do not checkpoint there"
            )
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task < 0 or task != self._backward or index not in self._parts[rank].found:
                self._recompute()
                self._backward = task
            return self._parts[rank].found.pop(index)

    def _recompute(self) -> None:
        refuse_transforms("", recomputing=True)
        shards = self._shards
        if shards.retired:
            raise TensorParallelError(
                "backward of a loss that a split model computed, with checkpoints, before it was made whole "
                "(tp.whole_parameters, apply, resize_token_embeddings) or changed: the ranks that would recompute them "
                "have ended; call backward before that, or compute the loss again"
            )
        arguments = [self._parts[rank].arguments() for rank in range(shards.world_size)]
        with torch.enable_grad(), ExitStack() as stack:
            copies: Any = None
            if not shards.team.acts_as_caller():
                stack.enter_context(shards.lock)
                stack.enter_context(shards.running())
                copies = shards.prepare()
            if self._random is not None:
                stack.callback(set_random_states, shards.devices, random_states(shards.devices))
                set_random_states(shards.devices, self._random)

            def work(rank: int) -> dict[int, torch.Tensor]:
                with ExitStack() as bound:
                    if copies is not None:
                        bound.enter_context(shards.bound(rank, copies))
                    return self._again(rank, arguments[rank])

            try:
                found = shards.team.run(work, joint_random=shards.run.draw_layout)
            except Exception as error:
                explain_if_out_of_memory(error, shards, "in a backward")
                raise
        for rank, tensors in enumerate(found):
            self._parts[rank].found = tensors

    def _again(self, rank: int, arguments: list[Any]) -> dict[int, torch.Tensor]:
        """Run `rank`'s part again, in its thread; what it saves, by place."""
        part, shards = self._parts[rank], self._shards
        found: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> None:
            found.append(tensor.detach())

        with ExitStack() as stack:
            stack.enter_context(handled(shards, rank))
            stack.enter_context(shards.counting_from(rank, part.counts))
            for device_type, on, dtype in part.autocast:
                stack.enter_context(torch.autocast(device_type, enabled=on, dtype=dtype))
            if part.device is not None:
                stack.enter_context(DeviceContext(part.device))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, _refuse))
            part.function(*arguments, **part.kwargs)
        facts = [_facts(tensor) for tensor in found]
        if len(facts) != len(part.facts) or (self._check and facts != part.facts):
            raise CheckpointError(_difference(rank, part, facts))
        return dict(enumerate(found))


class _RankHandler:
    """Takes over the checkpoints that a rank's code calls; see checkpoint_entry.Handler."""

    __slots__ = ("_rank", "_shards")
    plainly = False

    def __init__(self, shards: ModelShards, rank: int) -> None:
        self._shards, self._rank = shards, rank

    def applies(self) -> bool:
        return self._shards.team.rank_here() == self._rank

    def again(self, function: Callable[..., Any]) -> None:
        return None

    @contextmanager
    def region(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], preserve: bool, check: bool
    ) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        shards, rank = self._shards, self._rank
        made = Region(shards, preserve, check) if rank == 0 else None
        region: Region = shards.team.groups[rank].broadcast_object(made)
        with region.saving(rank, function, args, kwargs):
            yield


def handled(shards: ModelShards, rank: int) -> AbstractContextManager[None]:
    """Within it, checkpoints that `rank`'s code calls are regions of all ranks."""
    return handled_by(_RankHandler(shards, rank))


def _take(place: _Place) -> torch.Tensor:
    return place.region.take(place.rank, place.index)


def _refuse(_: Any) -> torch.Tensor:
    raise CheckpointError("a gradient was taken inside a recomputation of a checkpoint; take it outside of it")


def _facts(tensor: torch.Tensor) -> Facts:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _difference(rank: int, part: _Part, facts: list[Facts]) -> str:
    name = getattr(part.function, "__qualname__", None) or repr(part.function)
    if len(facts) != len(part.facts):
        what = f"saved {len(facts)} tensors, the forward {len(part.facts)}"
    else:
        index = next(i for i, (a, b) in enumerate(zip(facts, part.facts, strict=True)) if a != b)
        what = f"saved {facts[index]} as its {index}. tensor, the forward {part.facts[index]}"
    return (
        f"the recomputation of the checkpoint around {name} on rank {rank} {what}; what is checkpointed must do the "
        "same both times (switch off caches in it, and do not change the model between forward and backward)"
    )


def _autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in types]


def _default_device() -> torch.device | None:
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    found = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return found[-1] if found else None


def random_states(devices: Sequence[torch.device]) -> list[torch.Tensor]:
    cuda = sorted({device for device in devices if device.type == "cuda"}, key=str)
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]


def set_random_states(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> None:
    cuda = sorted({device for device in devices if device.type == "cuda"}, key=str)
    torch.set_rng_state(states[0])
    for device, state in zip(cuda, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)
