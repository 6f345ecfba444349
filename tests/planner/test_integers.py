import copy
import inspect
import math
import pickle
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, LlamaConfig

from tensor_parallel.planner.attributes import tracked_attributes
from tensor_parallel.planner.integers import (
    DEEPEST,
    Attribute,
    Constant,
    IntegerRecorder,
    Operation,
    Size,
    TrackedInt,
    evaluate,
    expression_of,
    leaves,
)

N = Attribute("layer", "n")
M = Size(3, 1)


def tracked(value, expression=N, recorder=None):
    return TrackedInt(value, expression, recorder or IntegerRecorder())


OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "neg": lambda a, _: -a,
    "abs": lambda a, _: abs(a),
    "div": lambda a, b: divmod(a, b)[0],
    "mod": lambda a, b: divmod(a, b)[1],
    "square": lambda a, _: a**2,
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 3), st.integers(-5, 9)), max_size=6),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_an_expression_evaluates_to_what_the_code_computes_with_other_values(steps, n, m, other_n, other_m):
    def code(n, m):
        at = n
        for op, which, number in steps:
            operand = (n, m, number, at)[which]
            left, right = (at, operand) if number % 2 else (operand, at)
            at = OPERATIONS[op](left, right)
        return at

    try:
        value = code(n, m)
        other = code(other_n, other_m)
    except ZeroDivisionError:
        return
    if max(abs(value), abs(other)) > 10**30:
        return
    recorder = IntegerRecorder()
    result = code(tracked(n, N, recorder), tracked(m, M, recorder))
    assert int(result) == value
    assert evaluate(expression_of(result), {N: other_n, M: other_m}.__getitem__) == other
    assert set(leaves(expression_of(result))) <= {N, M}


