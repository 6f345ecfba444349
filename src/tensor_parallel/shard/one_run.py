"""What is kept for the time of one run of a split model, and goes with it however it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tensor_parallel.comm.draws import Drawn
from tensor_parallel.layout import Cuts
from tensor_parallel.plan import Draw

Counterparts = dict[int, list[Any]]
"""Objects of which each rank has its own, by the id of rank 0's."""


class KnownDraws:
    """The random calls that the plan knows of one module on one rank. calls: how many of the module there were in this
    forward, where they differ."""

    __slots__ = ("_draws", "_in_all", "calls")

    def __init__(self, draws: Iterable[Draw] = ()) -> None:
        self._draws = tuple(draws)
        self._in_all = {draw.index: draw for draw in self._draws if draw.call is None}
        self.calls = 0

    @property
    def by_call(self) -> bool:
        """Whether the module's calls differ."""
        return len(self._in_all) < len(self._draws)

    def of_next_call(self) -> Mapping[int, Draw]:
        """By index, those of the call that begins."""
        if not self.by_call:
            return self._in_all
        number, self.calls = self.calls, self.calls + 1
        return {draw.index: draw for draw in self._draws if draw.call in (None, number)}


class DrawScope:
    """The random calls of one module call on one rank, as far as the plan knows them."""

    __slots__ = ("_count", "_cuts", "_known")

    def __init__(self, known: Mapping[int, Draw], cuts: Cuts) -> None:
        self._known, self._cuts, self._count = known, cuts, 0

    def next(self, function: str) -> Drawn | None:
        """How the tensor of the next call lies; a call that is not the one that the plan knows leaves the count."""
        draw = self._known.get(self._count)
        if draw is None or draw.function != function:
            return None
        self._count += 1
        return None if draw.placement is None else Drawn(draw.placement, self._cuts)


class Run:
    """One run, what user code and recomputations inside it ask for included.

    counterparts: while rank 0 runs user code.  own_call: the module that it was called for, until that module's own
        forward is asked for.
    ends_alone: whether rank 0 does alone what follows the last gather (see tail.py).
    given: by rank, the objects that the root's modules got and gave: the caches among them belong together.
    wholes: by rank, what was assembled (see assembly.py), by address.  slots: of the modules that it was for.
    in_regions: by rank, how many checkpoints are around its code now: their recomputation must go the same way.
    """

    __slots__ = ("_cuts", "_scopes", "counterparts", "ends_alone", "given", "in_regions", "own_call", "slots", "wholes")

    def __init__(self, world_size: int, cuts: Cuts) -> None:
        self._cuts = cuts
        self._scopes: dict[int, DrawScope] = {}
        self.counterparts: Counterparts | None = None
        self.own_call: str | None = None
        self.ends_alone = False
        self.given: list[list[Any]] = [[] for _ in range(world_size)]
        self.in_regions = [0] * world_size
        self.wholes: list[dict[int, Any]] = [{} for _ in range(world_size)]
        self.slots: list[Any] = []

    def end(self) -> None:
        """Let assembled parameters go that were read outside of their modules' own forwards."""
        for slot in self.slots:
            slot.wholes.clear()

    def draw_layout(self, rank: int, function: str) -> Drawn | None:
        """How the tensor of `rank`'s next random call lies; None where the plan does not know."""
        scope = self._scopes.get(rank)
        return None if scope is None else scope.next(function)

    @contextmanager
    def drawing(self, rank: int, known: Mapping[int, Draw]) -> Iterator[None]:
        """Around one call on `rank` of a module with these random calls."""
        outer = self._scopes.get(rank)
        self._scopes[rank] = DrawScope(known, self._cuts)
        try:
            yield
        finally:
            if outer is None:
                del self._scopes[rank]
            else:
                self._scopes[rank] = outer

    @contextmanager
    def showing(self, name: str, same: Iterable[list[Any]]) -> Iterator[Counterparts]:
        """Around user code at the module `name`, on rank 0: objects that belong together are known as such, and the
        module's own forward goes on in the run under way."""
        before = self.counterparts, self.own_call
        found = {**(self.counterparts or {}), **{id(objects[0]): objects for objects in same}}
        self.counterparts, self.own_call = found, name
        try:
            yield found
        finally:
            self.counterparts, self.own_call = before

    def is_own_call(self, name: str) -> bool:
        """Whether the user's code now asks for the forward that it stands at; asked once for each."""
        if self.own_call != name:
            return False
        self.own_call = None
        return True
