"""One line splits any PyTorch model over any devices, exactly."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

# The package, a submodule and the function share a name: the submodule is imported first, the function bound after it.
from tensor_parallel.tensor_parallel import TensorParallel  # isort: skip
from tensor_parallel import state_actions
from tensor_parallel.errors import (
    AlreadySplitError,
    CheckpointError,
    CollectiveError,
    DeadlineError,
    DeviceError,
    PlanError,
    RankError,
    SplitError,
    TensorParallelError,
    TraceError,
    VerificationError,
)
from tensor_parallel.factory import Sharded, make_plan, tensor_parallel
from tensor_parallel.plan import Config, Plan
from tensor_parallel.shard import whole_parameters
from tensor_parallel.state import (
    convert_state_dict,
    full_gradients,
    full_state_dict,
    infer_sharded_device_map,
    save_tensor_parallel,
)
from tensor_parallel.state_actions import StateAction
from tensor_parallel.verify import report, verify

if TYPE_CHECKING:
    from tensor_parallel.distributed import make_distributed_shard
    from tensor_parallel.pretrained_model import TensorParallelPreTrainedModel

__all__ = [
    "AlreadySplitError",
    "CheckpointError",
    "CollectiveError",
    "Config",
    "DeadlineError",
    "DeviceError",
    "Plan",
    "PlanError",
    "RankError",
    "Sharded",
    "SplitError",
    "StateAction",
    "TensorParallel",
    "TensorParallelError",
    "TensorParallelPreTrainedModel",
    "TraceError",
    "VerificationError",
    "convert_state_dict",
    "full_gradients",
    "full_state_dict",
    "infer_sharded_device_map",
    "make_distributed_shard",
    "make_plan",
    "report",
    "save_tensor_parallel",
    "state_actions",
    "tensor_parallel",
    "verify",
    "whole_parameters",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet unless the application configures logging

__version__ = "3.0.0.dev0"

_ON_FIRST_USE = {
    "make_distributed_shard": "tensor_parallel.distributed",
    "TensorParallelPreTrainedModel": "tensor_parallel.pretrained_model",
}


def __getattr__(name: str) -> Any:
    """Names whose modules are heavy: found on first use."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
