"""Uses of integers that no record shows (`0.5 * n`, `range(n)`): the forward once more, with other bare numbers.

Functions of torch and comparisons still get the right ones, so the forward runs as before; whatever comes out otherwise
shows that a bare number matters, and a rank that computes with a local one would be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensor_parallel.planner.index_types import leaves
from tensor_parallel.planner.integers import Attribute, Size
from tensor_parallel.planner.records import Trace, Value
from tensor_parallel.planner.select import Candidate, Choice, Taken
from tensor_parallel.planner.sizes import Unsolved

_SCALARS = (bool, int, float, complex, str, torch.dtype, type(None))
REASON = "a size of it is used as a plain number"


def drop_hidden(choice: Choice, trace: Trace) -> None:
    """Take candidates out of the choice whose local integers the code uses in ways that no record shows."""
    bad = _bad(choice.chosen, trace)
    for candidate in bad:
        try:
            assert candidate.solver is not None
            candidate.sizes = candidate.solver.solve(
                candidate.island, candidate.leaf, candidate.partner, set(candidate.sizes.attributes)
            )
            kept = not _bad([candidate], trace)
        except Unsolved:
            kept = False
        if not kept:
            choice.chosen.remove(candidate)
            choice.reasons[candidate.leaf] = REASON
    if bad:
        choice.taken = Taken()
        for candidate in choice.chosen:
            choice.taken.add(candidate)


def _bad(candidates: Sequence[Candidate], trace: Trace) -> list[Candidate]:
    shifted = frozenset(origin for candidate in candidates for origin in _local(candidate))
    if not shifted or trace.again is None or _same(trace, shifted):
        return []
    if len(candidates) == 1:
        return list(candidates)
    half = len(candidates) // 2
    return _bad(candidates[:half], trace) + _bad(candidates[half:], trace)


def _local(candidate: Candidate) -> set[Attribute | Size]:
    """The integers that differ on a rank."""
    island = candidate.island
    found: set[Attribute | Size] = {Attribute(*key) for key in candidate.sizes.attributes}
    for index in island.touched() & set(candidate.graph.trace.sizes):
        value = candidate.graph.trace.sizes[index]
        dims = island.dims.get(index, value.dims)
        found.update(Size(index, i) for i, dim in enumerate(dims) if any(node in island.cut for node in leaves(dim)))
    return found


def _same(trace: Trace, shifted: frozenset[Attribute | Size]) -> bool:
    assert trace.again is not None
    try:
        other = trace.again(shifted)
    except Exception:  # the model's code with a number that it does not expect
        return False
    if [_written(op.args, op.kwargs, op.name) for op in trace.ops] != [
        _written(op.args, op.kwargs, op.name) for op in other.ops
    ]:
        return False
    return len(trace.data) == len(other.data) and all(_equal(a, b) for a, b in zip(trace.data, other.data, strict=True))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.is_meta or a is b or bool(torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()))


def _written(args: Any, kwargs: Any, name: str) -> tuple[Any, ...]:
    """The numbers and names in an operator's arguments."""
    found: list[Any] = [name]

    def walk(item: Any) -> None:
        if isinstance(item, Value):
            found.append(("value", item.index))
        elif isinstance(item, (tuple, list)):
            for part in item:
                walk(part)
        elif isinstance(item, dict):
            for key, part in item.items():
                found.append(key)
                walk(part)
        elif isinstance(item, _SCALARS):
            found.append(repr(item))

    walk((args, kwargs))
    return tuple(found)
