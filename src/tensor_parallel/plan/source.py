"""The source behind a method: which call a running frame is at, whether an argument of that call can be given another
value, and the method's code compiled anew with such arguments changed. Nothing here knows about ranks.

A call is named by (line from the method's first line, column, end line, end column), as the CALL instruction has it in
`codeobject.co_positions()`; columns count bytes. The first line is `co_firstlineno`: a decorated method's is its first
decorator's. A call inside a comprehension, lambda or inner function of a method counts as the method's.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import linecache
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import or_
from types import CodeType, FrameType, FunctionType
from typing import Any

from tensor_parallel.errors import PlanError
from tensor_parallel.plan.plan import CallSite

Position = tuple[int, int, int, int]
Wrap = Callable[[CallSite, ast.expr, tuple[int, ...]], ast.expr]

_FUTURES = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))
_NO_PLAIN_CALL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


# --- from a running frame to a call --------------------------------------------------------------------------------


def _encloses(outer: CodeType, inner: CodeType) -> bool:
    """Whether `inner` stands in `outer`, with only functions between: a method of a class in `outer` does not."""
    if not outer.co_flags & inspect.CO_OPTIMIZED:
        return False
    return any(c is inner or _encloses(c, inner) for c in outer.co_consts if isinstance(c, CodeType))


def _calling(frame: FrameType) -> FrameType:
    """The frame that holds the call: a torch function written in Python (`Tensor.split`) reaches a function mode
    through `handle_torch_function`, two frames below its caller."""
    code, name = frame.f_code, frame.f_globals.get("__name__")
    if name == "torch.overrides" and code.co_name == "handle_torch_function" and frame.f_back and frame.f_back.f_back:
        return frame.f_back.f_back
    return frame


def method_frame(frame: FrameType) -> FrameType:
    """The frame of the method that makes the call which `frame` is at: itself, or for a comprehension, lambda or inner
    function the frame of the function that it stands in, where that is still running."""
    frame = _calling(frame)
    if "<locals>" not in frame.f_code.co_qualname:
        return frame
    found, caller = frame, frame.f_back
    while caller is not None:
        if _encloses(caller.f_code, found.f_code):
            found = caller
            if "<locals>" not in found.f_code.co_qualname:
                break
        caller = caller.f_back
    return found


def call_position(frame: FrameType) -> Position | None:
    """Position of the call that `frame` is at, its lines counted from the first line of `method_frame(frame)`.

    None where the code has no positions (`python -X no_debug_ranges`, generated code).
    """
    at = _calling(frame)
    positions = next(islice(at.f_code.co_positions(), at.f_lasti // 2, None), (None,) * 4)
    line, end_line, column, end_column = positions
    if line is None or end_line is None or column is None or end_column is None:
        return None
    first = method_frame(frame).f_code.co_firstlineno
    return line - first, column, end_line - first, end_column


def call_method(frame: FrameType) -> str:
    """Name, by its own code, of the method that makes the call which `frame` is at."""
    return method_frame(frame).f_code.co_name


def method_of(frame: FrameType, owner: type) -> str | None:
    """The name under which `owner` has the method that makes the call which `frame` is at, decorated or not; None where
    that is another function (a free one, or a base class's that `owner` overrides)."""
    code = method_frame(frame).f_code
    for name in (code.co_name, *dir(owner)):
        chain = wrapper_chain(inspect.getattr_static(owner, name, None))
        if isinstance(chain, list) and chain[-1].__code__ is code:
            return name
    return None


# --- from a call to the expression of one argument -----------------------------------------------------------------


def _is_star(entry: ast.expr | ast.keyword) -> bool:
    return isinstance(entry, ast.Starred) or (isinstance(entry, ast.keyword) and entry.arg is None)


@dataclass(frozen=True)
class Reached:
    """Where an argument comes from: item `inside` of what `expression` gives, which is the argument itself for ()."""

    expression: ast.expr
    inside: tuple[int, ...] = ()


def _reach(entries: Sequence[ast.expr | ast.keyword], path: tuple[int, ...]) -> Reached | None:
    """What gives the item at `path` of a call or tuple with these entries."""
    index, rest = path[0], path[1:]
    stars = [i for i, entry in enumerate(entries) if _is_star(entry)]
    if index < 0:
        behind = len(entries) - 1 - stars[-1] if stars else len(entries)
        if index < -behind:
            entry = entries[stars[-1]] if stars else None
            return Reached(entry.value, (index + behind, *rest)) if isinstance(entry, ast.Starred) else None
        index += len(entries)
    elif stars and index >= stars[0]:
        return None
    if index >= len(entries):
        return None
    entry = entries[index]
    found = entry.value if isinstance(entry, ast.keyword) else entry
    if rest and isinstance(found, ast.Tuple | ast.List):
        return _reach(found.elts, rest)
    return Reached(found, rest)


def reach(call: ast.Call, argument: Sequence[int]) -> Reached | None:
    """What gives one argument of a call; None where that is not to be told.

    argument: index path. The first index counts the arguments as written, positional ones and then keyword ones,
        without `self` for methods; negative from the end, which reaches into a star and behind it, not before it. The
        next ones count items of a tuple or list. Argument i of n: try i, then i - n.
    """
    return _reach([*call.args, *call.keywords], tuple(argument)) if argument else None


def _instruction_positions(call: ast.Call, first_line: int) -> set[Position]:
    """The positions that the compiler may give to the call's instruction: the expression's own, or, where a method's
    name stands on another line than the expression starts, from that name."""
    end = (call.end_lineno or call.lineno) - first_line, call.end_col_offset or 0
    found = {(call.lineno - first_line, call.col_offset, *end)}
    function = call.func
    if isinstance(function, ast.Attribute) and function.end_lineno not in (None, call.lineno):
        found.add((function.end_lineno - first_line, (function.end_col_offset or 0) - len(function.attr), *end))
    return found


# --- a method's source ---------------------------------------------------------------------------------------------


def wrapper_chain(function: object) -> list[FunctionType] | str:
    """[the function itself, what it wraps, ..., the innermost], or why that cannot be rebuilt.

    A wrapper made by `functools.wraps` can be rebuilt where it finds what it wraps in one of its closure cells.
    """
    chain: list[FunctionType] = []
    while True:
        if not isinstance(function, FunctionType):
            return f"{function!r} is not a plain Python function"
        chain.append(function)
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is None:
            return chain
        if wrapped_cell(function, wrapped) is None:
            return f"{function.__qualname__} is decorated by a wrapper that does not hold it in a closure"
        function = wrapped


def wrapped_cell(wrapper: FunctionType, wrapped: object) -> int | None:
    """Index of the one closure cell of `wrapper` that holds `wrapped`."""
    cells = [i for i, cell in enumerate(wrapper.__closure__ or ()) if _content(cell) is wrapped]
    return cells[0] if len(cells) == 1 else None


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


@dataclass(frozen=True)
class MethodSource:
    """A plain function with its syntax tree, lines and columns as in its file. Made by `read`."""

    function: FunctionType
    node: ast.FunctionDef

    @classmethod
    def read(cls, function: FunctionType) -> MethodSource | str:
        """The source, or the reason why it cannot be had."""
        code = function.__code__
        name = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        if code.co_name == "<lambda>":
            return f"{name} is a lambda"
        if code.co_flags & _NO_PLAIN_CALL:
            return f"{name} is a generator or coroutine"
        lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
        if not lines:
            return f"the source of {name} is not to be had"
        node = _parse(lines, code)
        if node is None:
            return f"the source of {name} does not start with that function: was the file changed after its import?"
        source = cls(function, node)
        # pytest rewrites assertions, so that code with one is not the plain compilation of its source
        asserts = any(isinstance(n, ast.Assert) for n in ast.walk(node))
        if not asserts and not _same_code(source.compile(node), code):
            return f"the source of {name} is not what runs: was the file changed after its import?"
        return source

    def calls(self) -> Iterator[tuple[set[Position], ast.Call]]:
        """Every call in the body with the positions that it may have."""
        first = self.function.__code__.co_firstlineno
        for statement in self.node.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    yield _instruction_positions(node, first), node

    def find(self, site: CallSite) -> Reached | str:
        """Where the site's argument comes from, or why that is not to be told."""
        code = self.function.__code__
        at = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno + site.position[0]})"
        call = next((call for positions, call in self.calls() if tuple(site.position) in positions), None)
        if call is None:
            return f"{at} has no call at columns {site.position[1]} to {site.position[3]}"
        found = reach(call, site.argument)
        if found is None:
            return f"{at}: argument {site.argument} of `{ast.unparse(call)}` is not to be told from others"
        return found

    def instance_name(self) -> str | None:
        """What the method calls its instance; None where it has no such argument or binds the name anew."""
        arguments = [*self.node.args.posonlyargs, *self.node.args.args]
        if not arguments:
            return None
        name = arguments[0].arg
        for statement in self.node.body:
            for node in ast.walk(statement):
                stored = isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
                if stored or (isinstance(node, ast.arg) and node.arg == name):
                    return None
        return name

    def rewritten(self, sites: Sequence[CallSite], wrap: Wrap) -> CodeType:
        """The function's code with what gives the argument of each site, `e`, replaced by `wrap(site, e, inside)`.

        Line numbers and the file stay, so tracebacks and the positions of other calls do too.

        Raises:
            PlanError: a site is not to be reached.
        """
        replaced: dict[ast.expr, ast.expr] = {}
        for site in sites:
            found = self.find(site)
            if isinstance(found, str):
                raise PlanError(f"call site cannot be reached: {found}")
            at = found.expression
            replaced[at] = wrap(site, replaced.get(at, at), found.inside)
        changed = _Replacer(replaced).visit(self.node)
        return self.compile(changed)

    def compile(self, node: ast.FunctionDef) -> CodeType:
        """`node` in place of the function, compiled where the same names are free, global and mangled.

        It stands in a class of the function's own class's name (`self.__x`, `super()`), that in a function whose
        parameters are its free variables. Only code is made: nothing of it runs.
        """
        code = self.function.__code__
        owner = code.co_qualname.rpartition(".<locals>.")[2].rpartition(".")[0].rpartition(".")[2]
        free = [n for n in code.co_freevars if not (owner and n == "__class__")]
        defined = owner or node.name
        scope: list[ast.stmt] = [] if defined in free else [ast.Global([defined])]
        scope.append(ast.ClassDef(owner, [], [], [node], []) if owner else node)
        parameters = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
        shell = ast.Module([ast.FunctionDef("_", parameters, scope, [])], [])
        ast.fix_missing_locations(shell)
        compiled = compile(shell, code.co_filename, "exec", flags=code.co_flags & _FUTURES, dont_inherit=True)
        made = _code_named(compiled, node.name, code.co_firstlineno)
        return made.replace(co_qualname=code.co_qualname, co_flags=code.co_flags)


