"""Arithmetic on shapes: factors, segments, placements; local parts and whole tensors."""

from tensor_parallel.layout.dims import (
    RUNTIME,
    Cuts,
    DimLayout,
    Part,
    Ranges,
    Segment,
    compute_range,
    cut_segments,
    holds_nothing,
    local_size,
    runs,
    spread,
)
from tensor_parallel.layout.placement import REPLICATE, Placement, partial, shard
from tensor_parallel.layout.tensors import (
    TensorLayout,
    holders,
    join,
    local_shape,
    put_local,
    regions,
    take,
    take_local,
)

__all__ = [
    "REPLICATE",
    "RUNTIME",
    "Cuts",
    "DimLayout",
    "Part",
    "Placement",
    "Ranges",
    "Segment",
    "TensorLayout",
    "compute_range",
    "cut_segments",
    "holders",
    "holds_nothing",
    "join",
    "local_shape",
    "local_size",
    "partial",
    "put_local",
    "regions",
    "runs",
    "shard",
    "spread",
    "take",
    "take_local",
]
