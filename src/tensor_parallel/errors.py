"""The errors of this library.

    TensorParallelError
    ├── PlanError            a plan cannot be made, read, resolved or does not fit the model
    │   └── TraceError       the model's forward cannot be traced with the inputs at hand
    ├── SplitError           applying a plan failed; the message says whether the module is used up
    ├── DeviceError          a device is unknown, missing, mixed, or outside the set (also a ValueError)
    ├── AlreadySplitError    the module given is split already (also a ValueError)
    ├── CheckpointError      a state dict or file does not fit the model
    ├── CollectiveError      ranks called different collectives, or with tensors that do not fit together
    ├── RankError            a rank was released because another rank failed
    │   └── DeadlineError    a rank waited longer than its group's deadline (also a TimeoutError)
    └── VerificationError    a split model does not equal its reference

A message names what, where (parameter or module), what was given, what is required, and the cure.
"""


class TensorParallelError(Exception):
    """Base of every error that this library raises by itself."""


class PlanError(TensorParallelError):
    """A plan cannot be made, read or resolved, or does not fit the model."""


class TraceError(PlanError):
    """The model's forward cannot be traced with the inputs at hand."""


class SplitError(TensorParallelError):
    """Applying a plan failed; the message says whether the module is used up."""


class DeviceError(TensorParallelError, ValueError):
    """A device is unknown, missing, mixed with another kind, or outside the set."""


class AlreadySplitError(TensorParallelError, ValueError):
    """The module given is split already."""


class CheckpointError(TensorParallelError):
    """A state dict or file does not fit the model."""


class CollectiveError(TensorParallelError):
    """Ranks called different collectives, or with tensors that do not fit together."""


class RankError(TensorParallelError):
    """A rank was released because another rank failed; `__cause__` is that rank's error."""


class DeadlineError(RankError, TimeoutError):
    """A rank waited for the others longer than its group's deadline."""


class VerificationError(TensorParallelError):
    """A split model does not equal its reference."""
