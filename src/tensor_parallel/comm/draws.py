"""Which calls take numbers from a random generator, and how the tensor that they draw for lies on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tensor_parallel.layout import Cuts, Placement


@dataclass(frozen=True, slots=True)
class Drawn:
    """How the tensor of one random call lies on the ranks."""

    placement: Placement
    cuts: Cuts


Layouts = Callable[[int, str], Drawn | None]
"""(rank, name of the function) -> how the tensor of the rank's next random call lies; None where nobody knows. Asked
for every call in `DRAWING`, also for those that draw nothing this time."""

FILLING = frozenset(
    getattr(torch.Tensor, name)
    for name in "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split()
) | {torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_}
"""What overwrites its tensor: the values before say nothing about whether it is replicated."""

DRAWING = FILLING | frozenset(
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

_IN_TRAINING: dict[Any, int] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout), 2),
    F.rrelu: 3,
}
"""Position of `training`, where it decides whether anything is drawn (its name is the same everywhere)."""

_TRAINING_BY_DEFAULT = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.dropout3d})

DRAWING_NAMES = frozenset(getattr(function, "__name__", str(function)) for function in DRAWING)


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call takes anything from a generator."""
    if func in _IN_TRAINING:
        training = argument(args, kwargs, _IN_TRAINING[func], "training", func in _TRAINING_BY_DEFAULT)
        if not training:
            return False
    if func in _BY_CHANCE:
        return bool(argument(args, kwargs, *_BY_CHANCE[func]))
    return True


def argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