def _parse(lines: list[str], code: CodeType) -> ast.FunctionDef | None:
    """The function at the start of `lines`, its lines and columns as in the file."""
    try:
        block = inspect.getblock(lines)
        indented = block[0][:1].isspace()
        tree = ast.parse("".join(["if 1:\n", *block] if indented else block))
    except (SyntaxError, IndexError, tokenize.TokenError):
        return None
    ast.increment_lineno(tree, code.co_firstlineno - 1 - indented)
    node = tree.body[0]
    if indented and isinstance(node, ast.If):
        node = node.body[0]
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name or getattr(node, "type_params", None):
        return None
    return node


def _code_named(code: CodeType, name: str, first_line: int) -> CodeType:
    """The code of the function `name` at `first_line`, somewhere in `code`."""
    waiting = [code]
    while waiting:
        at = waiting.pop()
        if at.co_name == name and at.co_firstlineno == first_line and at is not code:
            return at
        waiting.extend(c for c in at.co_consts if isinstance(c, CodeType))
    raise PlanError(f"no code of {name} at line {first_line} of {code.co_filename}")


def _same_code(first: CodeType, second: CodeType) -> bool:
    """Whether two code objects do the same, with the same names; doc strings aside."""
    fields = ("co_names", "co_varnames", "co_freevars", "co_cellvars")
    if any(getattr(first, field) != getattr(second, field) for field in fields):
        return False
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (first, second)]
    if len(inner[0]) != len(inner[1]) or not all(map(_same_code, *inner)):
        return False
    return _instructions(first) == _instructions(second)


