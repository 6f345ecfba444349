"""Run a module's forward once and write down every operator, function call and module call.

Two modes see the forward: a function mode (what Python code calls, with the integers it passes) and, below it, a
dispatch mode (the operators that run). Values are real for small models; for large ones parameters and what they touch
are on the meta device, while ids, masks and freshly made tensors stay real, since masking code looks at values.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensor_parallel.checkpoint_entry import Plainly, handled_by
from tensor_parallel.errors import TraceError
from tensor_parallel.plan import source
from tensor_parallel.planner.attributes import OWN, tracked_attributes
from tensor_parallel.planner.integers import Attribute, IntegerRecorder, Size, TrackedInt, number
from tensor_parallel.planner.reads import TrackedFloat, noted_reads
from tensor_parallel.planner.recorder import Recorder
from tensor_parallel.planner.records import (
    FunctionCall,
    IntegerArgument,
    ModuleCall,
    Trace,
    replaced,
    tensors,
)
from tensor_parallel.planner.restored import restored

REAL_BYTES = 256 * 2**20
"""Models up to this size are traced with real values; only larger ones on meta."""

WHOLE = {
    torch._C._nn.linear: "linear",
    torch.matmul: "matmul",
    torch.Tensor.matmul: "matmul",
    torch.Tensor.__matmul__: "matmul",
    torch._C._nn.scaled_dot_product_attention: "scaled_dot_product_attention",
    torch.rms_norm: "rms_norm",
    nn.functional.rms_norm: "rms_norm",
    torch.dropout: "dropout",
    nn.functional.dropout: "dropout",
    nn.functional.multi_head_attention_forward: "multi_head_attention_forward",
}
"""Functions recorded as one operator, not as what they decompose into."""

OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase, nn.RNNCellBase)
"""Modules with fused paths that read their children's weights themselves."""

_SIZE_READS = (torch.Tensor.shape.__get__, torch.Tensor.size)  # type: ignore[attr-defined]
_COUNTS = (torch.Tensor.numel, torch.Tensor.nelement, torch.numel)
_READS = {
    torch.Tensor.__len__: "len",
    **dict.fromkeys((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__), "read"),
}
"""Functions that hand values or sizes to Python without any operator."""

_DEVICE_READ = torch.Tensor.device.__get__


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, state: Recorder, meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self.meta = meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        run_args, run_kwargs = args, kwargs
        if self.meta:
            run_args, run_kwargs = _on_meta(func, args, kwargs)
        if func._schema.is_mutable:
            for _, tensor in tensors((args, kwargs)):
                self.state.before_write(tensor)
        outputs = func(*run_args, **run_kwargs)
        if not self.state.silent:
            self.state.record(str(func), args, kwargs, outputs, func)
            self.state.flush()
        return outputs


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    inputs = [t for _, t in tensors((args, kwargs))]
    if any(t.is_meta for t in inputs):
        moved: Callable[[torch.Tensor], torch.Tensor] = lambda t: t if t.is_meta else t.to("meta")  # noqa: E731
        written = func._schema.arguments[0].alias_info is not None and func._schema.arguments[0].alias_info.is_write
        if written and not inputs[0].is_meta:
            raise TraceError(f"{func} writes a value that depends on parameters into a tensor with real values")
        args, kwargs = replaced(args, moved), replaced(kwargs, moved)
        kwargs.pop("device", None)
    elif torch.device(kwargs.get("device") or "cpu").type == "meta":
        kwargs["device"] = torch.device("cpu")
    return args, kwargs


