"""Bad input is refused before anything is changed, with what was given and what to do."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build, padded
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import Mlp, assert_parity, noisy


@pytest.fixture
def model():
    return noisy(Mlp((6, 10, 6)).double())


def refused(model, error, match, *arguments, **keywords):
    """The call raises, and the module is what it was."""
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    kinds = [type(m) for m in model.modules()]
    keywords.setdefault("example_inputs", model.inputs() if hasattr(model, "inputs") else None)
    with pytest.raises(error, match=match):
        tp.tensor_parallel(model, *arguments, **keywords)
    assert [type(m) for m in model.modules()] == kinds
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], value)


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (["gpu"], "gpu"),
        (["cpu", "warp:3"], "warp"),
        ([], "empty|at least one"),
        (["cpu", "meta"], "mix|meta"),
        ("cpu", "list"),
        ([3.5], "3.5"),
        ([None], "None"),
    ],
)
def test_devices(model, devices, match):
    refused(model, (ValueError, TypeError), match, devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the index may exist here")
@pytest.mark.parametrize("devices", [["cuda:7"], [7], ["cuda:0", "cuda:1"], ["cpu", "cuda:0"]])
def test_cuda_devices_that_do_not_exist(model, devices):
    refused(model, ValueError, "(?i)cuda|mix", devices)


def test_an_output_device_outside_the_set(model):
    refused(model, ValueError, "output_device|meta", ["cpu"] * 2, output_device="meta")
    refused(model, ValueError, "output_device_index", ["cpu"] * 2, output_device_index=2)


def test_a_module_that_is_split_already(model):
    split = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, example_inputs=model.inputs())
    for again in (split, split.layers[0], torch.nn.Sequential(split)):
        with pytest.raises(tp.AlreadySplitError, match=r"split already|already split"):
            tp.tensor_parallel(again, ["cpu"] * 2)
    assert_parity(model, split, model.inputs())


def test_example_inputs_that_the_forward_refuses(model):
    refused(model, tp.TraceError, "example_inputs", ["cpu"] * 2, example_inputs={"x": torch.ones(2, 5).double()})
    refused(model, tp.TraceError, "example_inputs", ["cpu"] * 2, example_inputs={"y": torch.ones(2, 6).double()})


def test_unknown_keywords_name_the_nearest(model):
    refused(model, TypeError, "exmaple_inputs.*example_inputs", ["cpu"] * 2, exmaple_inputs={})
    refused(model, TypeError, "colour", ["cpu"] * 2, colour=1)


def test_what_is_no_module():
    with pytest.raises(TypeError, match=r"(?i)module"):
        tp.tensor_parallel(lambda x: x, ["cpu"])


@pytest.mark.parametrize(
    "keywords",
    [
        {"sharded": True},
        {"distributed": True},
        {"ratios": [2, 1]},
        {"runtime": "processes"},
        {"sharded_param_names": ["layers.0.weight"]},
    ],
)
def test_keywords_of_later_issues_say_so_by_name(model, keywords):
    refused(model, NotImplementedError, next(iter(keywords)), ["cpu"] * 2, **keywords)


def test_moving_to_a_device_outside_the_set(model):
    split = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, example_inputs=model.inputs())
    with pytest.raises(tp.DeviceError, match="meta"):
        split.to("meta")
    if not torch.cuda.is_available():
        with pytest.raises((tp.DeviceError, AssertionError, RuntimeError)):
            split.cuda()
    assert split.to("cpu") is split
    assert split.to("cpu", torch.float64) is split
    assert_parity(model, split, model.inputs())


def test_a_plan_for_another_model(model):
    plan = tp.make_plan(Mlp((6, 12, 6)).double(), 2, example_inputs=model.inputs())
    refused(model, tp.PlanError, r"layers.0.weight.*\(12, 6\).*\(10, 6\)", ["cpu"] * 2, plan)


def test_state_dicts_that_do_not_fit(model):
    split = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2, example_inputs=model.inputs())
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"layers.0.weight.*\n?.*\[9, 6\].*\[10, 6\]"):
        split.load_state_dict({**state, "layers.0.weight": torch.ones(9, 6)})
    with pytest.raises(RuntimeError, match=r"Missing key.*layers.1.bias"):
        split.load_state_dict({k: v for k, v in state.items() if k != "layers.1.bias"})
    with pytest.raises(RuntimeError, match="weight@1"):
        split.load_state_dict({**state, "layers.0.weight@1": torch.ones(1)})
    assert_parity(model, split, model.inputs())


@pytest.mark.parametrize("devices", [["cpu"] * 4, ("cpu", "cpu"), [torch.device("cpu"), "cpu"], None])
def test_legal_devices(model, devices):
    split = tp.tensor_parallel(copy.deepcopy(model), devices, example_inputs=model.inputs())
    assert_parity(model, split, model.inputs(), steps=1)


def test_one_device_is_the_same_wrapper():
    model = build("gpt2")
    split = tp.tensor_parallel(copy.deepcopy(model), ["cpu"])
    assert isinstance(split, tp.TensorParallelPreTrainedModel)
    assert_parity(model, split, padded(), steps=1)
    plain = tp.tensor_parallel(noisy(Mlp().double()), ["cpu"], example_inputs=Mlp().double().inputs())
    assert isinstance(plain, tp.TensorParallel)
    assert isinstance(plain, Mlp)


@pytest.mark.parametrize("device", ["mps", "xpu:0", "privateuseone", "hpu"])
def test_a_backend_that_is_not_there_is_named(device):
    if getattr(getattr(torch, device.partition(":")[0], None), "is_available", lambda: False)():
        pytest.skip("it is there")
    with pytest.raises(tp.DeviceError, match=r"cannot be used: .* has no .* backend; there is cpu") as caught:
        tp.tensor_parallel(nn.Linear(4, 4), [device] * 2)
    assert "\n" not in str(caught.value)


def test_an_array_among_the_examples_is_described_and_cured():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(tp.TraceError, match=r"ndarray of float64\[300, 4\] \(no tensor: torch.from_numpy") as caught:
        tp.tensor_parallel(nn.Sequential(nn.Linear(4, 4)), ["cpu"] * 2, example_inputs=(numpy.ones((300, 4)),))
    assert len(str(caught.value)) < 500


def test_arrays_and_long_lists_inside_an_example_are_described_too():
    numpy = pytest.importorskip("numpy")
    model = noisy(Mlp((6, 10, 6)).double())
    given = {"x": [numpy.ones((300, 6), dtype="float32"), list(range(1000))]}
    what = r"x: \(ndarray of float32\[300, 6\] \(no tensor: torch.from_numpy makes it one\), \(0, 1, .*\.{3} 1000 items"
    with pytest.raises(tp.TraceError, match=what) as caught:
        tp.tensor_parallel(model, ["cpu"] * 2, example_inputs=given)
    assert len(str(caught.value)) < 600