def _instructions(code: CodeType) -> list[tuple[str, str]]:
    """What the code does, jump widths aside, and methods of imported names, which Python 3.11 loads differently."""
    return [
        ("LOAD_ATTR" if i.opname == "LOAD_METHOD" else i.opname, "" if i.opcode in dis.hasjrel else _plain(i.argval))
        for i in dis.get_instructions(code)
        if i.opname not in ("EXTENDED_ARG", "NOP")
    ]


def _plain(constant: object) -> str:
    if isinstance(constant, CodeType):
        return constant.co_name
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


class _Replacer(ast.NodeTransformer):
    """A copy of a tree with some of its expressions replaced; the tree itself is left as it was."""

    def __init__(self, replaced: dict[ast.expr, ast.expr]) -> None:
        self.replaced = replaced

    def visit(self, node: ast.AST) -> Any:
        new = self.replaced.get(node) if isinstance(node, ast.expr) else None
        if new is not None:
            return self._copied(new, inside=node)
        return self._copied(node, inside=None)

    def _copied(self, node: ast.AST, inside: ast.AST | None) -> ast.AST:
        """`node` with its children visited; `inside` is the replaced expression, met again within its replacement."""
        copy = type(node)(**{name: self._field(value, inside) for name, value in ast.iter_fields(node)})
        return ast.copy_location(copy, node if inside is None else inside)

    def _field(self, value: Any, inside: ast.AST | None) -> Any:
        if isinstance(value, list):
            return [self._field(item, inside) for item in value]
        if not isinstance(value, ast.AST):
            return value
        if inside is None:
            return self.visit(value)
        return self._copied(value, None if value is inside else inside)


def can_rewrite(function: Callable[..., Any], site: CallSite) -> str:
    """ "" where `site`, a call in the method `function` (`type(module).forward`), can be given another size; else why
    not. Reading the source takes some milliseconds: ask once for modules of one class."""
    chain = wrapper_chain(function)
    if isinstance(chain, str):
        return chain
    source = MethodSource.read(chain[-1])
    if isinstance(source, str):
        return source
    found = source.find(site)
    if isinstance(found, str):
        return found
    if source.instance_name() is None:
        return f"{chain[-1].__qualname__} does not keep its instance in its first argument"
    return ""
