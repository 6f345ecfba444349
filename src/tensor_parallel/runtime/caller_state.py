"""What torch keeps per thread, carried from the caller's thread into the ranks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

T = TypeVar("T")

_SMALLEST = 5e-324


@dataclass(frozen=True, slots=True)
class CallerState:
    """The caller's per-thread state at the start of a run.

    autocast: (device type, on, dtype) of each device type of the team.
    streams: the caller's current stream of each CUDA device of the team.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    flushes_denormals: bool
    streams: tuple[torch.cuda.Stream, ...]

    @classmethod
    def capture(cls, device_types: Sequence[str], cuda_devices: Sequence[torch.device]) -> CallerState:
        """Read the calling thread's state. A torch.func transform is no part of it: whoever runs a model refuses it."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in device_types),
            autocast_cache=torch.is_autocast_cache_enabled(),
            function_modes=_function_modes() if torch._C._len_torch_function_stack() else (),
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else (),
            flushes_denormals=_flushes_denormals(),
            streams=tuple(torch.cuda.current_stream(device) for device in cuda_devices),
        )

    def call(self, work: Callable[[int], T], rank: int, device: torch.device) -> T:
        """Run `work(rank)` in this thread under the caller's state, and leave the thread as it was."""
        torch._C._set_grad_enabled(self.grad)
        torch.autocast_increment_nesting()  # else a rank that leaves autocast empties the cache all ranks share
        try:
            if not self._is_plain:
                with ExitStack() as stack:
                    self._enter(stack, device)
                    return work(rank)
            return work(rank)
        finally:
            torch.autocast_decrement_nesting()

    def call_within(self, work: Callable[[int], T], rank: int, device: torch.device) -> T:
        """Run `work(rank)` under this state inside a run that goes on in this thread: modes that are in force stay."""
        before = torch.is_grad_enabled()
        with ExitStack() as stack:
            stack.callback(torch._C._set_grad_enabled, before)
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            torch._C._set_grad_enabled(self.grad)
            if any(
                (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) != (on, d) for t, on, d in self.autocast
            ):
                stack.enter_context(self._autocast())
            known = len(_get_current_dispatch_mode_stack())
            if self.dispatch_modes[known:]:
                stack.enter_context(_pushed_dispatch_modes(self.dispatch_modes[known:]))
            for mode in self.function_modes[torch._C._len_torch_function_stack() :]:
                torch._C._push_on_torch_function_stack(_for_rank(mode, device))
                stack.callback(torch._C._pop_torch_function_stack)
            return work(rank)

    @property
    def _is_plain(self) -> bool:
        return not (
            self.inference
            or self.function_modes
            or self.dispatch_modes
            or self.streams
            or self.flushes_denormals != _flushes_denormals()
            or any(on for _, on, _ in self.autocast)
        )

    def _enter(self, stack: ExitStack, device: torch.device) -> None:
        if self.inference:
            stack.enter_context(torch.inference_mode())
            torch._C._set_grad_enabled(self.grad)
        if self.flushes_denormals != _flushes_denormals():
            torch.set_flush_denormal(self.flushes_denormals)
            stack.callback(torch.set_flush_denormal, not self.flushes_denormals)
        if self.streams:
            for stream in self.streams:
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)
        if any(on for _, on, _ in self.autocast):
            stack.enter_context(self._autocast())
        # Modes are pushed, not entered: they are active already, and entering some (the default device's) writes to
        # state that all threads share.
        if self.dispatch_modes:
            stack.enter_context(_pushed_dispatch_modes(self.dispatch_modes))
        if self.function_modes:
            stack.callback(_pop_function_modes)
            for mode in self.function_modes:
                torch._C._push_on_torch_function_stack(_for_rank(mode, device))

    @contextmanager
    def _autocast(self) -> Any:
        before = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t, _, _ in self.autocast]
        cache = torch.is_autocast_cache_enabled()
        _set_autocast(self.autocast, self.autocast_cache)
        try:
            yield
        finally:
            _set_autocast(before, cache)


def _set_autocast(state: Sequence[tuple[str, bool, torch.dtype]], cache: bool) -> None:
    for device_type, on, dtype in state:
        torch.set_autocast_enabled(device_type, on)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)


@contextmanager
def _pushed_dispatch_modes(modes: Sequence[Any]) -> Any:
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))


def _function_modes() -> tuple[Any, ...]:
    return tuple(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _pop_function_modes() -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()


def _for_rank(mode: Any, device: torch.device) -> Any:
    """A default device of the rank's kind becomes the rank's own: what its code makes lies beside its parameters."""
    if isinstance(mode, DeviceContext) and mode.device.type == device.type:
        return DeviceContext(device)
    return mode


def _flushes_denormals() -> bool:
    return _SMALLEST * 1.0 == 0.0


def forget_casts() -> None:
    """Empty autocast's cache unless the calling thread is inside autocast: as leaving autocast does."""
    if torch.autocast_increment_nesting() == 1:
        torch.clear_autocast_cache()
    torch.autocast_decrement_nesting()
