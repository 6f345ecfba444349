"""What a comparison found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from rich.console import RenderableType
from rich.table import Table

from tensor_parallel.plan.table import render
from tensor_parallel.verify.values import difference


@dataclass(frozen=True)
class Check:
    """One thing compared.

    what: "output", "gradient", "input gradient", "gradient norm", "state" (what `state_dict` gives), "step"
        (the same after the optimiser steps) or "tokens".
    name: path in the output, name of the parameter, or which input.
    difference: largest difference relative to the largest value expected.
    """

    what: str
    name: str
    difference: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def ratio(self) -> float:
        """How much of the tolerance the difference takes."""
        return self.difference / self.tolerance if self.tolerance else (0.0 if self.difference == 0 else float("inf"))


@dataclass(frozen=True)
class Verification:
    """What `verify` found; true where everything passed.

    where: where something differs, a line about the first module whose output does.
    """

    checks: tuple[Check, ...]
    where: str = ""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def worst_check(self) -> Check:
        """The one that takes most of its tolerance."""
        return max(self.checks, key=lambda check: check.ratio)

    @property
    def worst(self) -> tuple[str, float]:
        """Name and relative difference of the worst case."""
        worst = self.worst_check
        return f"{worst.what} {worst.name}", worst.difference

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def __bool__(self) -> bool:
        return self.passed

    def __rich__(self) -> RenderableType:
        verdict = "equal to the reference" if self.passed else f"DIFFERS from the reference in {len(self.failures)}"
        caption = self.where or None
        table = Table(title=f"{verdict}: {len(self.checks)} comparisons", title_justify="left", caption=caption)
        for column in ("compared", "how many", "failed", "worst", "difference", "tolerance", "note"):
            table.add_column(column, overflow="fold")
        for what in dict.fromkeys(check.what for check in self.checks):
            group = [check for check in self.checks if check.what == what]
            worst = max(group, key=lambda check: check.ratio)
            failed = sum(not check.passed for check in group)
            numbers = (f"{worst.difference:.1e}", f"{worst.tolerance:.1e}")
            table.add_row(what, str(len(group)), str(failed), worst.name, *numbers, worst.note)
        return table

    def __str__(self) -> str:
        return render(self)


def describe(check: Check) -> str:
    """One line about one check."""
    note = f" ({check.note})" if check.note else ""
    return f"{check.what} {check.name}: {check.difference:.2e}, at most {check.tolerance:.1e} allowed{note}"


def compare_tensors(
    what: str,
    given: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    tolerance: float,
    floor: float = 0.0,
) -> list[Check]:
    """One check a name, in the order of `expected`; a name that only one side has is a difference without bound."""
    checks = []
    for name in [*expected, *(n for n in given if n not in expected)]:
        if name not in given or name not in expected:
            note = f"only the {'reference' if name in expected else 'split model'} has it"
            checks.append(Check(what, name, float("inf"), tolerance, note))
            continue
        mine, theirs = given[name], expected[name]
        note = ""
        if mine is not None and theirs is not None and mine.shape != theirs.shape:
            note = f"shape {tuple(mine.shape)}, required {tuple(theirs.shape)}"
        elif (mine is None) != (theirs is None):
            note = "the split model has no gradient" if mine is None else "the reference has no gradient"
        checks.append(Check(what, name, difference(mine, theirs, floor), tolerance, note))
    return checks


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest absolute value of all."""
    sizes = [float(t.abs().max()) for t in tensors if t is not None and t.numel()]
    return max((size for size in sizes if size < float("inf")), default=0.0)
