"""What a rank does with its group, be it a thread or a process: forwards here, backward by whoever runs it."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tensor_parallel.comm import Group
from tensor_parallel.layout import DimLayout, Part, Placement, Segment, local_shape, shard
from tensor_parallel.layout.tensors import TensorLayout

RANKS = 3
Found = tuple[list[Tensor], list[Tensor]]
"""(leaves, outputs) of one rank."""

UNEVEN = {"f": ((0, 2), (2, 3), (3, 4)), "g": ((0, 1), (0, 1), (1, 2))}
EMPTY = {"f": ((0, 2), (2, 2), (2, 4)), "g": ((0, 2), (0, 2), (0, 2))}
HEADS = DimLayout((Segment((Part(4, "f"), Part(2))),))
PACKED = DimLayout((Segment((Part(4, "f"),)), Segment((Part(3),)), Segment((Part(2, "f"), Part(2, "g")))))
KV = DimLayout((Segment((Part(2, "g"), Part(3))),))


def leaf(group: Group, *shape: int, same: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(5 if same else group.rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def sums(group: Group) -> Found:
    x = leaf(group, 3, 4)
    first = group.all_reduce(x * x)
    second = group.all_reduce(first * (group.rank() + 1), contributes=group.rank() != 1)
    return [x], [second.sin()]


def withheld(group: Group) -> Found:
    """What lies before is another collective, which all ranks have to reach in backward."""
    x = leaf(group, 2, 3)
    whole = group.all_reduce(x.exp())
    mine = whole * 2 if group.rank() == 1 else group.withheld(whole)
    return [x], [group.all_reduce(mine).square()]


def _gather(group: Group, placement: Placement, cuts, *rest: int) -> Found:
    ((_, layout),) = placement.dims
    x = leaf(group, *rest, *local_shape(TensorLayout((layout,)), cuts, group.rank()))
    if any(a < b for a, b in [cuts[layout.factors[0]][group.rank()]]) and layout is KV:
        x = leaf(group, *rest, 3, same=group.rank() < 2)
    return [x], [group.all_gather(x * 1, placement, cuts) * (group.rank() + 1)]


def heads(group: Group) -> Found:
    return _gather(group, shard(-1, HEADS), UNEVEN, 2)


def stand_in(group: Group) -> Found:
    return _gather(group, shard(-1, HEADS), EMPTY, 2)


def repeated(group: Group) -> Found:
    return _gather(group, shard(-1, KV), UNEVEN, 2)


def of_some(group: Group) -> Found:
    """Two ranks hold one and the same, the third its own."""
    x = leaf(group, 2, 3, same=group.rank() != 1)
    shared = group.broadcast(x * 1, [[0, 2], [1]])
    return [x], [shared * (group.rank() + 1)]


def of_all(group: Group) -> Found:
    x = leaf(group, 2, 3, same=True)
    return [x], [group.broadcast(x * 1).square() * (group.rank() + 1)]


def handed_out(group: Group) -> Found:
    x = leaf(group, 2, 3)
    given = group.broadcast_tensors([x * 2, (x * 3).detach()] if group.rank() == 0 else [])
    return [x], [given[0] * (group.rank() + 1) + given[1]]


def assembled(group: Group) -> Found:
    x = leaf(group, 4 - group.rank())
    return [x], [group.assemble(x * 1, (3, 3)).square() * (group.rank() + 1)]


def of_a_subgroup(group: Group) -> Found:
    x = leaf(group, 2)
    inner = group.subgroup([2, 0])
    if inner is None:
        return [x], [x.square()]
    return [x], [inner.all_reduce(x * (inner.rank() + 1))]


def half(group: Group) -> Found:
    """Sums of three are rounded once."""
    x = leaf(group, 300).detach().bfloat16().requires_grad_()
    return [x], [group.all_reduce(x * 1).double()]


def words(group: Group) -> Found:
    assert all(callable(getattr(group, name)) for name in vars(Group) if not name.startswith("_"))
    said = group.broadcast_object({"from": group.rank()}, source=2)
    group.barrier()
    group.release()
    return [], [torch.tensor(float(said["from"]))]


WORK: dict[str, Callable[[Group], Found]] = {
    work.__name__: work
    for work in (
        *(sums, withheld, heads, stand_in, repeated, of_some, of_all),
        *(handed_out, assembled, of_a_subgroup, half, words),
    )
}


def backward(outputs: list[Tensor]) -> None:
    total = sum((output.sum() for output in outputs if output.requires_grad), torch.zeros((), dtype=torch.float64))
    if total.requires_grad:
        total.backward()


def findings(found: Found) -> dict[str, list[Tensor]]:
    leaves, outputs = found
    return {
        "outputs": [output.detach() for output in outputs],
        "gradients": [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves],
    }


def main(rank: int, folder: str) -> None:
    from tensor_parallel.comm.process import ProcessGroup

    torch.set_num_threads(1)
    store, timeout = f"file://{Path(folder) / 'store'}", datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", store, world_size=RANKS, rank=rank, timeout=timeout)
    group, found = ProcessGroup(None, torch.device("cpu")), {}
    try:
        for name, work in WORK.items():
            result = work(group)
            backward(result[1])
            found[name] = findings(result)
    except BaseException:
        found["failed"] = traceback.format_exc()
    torch.save(found, Path(folder) / f"rank{rank}")
    os._exit(0)  # its threads may wait for another rank


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
