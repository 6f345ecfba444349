"""How a tensor lies over the ranks: the values `Replicate`, `Shard` and `Partial` of torch.distributed.tensor, said
with this library's dims, so that uneven and packed shards have a name and nothing of torch.distributed is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tensor_parallel.layout.dims import DimLayout

Kind = Literal["replicate", "shard", "partial"]


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor's placement.

    kind: "replicate": every rank has the whole; "shard": each rank has its part of `dims`; "partial": the whole is the
        sum of what the ranks have.
    dims: for "shard": (dim counted from the end, its layout) of each dim that is cut.
    factors: for "partial": the factors whose units were summed, each rank its own.
    """

    kind: Kind = "replicate"
    dims: tuple[tuple[int, DimLayout], ...] = ()
    factors: tuple[str, ...] = ()

    @property
    def cut_by(self) -> tuple[str, ...]:
        """The factors that decide which ranks take part."""
        if self.kind == "partial":
            return self.factors
        return tuple(dict.fromkeys(f for _, dim in self.dims for f in dim.factors))


REPLICATE = Placement()


def shard(dim: int, layout: DimLayout) -> Placement:
    """A tensor cut along `dim` (negative: counted from the end)."""
    return Placement("shard", ((dim, layout),))


def partial(*factors: str) -> Placement:
    """A pending sum over the ranks' units of `factors`."""
    return Placement("partial", (), factors)
