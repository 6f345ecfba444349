"""Integers that remember where they came from, for the trace: attributes, config fields and tensor sizes, through
arithmetic. What becomes of them tells which of them may take a rank's own value.

Not seen, since Python asks the left operand or the bare number only: `0.5 * n`, `1.0 / n`, `2.0 > n`, `math.log(n)`,
`range(n)`, indexing, and whatever C code does with an int. Whether there are such uses shows a trace with other bare
numbers (`IntegerRecorder.shifted`).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

# --- where an integer came from ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal, or an integer that nobody tracks."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A plain attribute of a module ("num_heads") or of an object that it holds ("config.num_attention_heads").

    module: dotted name, "" the root.
    """

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}".lstrip(".")


@dataclass(frozen=True, slots=True)
class Size:
    """Size of dim `dim` of the traced tensor with number `tensor`."""

    tensor: int
    dim: int

    def __str__(self) -> str:
        return f"tensor{self.tensor}.shape[{self.dim}]"


@dataclass(frozen=True, slots=True)
class Operation:
    """op: "+", "-", "*", "//", "%", "pow" of two arguments, "neg", "abs" of one."""

    op: str
    arguments: tuple[Expression, ...]

    def __str__(self) -> str:
        if len(self.arguments) == 2 and self.op != "pow":
            return f"({self.arguments[0]} {self.op} {self.arguments[1]})"
        return f"{self.op}({', '.join(map(str, self.arguments))})"


Expression = Constant | Attribute | Size | Operation

