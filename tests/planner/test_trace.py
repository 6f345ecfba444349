"""Tracing: on meta as with real values, and a module that is afterwards what it was before."""

import copy
import dataclasses
import functools
import importlib

import pytest
import torch
from torch import nn

from tensor_parallel.errors import TraceError
from tensor_parallel.plan import Plan
from tensor_parallel.planner import Exchange, make_plan
from tensor_parallel.planner.trace import trace
from tensor_parallel.testing import ConvNet, Gpt, Llama, Mlp, TiedEmbedding

FREE = Exchange(call=0.0, byte=0.0)
tracing = importlib.import_module("tensor_parallel.planner.trace")


@functools.cache
def transformers_model(family):
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 101, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    common["bos_token_id"] = common["eos_token_id"] = 1
    config = {
        "llama": lambda: transformers.LlamaConfig(**common, num_key_value_heads=2, intermediate_size=40),
        "qwen3": lambda: transformers.Qwen3Config(**common, num_key_value_heads=2, intermediate_size=40, head_dim=8),
        "bert": lambda: transformers.BertConfig(**common, intermediate_size=40),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=101, n_embd=32, n_head=4, n_layer=2, bos_token_id=1, eos_token_id=1
        ),
    }[family]()
    kind = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    return kind.from_config(config).eval()


TINY = {"mlp": Mlp, "conv": ConvNet, "gpt": Gpt, "llama": Llama, "tied": TiedEmbedding}
FAMILIES = ("llama", "gpt2", "bert", "qwen3")


def model_and_inputs(name):
    if name in TINY:
        model = TINY[name]().eval()
        return model, model.inputs()
    model = copy.deepcopy(transformers_model(name.removeprefix("hf-")))
    ids = torch.arange(14).view(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "use_cache": False}


NAMES = [*TINY, *(f"hf-{family}" for family in FAMILIES)]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_on_meta_is_that_of_real_values(name, monkeypatch):
    model, inputs = model_and_inputs(name)
    if name.startswith("hf"):
        inputs.pop("use_cache") if name == "hf-bert" else None
    real = make_plan(model, 2, [inputs], exchange=FREE)
    assert any(tensor.is_cut for tensor in real.tensors.values())
    ways = []
    whole = tracing._trace

    def on_meta(module, examples, meta, *rest):
        ways.append(True)
        return whole(module, examples, True, *rest)

    monkeypatch.setattr(tracing, "_trace", on_meta)
    assert make_plan(model, 2, [inputs], exchange=FREE) == real
    assert ways


def test_only_models_beyond_the_limit_are_traced_on_meta(monkeypatch):
    model = Mlp()
    seen = []
    whole = tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda m, e, meta, *r: (seen.append(meta), whole(m, e, meta, *r))[1])
    trace(model, [model.inputs()])
    monkeypatch.setattr(tracing, "REAL_BYTES", 10)
    trace(model, [model.inputs()])
    trace(model.to("meta"), [Mlp().inputs()])
    assert seen == [False, True, True]


def test_values_on_meta_that_python_needs_fall_back_to_real_ones(monkeypatch):
    class Adaptive(Mlp):
        def forward(self, x):
            return super().forward(x) * (2 if self.layers[0].weight.sum() > 0 else 3)

    monkeypatch.setattr(tracing, "REAL_BYTES", 10)
    model = Adaptive()
    assert len(trace(model, [model.inputs()]).ops) > 3
    with pytest.raises(TraceError, match="cannot be traced"):
        trace(model.to("meta"), [Mlp().inputs()])


# --- nothing is left behind -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    heads: int = 2
    name: str = "tiny"


class Messy(nn.Module):
    """Writes to everything that it has."""

    def __init__(self):
        super().__init__()
        self.config = Settings()
        self.n_calls = 0
        self.log = ["made"]
        self.cache = {"x": None}
        self.seen = {1}
        self.norm = nn.BatchNorm1d(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.fail = False

    def forward(self, x):
        self.n_calls += 1
        self.log.append("called")
        self.seen.add(self.n_calls + 1)
        self.cache["x"] = x
        self.new = x * 2
        self.config.heads = 7
        x.add_(1)
        h = self.norm(x)
        self.total.add_(h.detach().sum(0))
        self.table = torch.ones(3)
        h = self.drop(self.up(h))
        if self.fail:
            raise ValueError("half-way")
        del self.new
        return self.down(torch.rand_like(h) * h)


def state_of(model):
    parts = {}
    for name, module in model.named_modules():
        own = dict(module.__dict__)
        for key in ("_parameters", "_buffers", "_modules"):
            own[key] = {k: id(v) for k, v in own[key].items()}
        for key, value in own.items():
            if isinstance(value, (list, set, dict)):
                own[key] = (id(module.__dict__[key]), copy.copy(value))
        parts[name] = (type(module), {k: v if isinstance(v, tuple) else id(v) for k, v in own.items()})
    return parts


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_nothing_is_left_changed(fail, meta):
    model, x = Messy().train(), torch.randn(3, 6)
    model.fail = fail
    model.up.register_forward_hook(lambda *_: None)
    before, values, given = state_of(model), copy.deepcopy(model.state_dict()), x.clone()
    config, random = dict(vars(model.config)), torch.get_rng_state()
    if fail:
        with pytest.raises((ValueError, TraceError), match="writes a value" if meta else "half-way"):
            tracing._trace(model, [{"x": x}], meta)
        with pytest.raises(TraceError, match="half-way"):
            make_plan(model, 2, [{"x": x}])
    elif not meta:
        make_plan(model, 2, [{"x": x}])
    else:
        with pytest.raises(TraceError, match="writes a value that depends on parameters"):
            tracing._trace(model, [{"x": x}], meta)
    after = state_of(model)
    for name, (kind, own) in before.items():
        assert after[name] == (kind, own), name
    assert dict(vars(model.config)) == config
    assert "forward" not in model.up.__dict__
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    assert model.up.weight.grad is None
    assert type(model.config.heads) is int


def test_a_real_model_is_left_as_it_was():
    for name in ("conv", "hf-qwen3", "hf-gpt2"):
        model, inputs = model_and_inputs(name)
        model.train()
        before, values = state_of(model), copy.deepcopy(model.state_dict())
        make_plan(model, 2, [inputs])
        assert state_of(model) == before
        assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())


