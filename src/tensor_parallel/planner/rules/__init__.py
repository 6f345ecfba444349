"""The rules for operators, one file a family, in an immutable registry."""

from types import MappingProxyType

from tensor_parallel.planner.effects import Rules
from tensor_parallel.planner.rules import contractions, mixing, pointwise, views

DEFAULT_RULES = Rules(MappingProxyType({**views.RULES, **pointwise.RULES, **contractions.RULES, **mixing.RULES}))

__all__ = ["DEFAULT_RULES"]
