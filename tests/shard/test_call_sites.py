import ast
import functools
import inspect
import itertools
import linecache
import pickle
import sys
import textwrap
import traceback
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import RUNTIME, DimLayout, Part, Segment
from tensor_parallel.plan import CallSite
from tensor_parallel.plan.source import call_method, call_position, can_rewrite, method_of, reach
from tensor_parallel.shard.call_sites import call_sizes, local_value, site_key, with_local_sizes

HIDDEN = DimLayout((Segment((Part(4, "head"), Part(6))),))
CUTS = {"head": ((0, 1), (1, 4))}
NUMBERS = itertools.count()


class Sites(TorchFunctionMode):
    """Notes every function call: its name, method, position and arguments without self."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        at = getattr(func, "__name__", ""), call_method(frame), call_position(frame)
        self.calls.append((*at, args[1:], frame, tuple((kwargs or {}).values())))
        return func(*args, **(kwargs or {}))


def traced(module, *args):
    with Sites() as sites:
        module(*args)
    return sites.calls


def site(call, argument, layout=HIDDEN, value=24):
    return CallSite(call[1], call[2], argument, value, layout)


def rewritten(module, *sites, rank=1):
    """The module, of a private class, as `rank` runs it."""
    base = type(module)
    methods = {
        name: with_local_sizes(inspect.getattr_static(base, name), [s for s in sites if s.method == name])
        for name in {s.method for s in sites}
    }
    module.__class__ = type(base.__name__, (base,), methods)
    module._tp_call_sizes = call_sizes(sites, CUTS, rank)
    return module


def from_cell(source, **names):
    """A module of Python code as a notebook makes it: the source in linecache alone."""
    name = f"/nowhere/ipykernel_1/{next(NUMBERS)}.py"
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    made = ModuleType("cell")
    made.__dict__.update(torch=torch, nn=nn, **names)
    exec(compile(source, name, "exec"), made.__dict__)
    return made


class NanoAttention(nn.Module):
    """nanoGPT's attention: sizes from the input's shape."""

    def __init__(self, width=24, heads=4):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # beside each other again
        return self.c_proj(y)


def test_nano_attention_computes_with_a_ranks_heads():
    module = NanoAttention().double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    whole = module(x)
    calls = traced(module, x)
    splits = [c for c in calls if c[0] == "split"]
    views = [c for c in calls if c[0] == "view"]
    heads = DimLayout((Segment((Part(4, "head"),)),))
    sites = [site(splits[0], (0,))]
    sites += [site(c, (2,), heads, 4) for c in views[:3]]
    sites += [site(c, (3,), None, 6) for c in views[:3]]
    sites += [site(views[3], (2,))]
    assert [can_rewrite(NanoAttention.forward, s) for s in sites] == [""] * len(sites)

    parts = []
    for rank, (start, stop) in enumerate([(0, 6), (6, 24)]):
        own = rewritten(NanoAttention().double(), *sites, rank=rank)
        rows = torch.cat([torch.arange(start, stop) + 24 * i for i in range(3)])
        own.c_attn.weight.data = module.c_attn.weight.data[rows]
        own.c_attn.bias.data = module.c_attn.bias.data[rows]
        own.c_proj.weight.data = module.c_proj.weight.data[:, start:stop]
        own.c_proj.bias.data = module.c_proj.bias.data * (rank == 0)
        parts.append(own(x))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-12)
    assert module(x).equal(whole)  # the class itself is as it was


# --- any call, any argument ------------------------------------------------------------------------------------------


class Log:
    """Called in every way; notes where from and with what."""

    def __init__(self):
        self.calls = []

    def call(self, *args, **kwargs):
        frame = sys._getframe(1)
        self.calls.append((call_method(frame), call_position(frame), args, tuple(kwargs.values())))
        return self

    __call__ = call

    @property
    def next(self):
        return self


SPACE = st.sampled_from(["", " ", "\n      ", "  # é\n  "])


@st.composite
def arguments(draw, depth):
    pieces = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["int", "int", "tuple", "star", "name", "text", "call", "list"]))
        number = draw(st.integers(0, 50))
        if kind in ("tuple", "list"):
            items = [str(draw(st.integers(0, 50))) for _ in range(draw(st.integers(1, 3)))]
            items += draw(st.sampled_from([[], [f"*t{number % 3}"], [f"({number}, 1)"]]))
            piece = ("({},)" if kind == "tuple" else "[{}]").format(", ".join(items))
        else:
            inner = draw(calls(depth - 1)) if kind == "call" and depth else "log"
            piece = {"star": f"*t{number % 3}", "name": f"t{number % 3}", "text": "'é'", "call": inner}.get(kind)
        pieces.append(piece or str(number))
    pieces += [f"k{i}={draw(st.integers(0, 50))}" for i in range(draw(st.integers(0, 2)))]
    return ",".join(draw(SPACE) + p for p in pieces) + ("," if pieces and draw(st.booleans()) else "") + draw(SPACE)


@st.composite
def calls(draw, depth=2):
    text = draw(st.sampled_from(["log", "self.log", "log.next"]))
    for _ in range(draw(st.integers(1, 3))):
        method = draw(st.sampled_from(["", ".call", ".next.call", ".next"]))
        gap = draw(SPACE) if method else ""
        text += f"{gap}{method}({draw(arguments(depth))})"
    return text


FORMS = ["({})", "[({}) for _ in range(1)]", "(lambda: ({}))()", "('é', ({}))", "inner(lambda: ({}))"]


def paths(args, kwargs):
    """Every (path, value) of the integers of a call."""
    found = []
    for i, value in enumerate([*args, *kwargs]):
        if type(value) is int:
            found.append(((i,), value))
        elif isinstance(value, (tuple, list)):
            for j, item in enumerate(value):
                if type(item) is int:
                    found.append(((i, j), item))
                elif isinstance(item, tuple):
                    found += [((i, j, k), v) for k, v in enumerate(item)]
    return found


def changed(value, path):
    if not path:
        return -99
    values = list(value)
    values[path[0]] = changed(values[path[0]], path[1:])
    return values


def plain(value):
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_exactly_the_wanted_argument_of_exactly_the_wanted_call_changes(data):
    lines = [data.draw(st.sampled_from(FORMS)).format(data.draw(calls())) for _ in range(data.draw(st.integers(1, 3)))]
    body = "".join(f"        x{i} = {line}\n" for i, line in enumerate(lines))
    module = from_cell(
        "class A:\n    def forward(self, log, t0=(), t1=(7,), t2=(8, 9)):\n"
        f"        def inner(f):\n            return f()\n{body}        return x0\n",
    )
    log = Log()
    target = module.A()
    target.log = log
    target.forward(log)
    index = data.draw(st.integers(0, len(log.calls) - 1))
    method, position, args, kwargs = log.calls[index]
    integers = paths(args, kwargs)
    if not integers:
        return
    path, value = data.draw(st.sampled_from(integers))
    wanted = CallSite(method, position, path, value)
    reason = can_rewrite(module.A.forward, wanted)
    if reason:
        assert "not to be told" in reason
        path = (path[0] - len(args) - len(kwargs), *path[1:])
        wanted = CallSite(method, position, path, value)
        if can_rewrite(module.A.forward, wanted):
            return  # before one star of several, or behind one in a tuple
    target._tp_call_sizes = {site_key(wanted): local_value(CallSite(method, position, path, -99), {}, 0)}
    before, log.calls = log.calls, []
    try:
        with_local_sizes(module.A.forward, [wanted])(target, log)
    except PlanError:
        assert body.count("*t") > 1  # before the last of several stars
        return
    assert [c[:2] for c in log.calls] == [c[:2] for c in before]
    for i, (old, new) in enumerate(zip(before, log.calls, strict=True)):
        expected = plain([*old[2], *old[3]])
        if i == index or old[1] == position:
            expected = plain(changed(expected, path))
        assert plain([*new[2], *new[3]]) == expected


# --- what an argument is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "argument", "expected"),
    [
        ("x.view(a, b, c)", (1,), "b"),
        ("x.view(a, b, c)", (-1,), "c"),
        ("x.view((a, b), c)", (0, 1), "b"),
        ("x.view([a, (b, c)])", (0, 1, 0), "b"),
        ("x.view(*s, c)", (-1,), "c"),
        ("x.view(*s, c)", (2,), None),
        ("x.view(*s, c)", (0,), None),
        ("x.view(a, *s, c)", (0,), "a"),
        ("x.view((a, *s, c))", (0, -1), "c"),
        ("x.view((a, *s, c))", (0, 0), "a"),
        ("x.view((a, *s, c))", (0, 1), None),
        ("x.split(n, dim=d)", (1,), "d"),
        ("x.split(dim=d, split_size=n)", (1,), "n"),
        ("x.split(n, **more)", (1,), None),
        ("x.split(n, **more)", (0,), "n"),
        ("x.view(shape)", (0, 1), None),
        ("x.view(a)", (1,), None),
        ("x.view(a)", (-2,), None),
        ("x.view()", (0,), None),
        ("x.view(a)", (), None),
    ],
)
def test_what_gives_an_argument(call, argument, expected):
    found = reach(ast.parse(call, mode="eval").body, argument)
    assert (None if found is None or found.inside else ast.unparse(found.expression)) == expected


# --- methods of every kind -----------------------------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


def closed_over(offset):
    class Closing(Base):
        __secret = 3

        def forward(self, x: torch.Tensor, *, size: int = 24, more: int = 1) -> torch.Tensor:
            """Doc."""
            y = super().forward(x).reshape(-1, size)
            return y + offset + self.__secret + more * isinstance(self, Closing)

    return Closing


def counted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 100

    return wrapper


def marked(function):
    function.mark = "x"
    return function


class Decorated(nn.Module):
    @counted
    @torch.no_grad()
    @marked
    def forward(self, x):
        return x.mul(1).reshape(
            -1,
            x.shape[-1],
        )

    def other(self, x):
        return x.flatten().view(x.shape[0], x.shape[-1])

    def generator(self, x):
        yield x.reshape(-1, 24)

    short = lambda self, x: x.reshape(-1, 24)  # noqa: E731

    def rebinds(self, x):
        self = x.reshape(-1, 24)  # noqa: PLW0642
        return self

    @staticmethod
    def static(x):
        return x.reshape(-1, 24)


def test_super_closures_defaults_and_private_names_stay():
    cls = closed_over(10)
    x = torch.ones(2, 24)
    reshape = next(c for c in traced(cls(), x) if c[0] == "reshape")
    module = rewritten(cls(), site(reshape, (1,)))
    function = type(module).forward
    assert module(torch.ones(2, 18)).equal(torch.full((2, 18), 16.0))
    assert module(torch.ones(2, 18), size=18, more=2).equal(torch.full((2, 18), 17.0))
    assert module.calls == 2
    assert inspect.signature(function) == inspect.signature(cls.forward)
    assert (function.__doc__, function.__qualname__, function.__module__, function.__name__) == (
        cls.forward.__doc__,
        cls.forward.__qualname__,
        __name__,
        "forward",
    )
    assert function.__code__.co_qualname == cls.forward.__code__.co_qualname
    assert function.__annotations__ == cls.forward.__annotations__
    assert function.__globals__ is cls.forward.__globals__
    other = rewritten(closed_over(20)(), site(reshape, (1,)))
    assert other(torch.ones(2, 18)).equal(torch.full((2, 18), 26.0))


class Named(Base):
    factor = 3

    def forward(self, x):
        return super().forward(x).reshape(-1, x.shape[-1]) * Named.factor


def test_a_method_may_name_its_own_global_class():
    reshape = next(c for c in traced(Named(), torch.ones(2, 24)) if c[0] == "reshape")
    module = rewritten(Named(), site(reshape, (1,)))
    module._tp_call_sizes[site_key(site(reshape, (1,)))] = lambda _: 8
    assert module(torch.ones(2, 24)).equal(torch.full((6, 8), 6.0))


def test_decorators_are_put_around_the_new_function():
    x = torch.ones(2, 24)
    reshape = next(c for c in traced(Decorated(), x) if c[0] == "reshape")
    wanted = site(reshape, (1,))
    assert can_rewrite(Decorated.forward, wanted) == ""
    before = Decorated.forward.__wrapped__
    module = rewritten(Decorated(), wanted)
    module._tp_call_sizes[site_key(wanted)] = lambda _: 8
    result = module(x.requires_grad_())
    assert result.equal(torch.full((6, 8), 101.0))
    assert not result.requires_grad
    assert type(module).forward.mark == "x"
    assert Decorated.forward.__wrapped__ is before
    assert Decorated()(x).shape == (2, 24)
    assert method_of(reshape[4], Decorated) == "forward"


def test_functions_that_cannot_be_rewritten_say_why(tmp_path):
    x = torch.ones(2, 24)
    at = CallSite("forward", (1, 15, 1, 32), (1,), 24)
    reasons = {
        "lambda": can_rewrite(Decorated.short, at),
        "generator": can_rewrite(Decorated.generator, at),
        "instance": can_rewrite(Decorated.rebinds, CallSite("rebinds", (1, 15, 1, 32), (1,), 24)),
        "no call": can_rewrite(Decorated.other, at),
        "plain Python function": can_rewrite(len, at),
    }
    for word, reason in reasons.items():
        assert word in reason
    hidden = {}
    exec("class A:\n    def forward(self, x):\n        return x.reshape(-1, 24)\n", hidden)
    assert "not to be had" in can_rewrite(hidden["A"].forward, at)

    def opaque(function):
        table = {"f": function}
        return functools.wraps(function)(lambda *a: table["f"](*a))  # noqa: PLW0108

    assert "decorated" in can_rewrite(opaque(Decorated.other), at)
    with pytest.raises(PlanError, match="decorated"):
        with_local_sizes(opaque(Decorated.other), [at])
    with pytest.raises(PlanError, match="no call"):
        with_local_sizes(Decorated.other, [at])
    assert Decorated().other(x).shape == (2, 24)


def test_a_source_that_changed_since_is_refused():
    made = from_cell("class A:\n    def forward(self, x):\n        return x.reshape(-1, 24) + 1\n")
    at = CallSite("forward", (1, 15, 1, 32), (1,), 24)
    assert can_rewrite(made.A.forward, at) == ""
    name = made.A.forward.__code__.co_filename
    for line, word in [("        return x.reshape(-1, 24) - 1\n", "not what runs"), ("    x = (\n", "does not start")]:
        lines = ["class A:\n", "    def forward(self, x):\n", line] if "return" in line else ["class A:\n", line]
        linecache.cache[name] = (1, None, lines, name)
        assert word in can_rewrite(made.A.forward, at)


def test_the_file_and_lines_of_an_error_stay():
    made = from_cell(
        """
        import torch

        class A:
            def forward(self, x):
                y = x.view(
                    -1,
                    x.shape[-1],
                )
                return y.no_such_thing
        """
    )
    at = CallSite("forward", (1, 12, 4, 9), (-1,), 24)
    assert can_rewrite(made.A.forward, at) == ""
    target = made.A()
    target._tp_call_sizes = call_sizes([CallSite("forward", (1, 12, 4, 9), (-1,), 24, HIDDEN)], CUTS, 1)
    forward = with_local_sizes(made.A.forward, [at])

    def lines(call):
        try:
            call()
        except (AttributeError, PlanError) as error:
            return [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)][1:], str(error)
        raise AssertionError

    old, new = lines(lambda: made.A().forward(torch.ones(2, 24))), lines(lambda: forward(target, torch.ones(4, 18)))
    assert old[0][1:] == new[0][1:]
    assert old[0][-1][1] == 10
    wrong = lines(lambda: forward(target, torch.ones(4, 7)))
    assert "size 7; the plan was made for 24 (18 on rank 1)" in wrong[1]
    assert f"A.forward ({forward.__code__.co_filename}:8)" in wrong[1]


def test_two_methods_of_one_module_and_another_module_of_the_base():
    x = torch.ones(2, 24)

    class Run(Decorated):
        def forward(self, x):
            return self.other(x).reshape(-1, x.shape[-1])

    calls = traced(Run(), x)
    view = next(c for c in calls if c[0] == "view")
    reshape = next(c for c in calls if c[0] == "reshape")
    assert (method_of(view[4], Run), view[1]) == ("other", "other")
    first = rewritten(Run(), site(view, (1,)))
    second = rewritten(Run(), site(view, (1,)), site(reshape, (1,)), rank=0)
    with pytest.raises(RuntimeError):
        first(x)  # (2, 24) as (2, 18)
    assert second(torch.ones(2, 6)).shape == (2, 6)
    assert Run()(x).shape == (2, 24)


def test_what_a_rank_makes_of_a_size():
    at = ("forward", (1, 8, 1, 20), (0,), 24)
    fixed = local_value(CallSite(*at, HIDDEN), CUTS, 1)
    assert (fixed(24), fixed(18), fixed((2, 24, 3), 1), fixed([5, 24], -1)) == (18, 18, (2, 18, 3), (5, 18))
    for wrong in (23, 6, -1):
        with pytest.raises(PlanError, match=f"size {wrong}"):
            fixed(wrong)
    with pytest.raises(PlanError, match="index 3"):
        fixed((1, 2), 3)
    kept = local_value(CallSite(*at), CUTS, 1)
    assert (kept(24), kept(7), kept(18)) == (24, 24, 24)
    batch = DimLayout((Segment((Part(RUNTIME), Part(4, "head"))),))
    run_time = local_value(CallSite(*at, batch), CUTS, 1)
    assert [run_time(n) for n in (4, 8, 40)] == [3, 6, 30]
    with pytest.raises(PlanError, match="no whole number"):
        run_time(6)
    assert pickle.loads(pickle.dumps(fixed))(24) == 18


def test_variables_and_stars_that_hold_the_size():
    made = from_cell(
        """
        class A(nn.Module):
            def forward(self, x):
                shape = (*x.shape[:-1], 4, 6)
                y = x.view(shape)
                return y.reshape(*x.shape, 1)
        """
    )
    x = torch.ones(2, 24)
    calls = {c[0]: c for c in traced(made.A(), x) if c[0] in ("view", "reshape")}
    heads = DimLayout((Segment((Part(4, "head"),)),))
    sites = [site(calls["view"], (0, 1), heads, 4), site(calls["reshape"], (-2,))]
    module = rewritten(made.A(), *sites)
    assert module(torch.ones(2, 18)).shape == (2, 18, 1)