@pytest.mark.parametrize(
    ("compute", "how"),
    [
        (lambda n: n / 5, "/"),
        (lambda n: 5 / n, "/"),
        (lambda n: n / 2.5, "/"),
        (lambda n: n * 0.5, "* float"),
        (lambda n: n + 1.5, "+ float"),
        (lambda n: n // 2.0, "// float"),
        (lambda n: n**-0.5, "pow float"),
        (lambda n: n**-1, "pow"),
        (float, "float()"),
        (int, "int()"),
        (math.sqrt, "float()"),
        (lambda n: n >> 1, ">>"),
        (lambda n: 7 & n, "&"),
        (lambda n: pow(n, 3, 7), "pow"),
    ],
)
def test_a_value_that_leaves_the_integers_is_plain_and_recorded(compute, how):
    recorder = IntegerRecorder(module="layer")
    result = compute(tracked(12, N, recorder))
    assert result == compute(12)
    assert type(result) is type(compute(12))
    escape = recorder.escapes[0]
    assert (escape.expression, escape.how, escape.module) == (N, how, "layer")
    assert escape.file == __file__
    line = inspect.getsource(sys.modules[__name__]).splitlines()[escape.line - 1]
    assert "lambda" in line or "compute(" in line


@pytest.mark.parametrize("op", ["==", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize("other", [11, 12, 13])
def test_comparisons_are_recorded_from_both_sides(op, other):
    recorder = IntegerRecorder()
    n = tracked(12, N, recorder)
    names = {"n": n, "other": other}
    found = eval(f"n {op} other", names), eval(f"other {op} n", names)
    assert found == (eval(f"12 {op} other"), eval(f"other {op} 12"))
    first, second = recorder.comparisons
    assert (first.left, first.op, first.right, first.result) == (N, op, Constant(other), found[0])
    assert (second.left, second.right, second.result) == (N, Constant(other), found[1])
    assert eval(f"12 {second.op} other") == found[1]


def test_truth_is_a_comparison_with_zero():
    recorder = IntegerRecorder()
    assert not tracked(0, N, recorder)
    assert [(c.op, c.left, c.right, c.result) for c in recorder.comparisons] == [("!=", N, Constant(0), False)]


def test_nothing_is_recorded_while_recording_is_off():
    recorder = IntegerRecorder(recording=False)
    n = tracked(12, N, recorder)
    assert n == 12
    assert n / 2 == 6
    assert recorder.comparisons == recorder.escapes == []


def test_it_is_an_int_to_everybody_else():
    n = tracked(3)
    assert (f"{n:03d}", repr(n), str(n), hash(n), [7, 8, 9, 10][n]) == ("003", "3", "3", hash(3), 10)
    assert ([0] * n, n * (1,), list(range(n)), {3: "x"}[n]) == ([0] * 3, (1,) * 3, [0, 1, 2], "x")
    x = torch.arange(12)
    assert x.view(n, -1).shape == (3, 4)
    assert torch.zeros(n, n + 1).shape == (3, 4)
    assert (x * n).equal(x * 3)
    assert (n / torch.ones(2)).tolist() == [3, 3]
    assert isinstance(max(n, 2), TrackedInt)
    assert expression_of(sum([n, n])) == Operation("+", (Operation("+", (Constant(0), N)), N))


def test_rounding_keeps_it_and_tensors_and_strings_are_left_to_themselves():
    n = tracked(3)
    assert all(isinstance(f(n), TrackedInt) for f in (math.floor, math.ceil, math.trunc, round, lambda n: +n))
    assert "ab" * n == "ababab"
    with pytest.raises(TypeError):
        n + "a"
    with pytest.raises(ZeroDivisionError):
        n // 0


def test_copies_keep_the_origin_and_pickles_are_plain():
    n = tracked(3)
    assert expression_of(copy.deepcopy([n])[0]) == N
    assert expression_of(copy.copy(n)) == N
    assert type(pickle.loads(pickle.dumps(n))) is int


def test_a_long_chain_is_followed_only_so_far():
    recorder = IntegerRecorder()
    n = tracked(1, N, recorder)
    for _ in range(20 * DEEPEST):
        n = n + 1
    assert n == 1 + 20 * DEEPEST
    assert type(n) is int
    assert recorder.escapes[0].how == "too many operations"


@dataclass
class Settings:
    heads: int = 4
    width: int = 8
    bias: bool = True
    name: str = "x"
    inner: object = None


class Layer(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.config = settings
        self.heads = settings.heads
        self.flag = True
        self._private = 5
        self.sizes = [1, 2]
        self.linear = nn.Linear(settings.width, settings.width)

    def forward(self, x):
        self.seen = x.shape[0]
        self.heads = self.heads * 2
        self.sizes.append(3)
        self.config.width = 99
        self.linear.extra = 1
        return self.linear(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        settings = Settings(inner=Settings(heads=2))
        self.layers = nn.ModuleList([Layer(settings), Layer(settings)])
        self.again = self.layers[0]


def state(model):
    return [(m, {k: v for k, v in m.__dict__.items() if k != "_modules"}) for m in model.modules()]


def same(before, after):
    return all(
        a is b and x.keys() == y.keys() and all(x[k] is y[k] for k in x)
        for (a, x), (b, y) in zip(before, after, strict=True)
    )


def test_attributes_and_configs_are_tracked_by_module_and_come_back():
    model = Model()
    before = state(model)
    with tracked_attributes(model, IntegerRecorder()):
        layer, other = model.layers
        assert expression_of(layer.heads) == Attribute("layers.0", "heads")
        assert expression_of(model.again.heads) == Attribute("layers.0", "heads")
        assert expression_of(layer.linear.in_features) == Attribute("layers.0.linear", "in_features")
        assert expression_of(layer.config.width) == Attribute("layers.0", "config.width")
        assert expression_of(other.config.width) == Attribute("layers.1", "config.width")
        assert expression_of(layer.config.inner.heads) == Attribute("layers.0", "config.inner.heads")
        assert isinstance(layer.config, Settings)
        assert (layer.config.bias, layer.flag) == (True, True)
        assert type(layer._private) is int
        layer(torch.ones(2, 8))
    assert same(before, state(model))
    layer = model.layers[0]
    assert layer.sizes == [1, 2]
    assert (layer.config.width, layer.config.heads) == (8, 4)
    assert type(layer.config.heads) is int
    assert not hasattr(layer, "seen")


@pytest.mark.parametrize("track", [True, False])
def test_everything_comes_back_after_an_error(track):
    model = Model()
    before = state(model)

    def body():
        with tracked_attributes(model, IntegerRecorder(), track):
            assert isinstance(model.layers[0].heads, TrackedInt) == track
            del model.layers[1].heads
            raise KeyError("x")

    with pytest.raises(KeyError):
        body()
    assert same(before, state(model))


def test_transformers_aliases_follow():
    model = nn.Module()
    model.config = GPT2Config(n_embd=32, n_head=4)
    with tracked_attributes(model, IntegerRecorder()):
        assert isinstance(model.config, GPT2Config)
        assert expression_of(model.config.hidden_size) == Attribute("", "config.n_embd")
        assert expression_of(model.config.num_attention_heads) == Attribute("", "config.n_head")
        model.config.num_attention_heads = 7
    assert (model.config.n_head, type(model.config.n_head)) == (4, int)


class Refusing:
    def __init__(self):
        self.heads = 4

    def __copy__(self):
        raise RuntimeError("not to be copied")


class Closed(LlamaConfig):
    def __getattribute__(self, key):
        if key == "__dict__":
            raise ValueError("per-layer values only")
        return super().__getattribute__(key)


def test_configs_that_refuse_and_objects_that_are_none_stay():
    model = nn.Module()
    kept = {"a": Refusing(), "c": Settings, "d": math, "e": torch.float32, "f": print}
    closed = Closed()
    for name, value in kept.items():
        setattr(model, name, value)
    model.closed = closed
    with tracked_attributes(model, IntegerRecorder()):
        assert all(getattr(model, name) is value for name, value in kept.items())
        assert model.closed is closed
    assert type(kept["a"].heads) is int
