"""What rules by hand do to tensors, where version 2.0 had it."""

from tensor_parallel.plan.state_actions import (
    LegacyStateAction,
    Scale,
    Split,
    SplitInChunks,
    SplitInGroupedChunks,
    StateAction,
)

__all__ = ["LegacyStateAction", "Scale", "Split", "SplitInChunks", "SplitInGroupedChunks", "StateAction"]
