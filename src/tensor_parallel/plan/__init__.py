"""Plans as frozen data: the nouns, resolving for a world size, JSON, tables."""

from tensor_parallel.plan.check import check_plan
from tensor_parallel.plan.config import Config
from tensor_parallel.plan.plan import (
    Boundary,
    CallSite,
    Draw,
    Factor,
    HandRule,
    LocalSize,
    Lookup,
    ModulePlan,
    Plan,
    TensorPlan,
    Traffic,
)
from tensor_parallel.plan.resolve import ResolvedPlan, bytes_by_rank, resolve

__all__ = [
    "Boundary",
    "CallSite",
    "Config",
    "Draw",
    "Factor",
    "HandRule",
    "LocalSize",
    "Lookup",
    "ModulePlan",
    "Plan",
    "ResolvedPlan",
    "TensorPlan",
    "Traffic",
    "bytes_by_rank",
    "check_plan",
    "resolve",
]
