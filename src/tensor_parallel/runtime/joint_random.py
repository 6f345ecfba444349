"""Random draws that all ranks make together.

A process has one generator a device kind: ranks that draw by themselves race for it, and a replicated tensor would get
another mask on each rank, which makes the model wrong. So in this mode a random call is a meeting: the last rank makes
the calls of all ranks. Where their tensors are the same (replicated), each call starts from the same generator state,
so that all draw what the unsplit model would draw, and the generator moves on once. Where they differ (parts of a split
tensor), the ranks draw one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tensor_parallel.comm.threads import ThreadGroup
from tensor_parallel.errors import CollectiveError

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_FILLING = frozenset(
    getattr(torch.Tensor, name)
    for name in "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split()
) | {torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_}
"""What overwrites its tensor: the values before say nothing about whether it is replicated."""

_DRAWING = _FILLING | frozenset(
    getattr(owner, name)
    for owner, names in (
        (
            torch,
            "rand rand_like randn randn_like randint randint_like randperm bernoulli binomial multinomial "
            "normal poisson dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
            "feature_alpha_dropout feature_alpha_dropout_ native_dropout rrelu rrelu_ lstm gru rnn_tanh rnn_relu",
        ),
        (
            F,
            "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax "
            "scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d_with_indices "
            "fractional_max_pool3d_with_indices",
        ),
        (torch.Tensor, "bernoulli multinomial"),
    )
    for name in names.split()
)

_BY_CHANCE = {F.scaled_dot_product_attention: (4, "dropout_p", 0.0)} | {
    function: (1, "p", 0.5) for function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)
}
"""Where and under which name the chance of dropping is given, and its default: 0 draws nothing."""

_IN_TRAINING = {F.dropout: 2, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2, F.rrelu: 3}
"""Position of `training`, where it decides whether anything is drawn (its name is the same everywhere)."""

_TRAINING_BY_DEFAULT = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.dropout3d})


class JointRandom(TorchFunctionMode):
    """One rank's view; active in its thread for a run."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func not in _DRAWING or not _draws(func, args, given):
            return func(*args, **given)
        return self._group.rendezvous.meet(self._group.rank(), "random draw", _draw_for_all, (func, args, given))


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call takes anything from a generator."""
    if func in _IN_TRAINING:
        training = _argument(args, kwargs, _IN_TRAINING[func], "training", func in _TRAINING_BY_DEFAULT)
        if not training:
            return False
    if func in _BY_CHANCE:
        return bool(_argument(args, kwargs, *_BY_CHANCE[func]))
    return True


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _draw_for_all(calls: list[Call]) -> list[Any]:
    names = [getattr(func, "__name__", str(func)) for func, _, _ in calls]
    if len(set(names)) > 1:
        raise CollectiveError(
            f"the ranks draw random numbers differently: {names}; all must make the same random calls"
        )
    if not _same(calls):
        return [func(*args, **kwargs) for func, args, kwargs in calls]
    generators = _generators(calls)
    states = [generator.get_state() for generator in generators]
    results = []
    for func, args, kwargs in calls:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        results.append(func(*args, **kwargs))
    return results


def _generators(calls: Sequence[Call]) -> list[torch.Generator]:
    """Every generator that the calls may draw from; all ranks' devices of one kind start from the first one's state."""
    found: dict[int, torch.Generator] = {id(torch.default_generator): torch.default_generator}
    for _, args, kwargs in calls:
        for value in _flat((args, kwargs)):
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif isinstance(value, torch.Tensor) and value.is_cuda:
                generator = torch.cuda.default_generators[value.get_device()]
                found[id(generator)] = generator
    return list(found.values())


def _same(calls: Sequence[Call]) -> bool:
    """Whether all ranks ask for the same draw: equal shapes, equal values. Values are compared with room for rounding:
    ranks work out replicated tensors each by themselves."""
    func, args, kwargs = calls[0]
    first = list(_flat((args, kwargs)))
    for _, other_args, other_kwargs in calls[1:]:
        other = list(_flat((other_args, other_kwargs)))
        if len(other) != len(first) or not all(map(_alike, first, other, [func in _FILLING] * len(first))):
            return False
    return True


def _alike(a: Any, b: Any, shape_only: bool) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and (isinstance(a, torch.device | torch.Generator) or bool(a == b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if shape_only or a is b:
        return True
    with torch.no_grad():
        return torch.allclose(a, b.to(a.device), rtol=1e-3, atol=1e-6, equal_nan=True)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield key
            yield from _flat(value[key])
    elif isinstance(value, list | tuple):
        yield len(value)
        for item in value:
            yield from _flat(item)
    else:
        yield value