def test_the_same_plan_twice():
    for name in NAMES:
        model, inputs = model_and_inputs(name)
        first = make_plan(model, 3, [inputs])
        assert make_plan(model, 3, [inputs]) == first
        assert Plan.from_json(first.to_json()) == first


# --- what the trace holds ---------------------------------------------------------------------------------------------


class One(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return self.function(x, self.w)


def names_of(function, **more):
    found = trace(One(function), [{"x": torch.randn(4, 6), **more}])
    return found, [op.name for op in found.ops]


def test_an_in_place_write_is_seen_by_every_view():
    def function(x, w):
        h = x + w
        row, late = h[0], h[1]
        row.mul_(2)
        return h.sum() + late.sum()

    found, names = names_of(function)
    assert names.count("view of a tensor written in place") >= 2
    sums = [op for op in found.ops if op.name.startswith("aten.sum")]
    writers = {found.ops[op.inputs()[0].producer].name for op in sums}
    assert writers == {"view of a tensor written in place"}


def test_an_in_place_write_makes_a_new_version():
    found, _ = names_of(lambda x, w: (x * w).add_(1).mul_(w))
    chain = [op for op in found.ops if op.name.startswith(("aten.mul", "aten.add"))]
    assert [op.inputs()[0].producer for op in chain[1:]] == [op.index for op in chain[:-1]]
    assert len({op.outputs[0].index for op in chain}) == 3


def test_a_view_made_by_autograd_is_the_same_value():
    found, _ = names_of(lambda x, w: w.t().t() @ x.t())
    matmul = next(op for op in found.ops if op.name == "matmul")
    assert found.ops[matmul.inputs()[0].producer].name.startswith("aten.t")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 + b * 3


def test_custom_functions_are_operators_that_nobody_knows():
    def function(x, w):
        a, b = Doubled.apply(x * w)
        return a + b

    found, names = names_of(function)
    assert names.count("custom autograd function") == 2
    add = [op for op in found.ops if op.name.startswith("aten.add")][-1]
    assert all(found.ops[v.producer].name == "custom autograd function" for v in add.inputs())


def test_modules_that_hand_on_their_input_make_a_tensor_of_their_own():
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.skip = nn.Linear(6, 6), nn.Identity()

        def forward(self, x):
            y = self.first(x)
            return self.skip(y), y, x

    found = trace(Passing(), [{"x": torch.randn(2, 6)}])
    skip = next(call for call in found.module_calls if call.name == "skip")
    assert skip.inputs["input"] is not skip.outputs[""]
    root = found.roots()[0]
    assert root.outputs["0"] is skip.outputs[""]
    assert root.outputs["1"] is skip.inputs["input"]
    assert root.outputs["2"] is not root.inputs["x"]


def test_tied_parameters_are_one_value():
    model = TiedEmbedding()
    found = trace(model, [model.inputs()])
    assert [key for key in found.parameters if "embed" in key or "head" in key] == ["embed.weight"]


def test_several_examples_make_one_trace():
    model = Gpt()
    found = trace(model, [model.inputs(), model.inputs(batch=1, length=3)])
    assert [call.trace for call in found.roots()] == [0, 1]
    assert len(found.paths) == 2
    assert {call.number for call in found.module_calls} == {0}


def test_sizes_and_counts_remember_their_tensor():
    def function(x, w):
        h = x @ w.t()
        return h.view(h.shape[0], h.size(1), 1).sum() + h.numel() + len(h)

    found, names = names_of(function)
    view = next(call for call in found.function_calls if call.name == "view")
    assert [str(i.expression) for i in view.integers][:2] == [
        f"tensor{view.args[0].index}.shape[0]",
        f"tensor{view.args[0].index}.shape[1]",
    ]
    assert "len" in names


def test_what_leaves_for_python_is_an_operator():
    _, names = names_of(
        lambda x, w: (x * w) * sum((x * w).detach()[0].tolist()) * float((x * w).detach().numpy().sum())
    )
    assert names.count("read") == 2


def test_refused_inputs_are_named():
    with pytest.raises(TraceError, match=r"Mlp\.forward cannot be traced.*y: float32\[2\]"):
        make_plan(Mlp(), 2, [{"y": torch.zeros(2)}])


def test_forward_patched_on_an_instance_is_left_alone():
    model = Mlp()
    patched = model.layers[0].forward
    model.layers[0].forward = patched
    trace(model, [model.inputs()])
    assert model.layers[0].__dict__["forward"] is patched