_OPERATIONS: dict[str, Callable[..., int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": operator.abs,
}


def evaluate(expression: Expression, lookup: Callable[[Attribute | Size], int]) -> int:
    """The expression's value, its attributes and sizes being `lookup`'s.

    Raises:
        ZeroDivisionError: as the arithmetic does.
    """
    match expression:
        case Constant(value):
            return value
        case Operation(op, arguments):
            return _OPERATIONS[op](*(evaluate(argument, lookup) for argument in arguments))
        case _:
            return lookup(expression)


def leaves(expression: Expression) -> Iterator[Attribute | Size]:
    """Every attribute and size in the expression, in order, as often as it stands there."""
    if isinstance(expression, Operation):
        for argument in expression.arguments:
            yield from leaves(argument)
    elif not isinstance(expression, Constant):
        yield expression


# --- what became of it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Escape:
    """An integer that became something untracked: a float, a plain int, bits.

    how: "/", "float()", "int()", "pow", "* float" and so on.  module: whose forward was running.
    """

    expression: Expression
    how: str
    module: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`left op right` was `result`; `bool(left)` is `left != 0`."""

    op: Literal["==", "!=", "<", "<=", ">", ">="]
    left: Expression
    right: Expression
    result: bool
    module: str
    file: str
    line: int


@dataclass
class IntegerRecorder:
    """Collects what becomes of tracked integers.

    module: dotted name of the module whose forward is running, set by the tracer.
    recording: off while the tracer itself looks at integers.
    shifted: integers that are too large by SHIFT wherever the bare number is used; what goes through here is put right.
    """

    module: str = ""
    recording: bool = True
    escapes: list[Escape] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    shifted: frozenset[Attribute | Size] = frozenset()
    originals: dict[Attribute | Size, int] = field(default_factory=dict)

    def tracked(self, value: int, origin: Attribute | Size) -> TrackedInt:
        """An attribute or a size."""
        if self.shifted:
            self.originals[origin] = value
        return TrackedInt(value + SHIFT if origin in self.shifted else value, origin, self)

    def escape(self, expression: Expression, how: str) -> None:
        if self.recording:
            self.escapes.append(Escape(expression, how, self.module, *_caller()))

    def compare(
        self,
        op: Literal["==", "!=", "<", "<=", ">", ">="],
        left: Expression,
        right: Expression,
        result: bool,
    ) -> None:
        if self.recording:
            self.comparisons.append(Comparison(op, left, right, result, self.module, *_caller()))


def _caller() -> tuple[str, int]:
    """File and line of the code that did something with an integer."""
    frame = sys._getframe(2)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# --- the integer itself --------------------------------------------------------------------------------------------

DEEPEST = 100
"""Operations on top of each other that are followed: a count kept up by a loop over positions is none of our sizes."""


SHIFT = 1


def number(value: int) -> int:
    """The plain number that a tracked integer stands for."""
    if isinstance(value, TrackedInt) and value.recorder.shifted:
        return evaluate(value.expression, value.recorder.originals.__getitem__)
    return int.__int__(value)


def expression_of(value: int, recorder: IntegerRecorder | None = None) -> Expression:
    """Where `value` came from; a constant where nobody knows, or another recorder than the one given (the model's code
    has kept the number since an earlier trace)."""
    if isinstance(value, TrackedInt):
        return value.expression if recorder is None or recorder is value.recorder else Constant(number(value))
    return Constant(int.__index__(value))


def _binary(op: str, reflected: bool) -> Callable[[TrackedInt, Any], Any]:
    compute = _OPERATIONS[op]

    def apply(self: TrackedInt, other: Any) -> Any:
        if isinstance(other, float):
            self.recorder.escape(self.expression, f"{op} float")
            return compute(other, int.__int__(self)) if reflected else compute(int.__int__(self), other)
        if not isinstance(other, int):
            return NotImplemented
        return self._operation(op, (other, self) if reflected else (self, other))

    return apply


def _escaping(how: str, name: str) -> Callable[..., Any]:
    """The operation `name` of int on the bare number, recorded."""
    plain = getattr(int, name)

    def apply(self: TrackedInt, *others: Any) -> Any:
        result = plain(self, *(int.__int__(o) if isinstance(o, TrackedInt) else o for o in others))
        if result is NotImplemented and others and isinstance(others[0], float):
            return getattr(float(int.__int__(self)), name)(others[0]) if self._noted(how, others) else result
        if result is not NotImplemented:
            self._noted(how, others)
        return result

    return apply


def _comparing(op: Literal["==", "!=", "<", "<=", ">", ">="], name: str) -> Callable[[TrackedInt, Any], Any]:
    plain = getattr(int, name)

    def apply(self: TrackedInt, other: Any) -> Any:
        if isinstance(other, float):
            self.recorder.escape(self.expression, f"{op} float")
        result = plain(number(self), number(other) if isinstance(other, TrackedInt) else other)
        if result is not NotImplemented:
            self.recorder.compare(op, self.expression, expression_of(other, self.recorder), result)
        return result

    return apply


class TrackedInt(int):
    """An int that remembers its expression. Arithmetic with ints gives tracked ints; whatever leaves the integers gives
    plain values and is recorded, as are comparisons. Hashes, prints, indexes, pickles as the int that it is."""

    expression: Expression
    recorder: IntegerRecorder
    depth: int

    def __new__(cls, value: int, expression: Expression, recorder: IntegerRecorder, depth: int = 0) -> TrackedInt:
        made = super().__new__(cls, value)
        made.expression = expression
        made.recorder = recorder
        made.depth = depth
        return made

    def _operation(self, op: str, operands: tuple[int, ...]) -> Any:
        value = _OPERATIONS[op](*(int.__int__(operand) for operand in operands))
        depth = 1 + max(operand.depth if isinstance(operand, TrackedInt) else 0 for operand in operands)
        if not isinstance(value, int) or depth > DEEPEST:
            self._noted(op if isinstance(value, float) else "too many operations", operands)
            return value
        return TrackedInt(
            value,
            Operation(op, tuple(expression_of(operand, self.recorder) for operand in operands)),
            self.recorder,
            depth,
        )

    def _noted(self, how: str, others: tuple[Any, ...]) -> bool:
        for value in dict.fromkeys(v.expression for v in (self, *others) if isinstance(v, TrackedInt)):
            self.recorder.escape(value, how)
        return True

    __add__ = _binary("+", reflected=False)
    __radd__ = _binary("+", reflected=True)
    __sub__ = _binary("-", reflected=False)
    __rsub__ = _binary("-", reflected=True)
    __mul__ = _binary("*", reflected=False)
    __rmul__ = _binary("*", reflected=True)
    __floordiv__ = _binary("//", reflected=False)
    __rfloordiv__ = _binary("//", reflected=True)
    __mod__ = _binary("%", reflected=False)
    __rmod__ = _binary("%", reflected=True)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        if modulo is not None:
            self._noted("pow", (other, modulo))
            return pow(int.__int__(self), int(other), int(modulo))
        return _power(self, other)

    def __rpow__(self, other: Any, modulo: Any = None) -> Any:
        return _reflected_power(self, other)

    def __divmod__(self, other: Any) -> Any:
        quotient = self.__floordiv__(other)
        return quotient if quotient is NotImplemented else (quotient, self.__mod__(other))

    def __rdivmod__(self, other: Any) -> Any:
        quotient = self.__rfloordiv__(other)
        return quotient if quotient is NotImplemented else (quotient, self.__rmod__(other))

    def __neg__(self) -> Any:
        return self._operation("neg", (self,))

    def __abs__(self) -> Any:
        return self._operation("abs", (self,))

    def __pos__(self) -> Any:
        return self

    __floor__ = __pos__
    __ceil__ = __pos__
    __trunc__ = __pos__

    def __round__(self, digits: Any = None, /) -> Any:
        return self if digits is None or digits >= 0 else round(int.__int__(self), digits)

    __truediv__ = _escaping("/", "__truediv__")
    __rtruediv__ = _escaping("/", "__rtruediv__")
    __float__ = _escaping("float()", "__float__")
    __int__ = _escaping("int()", "__int__")
    __and__ = _escaping("&", "__and__")
    __rand__ = _escaping("&", "__rand__")
    __or__ = _escaping("|", "__or__")
    __ror__ = _escaping("|", "__ror__")
    __xor__ = _escaping("^", "__xor__")
    __rxor__ = _escaping("^", "__rxor__")
    __lshift__ = _escaping("<<", "__lshift__")
    __rlshift__ = _escaping("<<", "__rlshift__")
    __rshift__ = _escaping(">>", "__rshift__")
    __rrshift__ = _escaping(">>", "__rrshift__")
    __invert__ = _escaping("~", "__invert__")

    __eq__ = _comparing("==", "__eq__")
    __ne__ = _comparing("!=", "__ne__")
    __lt__ = _comparing("<", "__lt__")
    __le__ = _comparing("<=", "__le__")
    __gt__ = _comparing(">", "__gt__")
    __ge__ = _comparing(">=", "__ge__")
    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        result = number(self) != 0
        self.recorder.compare("!=", self.expression, Constant(0), result)
        return result

    def __copy__(self) -> TrackedInt:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TrackedInt:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[type[int], tuple[int]]:
        return int, (int.__int__(self),)


_power = _binary("pow", reflected=False)
_reflected_power = _binary("pow", reflected=True)