class _Functions(TorchFunctionMode):
    def __init__(self, state: Recorder) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        state = self.state
        if state.silent:
            return func(*args, **kwargs)
        if func in _SIZE_READS:
            return self._size(func, args, kwargs)
        if func is _DEVICE_READ and args[0].is_meta and id(args[0]) in state.known:
            return torch.device("cpu")
        if func in _COUNTS:
            return math.prod(self._sizes(args[0], args[0].shape))
        for _, tensor in tensors((args, kwargs)):
            state.check_origin(tensor)
        if func in _READS:
            state.record(_READS[func], args[:1], {}, None)
        call = self._call(func, args, kwargs, sys._getframe(1))
        args, kwargs = _untracked(args), _untracked(kwargs)
        args = _plain_slices(args)
        outer, state.function_call = state.function_call, call.index
        try:
            if func in WHOLE:
                state.silent += 1
                try:
                    outputs = func(*args, **kwargs)
                finally:
                    state.silent -= 1
                state.record(WHOLE[func], args, kwargs, outputs)
            else:
                outputs = func(*args, **kwargs)
        finally:
            state.function_call = outer
        call.outputs = replaced(outputs, state.value)
        return outputs

    def _size(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _untracked(args), _untracked(kwargs)
        result = func(*args, **kwargs)
        sizes = self._sizes(args[0], args[0].shape)
        if isinstance(result, int):
            return sizes[int(kwargs.get("dim", args[1] if len(args) > 1 else 0))]
        return torch.Size(sizes)

    def _sizes(self, tensor: torch.Tensor, shape: Sequence[int]) -> list[int]:
        value = self.state.value(tensor)
        self.state.trace.sizes[value.index] = value
        recorder = self.state.trace.recorder
        return [recorder.tracked(n, Size(value.index, dim)) for dim, n in enumerate(shape)]

    def _call(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> FunctionCall:
        state = self.state
        name = getattr(func, "__name__", str(func))
        call = FunctionCall(len(state.trace.function_calls), name, (), {}, state.stack[-1])
        state.trace.function_calls.append(call)
        recorder = state.trace.recorder
        named = (i for k, v in kwargs.items() for i in _integers(v, (k,), recorder))
        call.integers = [*_integers(args, (), recorder), *named]
        call.args = _untracked(replaced(args, state.value))
        call.kwargs = _untracked(replaced(kwargs, state.value))
        call.args = _plain_slices(call.args)
        call.at = len(state.trace.ops)
        call.is_method = getattr(torch.Tensor, name, None) is func
        if call.integers:
            _locate(call, frame, state)
        return call


def _untracked(tree: Any) -> Any:
    """The numbers that tracked ones stand for, in containers too."""
    return replaced(tree, lambda n: number(n) if isinstance(n, int) else float.__float__(n), (TrackedInt, TrackedFloat))


def _plain_slices(tree: Any) -> Any:
    def plain(piece: slice) -> slice:
        return slice(*(number(x) if isinstance(x, TrackedInt) else x for x in (piece.start, piece.stop, piece.step)))

    return replaced(tree, plain, slice)


def _integers(tree: Any, path: tuple[int | str, ...], recorder: IntegerRecorder) -> Iterator[IntegerArgument]:
    if isinstance(tree, TrackedInt):
        yield IntegerArgument(path, number(tree), tree.expression if tree.recorder is recorder else None)
    elif isinstance(tree, int) and not isinstance(tree, bool):
        yield IntegerArgument(path, tree, None)
    elif isinstance(tree, slice):
        for name in ("start", "stop", "step"):
            yield from _integers(getattr(tree, name), (*path, name), recorder)
    elif isinstance(tree, (tuple, list)):
        for key, item in enumerate(tree):
            yield from _integers(item, (*path, key), recorder)


def _locate(call: FunctionCall, frame: FrameType, state: Recorder) -> None:
    """Which method of which module the call stands in, for a call-site override."""
    method = source.method_frame(frame)
    owner = method.f_locals.get(method.f_code.co_varnames[0]) if method.f_code.co_argcount else None
    if isinstance(owner, nn.Module) and id(owner) in state.names:
        call.owner = state.names[id(owner)]
        call.method = source.method_of(frame, type(owner)) or ""
        call.position = source.call_position(frame)


def _wrapped_forward(state: Recorder, module: nn.Module, name: str) -> Callable[..., Any]:
    forward = module.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if state.silent:
            return forward(*args, **kwargs)
        trace = state.trace
        number = state.counts.get(name, 0)
        state.counts[name] = number + 1
        parent = state.stack[-1] if state.stack else None
        call = ModuleCall(len(trace.module_calls), name, number, parent, state.number)
        trace.module_calls.append(call)
        with torch._C.DisableTorchFunction():
            call.inputs = {p: state.value(t) for p, t in _named_inputs(signature, args, kwargs)}
        call.first_op = len(trace.ops)
        entered = {id(t) for _, t in tensors((args, kwargs))}
        before = _left_behind(module)
        state.stack.append(call.index)
        outer, trace.recorder.module = trace.recorder.module, name
        try:
            if isinstance(module, OPAQUE):
                outputs = _opaque(state, module, name, forward, args, kwargs)
            else:
                outputs = forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                for _, tensor in tensors(outputs):
                    state.check_origin(tensor)
                outputs = replaced(outputs, lambda t: _alias(state, t) if id(t) in entered else t)
                call.outputs = {p: state.value(t) for p, t in tensors(outputs)}
                _keep(state, module, before)
        finally:
            state.stack.pop()
            trace.recorder.module = outer
        call.last_op = len(trace.ops)
        return outputs

    return traced


def _left_behind(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors in buffers and plain attributes of the module, by path."""
    found = {path: tensor for path, tensor in module._buffers.items() if tensor is not None}
    for name, value in module.__dict__.items():
        if name not in OWN:
            found.update(tensors(value, path=f"{name}."))
    return found


def _keep(state: Recorder, module: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """What the forward leaves in the module must lie as the next one, and the user, will take it."""
    for path, tensor in _left_behind(module).items():
        if before.get(path) is not tensor and id(tensor) in state.known:
            old = state.kept.get(id(before.get(path)))
            state.keep(*([old] if old is not None else []), state.value(tensor))


def _alias(state: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    """A module that hands on its input: the output becomes a tensor of its own, so that the two can lie differently."""
    with torch.no_grad() if not tensor.requires_grad else contextlib.nullcontext():
        state.silent += 1
        try:
            output = tensor.view_as(tensor)
        finally:
            state.silent -= 1
    state.record("aten.alias.default", (tensor,), {}, output)
    return output


def _opaque(state: Recorder, module: nn.Module, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
    state.silent += 1
    try:
        with torch._C.DisableTorchFunction():
            outputs = forward(*args, **kwargs)
    finally:
        state.silent -= 1
    for _, tensor in module.named_parameters():
        value = state.known.get(id(tensor))
        if value is not None and value.parameter is not None:
            state.trace.opaque[value.parameter] = f"{type(module).__name__} {name!r} has fused paths of its own"
    state.record(f"module {type(module).__name__}", (args, tuple(module.parameters())), kwargs, outputs)
    return outputs


def _named_inputs(signature: inspect.Signature, args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    bound = signature.bind_partial(*args, **kwargs)
    for key, item in bound.arguments.items():
        kind = signature.parameters[key].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            yield from tensors(item)
        else:
            yield from tensors(item, path=key)


@contextlib.contextmanager
def _instrumented(state: Recorder, names: Mapping[str, nn.Module]) -> Iterator[None]:
    wrapped = []
    try:
        for name, module in names.items():
            if "forward" in module.__dict__:
                continue
            object.__setattr__(module, "forward", _wrapped_forward(state, module, name))
            wrapped.append(module)
        yield
    finally:
        for module in wrapped:
            module.__dict__.pop("forward", None)


@contextlib.contextmanager
def _meta_parameters(module: nn.Module) -> Iterator[None]:
    """Parameters and parameter-like buffers replaced by meta ones of the same identity relations."""
    swapped: dict[int, nn.Parameter] = {}
    undo = []
    try:
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    twin = swapped.get(id(parameter))
                    if twin is None:
                        data = torch.empty_like(parameter, device="meta")
                        twin = swapped[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
                    undo.append((part, key, parameter))
                    part._parameters[key] = twin
        yield
    finally:
        for part, key, parameter in undo:
            part._parameters[key] = parameter


def parameter_names(module: nn.Module) -> dict[str, tuple[torch.Tensor, tuple[str, ...], bool]]:
    """key -> (tensor, all its names, is a buffer) of every parameter and buffer, in the model's order."""
    found: dict[int, tuple[torch.Tensor, list[str], bool]] = {}
    for is_buffer, named in ((False, module.named_parameters), (True, module.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), (tensor, [], is_buffer))[1].append(name)
    return {names[0]: (tensor, tuple(names), is_buffer) for tensor, names, is_buffer in found.values()}


def trace(module: nn.Module, examples: Sequence[Mapping[str, Any] | tuple[Any, ...]]) -> Trace:
    """Trace the module's forward with each of the example inputs (a dict of keywords or a tuple of arguments).

    Raises:
        TraceError: the forward refuses the inputs, or can be traced neither with real values nor on meta.
    """
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    on_meta = any(p.is_meta for p in module.parameters())
    ways = [True] if on_meta else [False] if nbytes <= REAL_BYTES else [True, False]
    for way in ways:
        try:
            found = _trace(module, examples, way)
            found.again = functools.partial(_trace, module, examples, way)
            return found
        except Exception as error:
            if way is not ways[-1]:
                continue
            raise TraceError(
                f"{type(module).__name__}.forward cannot be traced with example_inputs "
                f"{_described(examples)}: {type(error).__name__}: {error}. Give example_inputs that the forward takes: "
                f"a dict of keywords or a tuple of arguments, or a list of them"
            ) from error
    raise AssertionError("unreachable")


def _described(examples: Sequence[Any]) -> str:
    def described(item: Any) -> str:
        if isinstance(item, torch.Tensor):
            return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        if isinstance(item, Mapping):
            return "{" + _some([f"{k}: {described(v)}" for k, v in item.items()]) + "}"
        if isinstance(item, (tuple, list)):
            return "(" + _some([described(v) for v in item]) + ")"
        if hasattr(item, "__array__"):
            facts = f"{getattr(item, 'dtype', '?')}{list(getattr(item, 'shape', []))}"
            return f"{type(item).__name__} of {facts} (no tensor: torch.from_numpy makes it one)"
        return textwrap.shorten(repr(item), 80)

    return "; ".join(described(e) for e in examples)


def _some(texts: Sequence[str], most: int = 8) -> str:
    more = [f"... {len(texts)} items"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more])


def _trace(
    module: nn.Module, examples: Sequence[Any], meta: bool, shifted: frozenset[Attribute | Size] = frozenset()
) -> Trace:
    result = Trace()
    result.recorder.shifted = shifted
    modules = dict(module.named_modules())
    names = {id(m): n for n, m in modules.items()}
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored(module))
        if meta:
            stack.enter_context(_meta_parameters(module))
        stack.enter_context(tracked_attributes(module, result.recorder))
        stack.enter_context(noted_reads(module, result.reads))
        keys = parameter_names(module)
        result.opaque.update(_held_elsewhere(module, keys))
        for example in examples:
            state = Recorder(result, module, names)
            for key, (tensor, _, is_buffer) in keys.items():
                state.add_parameter(key, tensor, is_buffer)
            _run(state, module, modules, _moved(example, device), meta)
            described = example if isinstance(example, Mapping) else {str(i): 1 for i in range(len(example))}
            result.paths.append(f"{', '.join(described)}; {'train' if module.training else 'eval'}")
    return result


def _moved(example: Any, device: torch.device) -> Any:
    example = dict(example) if isinstance(example, Mapping) else tuple(example)
    return replaced(example, lambda t: t.detach().to(device).clone())  # a forward may write into its inputs


def _held_elsewhere(module: nn.Module, keys: Mapping[str, Any]) -> dict[str, str]:
    """Parameters that modules reach other than by name: each rank's own could not be put there."""
    by_id = {id(tensor): key for key, (tensor, _, _) in keys.items()}
    found = {}
    for name, part in module.named_modules():
        for attribute, value in part.__dict__.items():
            if attribute in OWN:
                continue
            held = [tensor for _, tensor in tensors(value)]
            for cell in getattr(value, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    content = cell.cell_contents
                    inside = content.parameters() if isinstance(content, nn.Module) else tensors(content)
                    held += [item if isinstance(item, torch.Tensor) else item[1] for item in inside]
            for tensor in held:
                if id(tensor) in by_id:
                    found[by_id[id(tensor)]] = f"{name or type(part).__name__} holds it in {attribute!r}"
    return found


@contextlib.contextmanager
def _modes(state: Recorder, meta: bool) -> Iterator[None]:
    with torch.enable_grad(), _Operators(state, meta), _Functions(state):
        yield


def _run(state: Recorder, module: nn.Module, modules: Mapping[str, nn.Module], example: Any, meta: bool) -> None:
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    try:
        with _instrumented(state, modules), _modes(state, meta), handled_by(Plainly()):
            module(*args, **kwargs)
    finally:
        state.restore()
