"""Bad input is refused before anything is changed; devices and keywords."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from shard_models import MLP, mlp_plan, noisy
from torch import nn

import tensor_parallel as tp
from tensor_parallel.tensor_parallel import check_device_ids


def test_the_package_the_module_and_the_function_share_a_name():
    function = "from tensor_parallel import tensor_parallel"
    cls = "from tensor_parallel.tensor_parallel import TensorParallel"
    check = "import tensor_parallel as tp\nassert tp.tensor_parallel is tensor_parallel and callable(tensor_parallel)"
    for first, second in ((function, cls), (cls, function)):
        code = f"{first}\n{second}\n{check}\nassert tp.TensorParallel is TensorParallel"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["cpu"] * 4, ("cpu",) * 4),
        (("cpu:0", torch.device("cpu")), ("cpu", "cpu")),
    ],
)
def test_devices(given, expected):
    assert check_device_ids(given) == tuple(torch.device(d) for d in expected)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "empty"),
        ("cpu", "list"),
        (["nonsense"], "unknown device"),
        ([1.5], "no device"),
        ([True], "no device"),
        (["cuda:99"], "does not exist"),
        ([99], "does not exist"),
        (["meta"], "meta"),
    ],
)
def test_bad_devices_are_refused(given, said):
    model = MLP()
    with pytest.raises(tp.DeviceError, match=said):
        tp.tensor_parallel(model, given, mlp_plan(model))
    assert type(model) is MLP
    assert issubclass(tp.DeviceError, ValueError)


def test_mixed_kinds_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(tp.DeviceError, match="mixes cpu and cuda"):
        check_device_ids(["cpu", "cuda:0"])
    assert check_device_ids(["cuda:0"] * 2) == (torch.device("cuda:0"),) * 2
    assert check_device_ids([0]) == (torch.device("cuda:0"),)
    assert check_device_ids() == (torch.device("cuda:0"),)


def test_the_default_is_one_cpu_where_there_is_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert check_device_ids() == (torch.device("cpu"),)


@pytest.mark.parametrize(
    "keywords",
    [
        {"distributed": True}, {"ratios": [1, 2]}, {"runtime": "processes"},
        {"process_group": object()}, {"device_mesh": object()}, {"verify": True},
    ],
)  # fmt: skip
def test_what_comes_later_is_named(keywords):
    model = MLP()
    (name,) = keywords
    with pytest.raises(NotImplementedError, match=name):
        tp.tensor_parallel(model, ["cpu"] * 2, mlp_plan(model), **keywords)
    assert type(model) is MLP


@pytest.mark.parametrize("given", [{"rules": 1}, ("inputs",), "plan.json"])
def test_another_kind_of_config_is_named(given):
    with pytest.raises(
        TypeError, match=rf"tensor_parallel_config is a {type(given).__name__}; a tp\.Plan or a tp\.Config"
    ):
        tp.tensor_parallel(MLP(), ["cpu"] * 2, given)


def test_unknown_keywords_are_named_with_the_nearest():
    model = MLP()
    with pytest.raises(TypeError, match=r"'exampel_inputs'.*'example_inputs'"):
        tp.tensor_parallel(model, ["cpu"] * 2, exampel_inputs={})
    with pytest.raises(ValueError, match="runtime"):
        tp.tensor_parallel(model, ["cpu"] * 2, mlp_plan(model), runtime="fibers")


def test_output_device_must_be_one_of_the_devices():
    model = MLP()
    for keywords in ({"output_device": "meta"}, {"output_device_index": 2}, {"output_device_index": True}):
        with pytest.raises(tp.DeviceError):
            tp.tensor_parallel(model, ["cpu"] * 2, mlp_plan(model), **keywords)
    split = tp.tensor_parallel(model, ["cpu"] * 2, mlp_plan(model), output_device="cpu", output_device_index=-1)
    assert split.output_device == torch.device("cpu")


def test_no_module_no_parameters_and_split_already():
    with pytest.raises(TypeError, match="Module is needed"):
        tp.tensor_parallel("model", ["cpu"])
    with pytest.raises(tp.PlanError, match="no parameters"):
        tp.tensor_parallel(nn.ReLU(), ["cpu"])
    model = MLP()
    split = tp.tensor_parallel(model, ["cpu"] * 2, mlp_plan(model))
    with pytest.raises(tp.AlreadySplitError):
        tp.tensor_parallel(split, ["cpu"] * 2)
    with pytest.raises(tp.AlreadySplitError, match="split already"):
        tp.tensor_parallel(nn.Sequential(split.up), ["cpu"] * 2)
    with pytest.raises(tp.AlreadySplitError):
        tp.TensorParallel(split, ["cpu"] * 2)


def test_example_inputs_in_every_form():
    reference = noisy(MLP(64, 96, 64))
    x = torch.randn(3, 64, dtype=torch.float64)
    for inputs in ({"x": x}, (x,), [(x,), {"x": x[:2]}]):
        split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs=inputs)
        torch.testing.assert_close(split(x), reference(x))
        assert tp.report(split).split_fraction > 0.5
    with pytest.raises(TypeError, match="example_inputs"):
        tp.tensor_parallel(MLP(), ["cpu"] * 2, example_inputs=x)
    with pytest.raises(tp.TraceError):
        tp.tensor_parallel(MLP(), ["cpu"] * 2, example_inputs=(torch.ones(2, 99),))


def test_without_inputs_each_layer_is_split_by_itself():
    reference = noisy(MLP())
    x = torch.randn(3, 6, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3)
    torch.testing.assert_close(split(x), reference(x))
    split(x).sum().backward()
    reference(x).sum().backward()
    torch.testing.assert_close(tp.full_gradients(split)["up.weight"], reference.up.weight.grad)
    assert tp.report(split).gathered_fraction > 0.5


def test_functions_refuse_an_unsplit_model():
    for function in (tp.full_gradients, tp.full_state_dict, tp.report):
        with pytest.raises(tp.TensorParallelError, match="not split"):
            function(MLP())
