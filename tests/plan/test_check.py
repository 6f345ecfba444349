"""Whether a plan fits a model."""

from dataclasses import replace

import pytest
import torch
from hand_plans import Mlp, cut, mlp_plan, whole

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import TensorLayout, shard
from tensor_parallel.plan import Boundary, CallSite, Factor, LocalSize, Lookup, ModulePlan, check_plan


def with_tensor(plan, key, **changes):
    return replace(plan, tensors={**plan.tensors, key: replace(plan.tensors[key], **changes)})


def with_module(plan, name, module):
    return replace(plan, modules={**plan.modules, name: module})


def test_a_plan_that_fits_passes_and_changes_nothing():
    model = Mlp()
    before = [(n, id(p)) for n, p in model.named_parameters()]
    check_plan(mlp_plan(), model)
    assert [(n, id(p)) for n, p in model.named_parameters()] == before


def test_the_first_differing_shape_is_named_with_both_shapes():
    with pytest.raises(
        PlanError, match=r"'layers.0.up.weight': the plan is for shape \(10, 6\), the model's is \(12, 6\)"
    ):
        check_plan(mlp_plan(), Mlp(hidden=12))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (
            lambda p: replace(p, tensors={k: t for k, t in p.tensors.items() if k != "layers.1.up.bias"}),
            "'layers.1.up.bias'.*missing in the plan",
        ),
        (lambda p: mlp_plan(layers=3), "'layers.2.up.weight' of the plan is not in the model"),
        (
            lambda p: with_tensor(p, "layers.0.up.bias", names=("layers.0.up.bias", "layers.1.up.bias")),
            "tied to 'layers.0.up.bias' in the plan",
        ),
        (lambda p: with_tensor(p, "layers.0.up.bias", is_buffer=True), "is a buffer in the plan and a parameter"),
        (lambda p: with_tensor(p, "layers.0.up.bias", names=("other",)), "the first must be its key"),
        (
            lambda p: with_module(p, "layers.0.upp", ModulePlan()),
            "'layers.0.upp' of the plan is not in the model.*nearest: 'layers.0.up'",
        ),
        (
            lambda p: with_tensor(p, "layers.0.up.bias", layout=TensorLayout((cut(10, "layers.0.hiden"),))),
            "'layers.0.hiden' is not among the factors.*layers.0.hidden",
        ),
        (
            lambda p: with_tensor(p, "layers.0.up.bias", layout=TensorLayout((cut(5, "layers.0.hidden", 2),))),
            "given 5 units of factor 'layers.0.hidden', required 10",
        ),
        (
            lambda p: replace(p, factors={**p.factors, "layers.0.hidden": Factor("layers.0.hidden", 10, "gone")}),
            "partner 'gone'",
        ),
        (lambda p: replace(p, factors={**p.factors, "x": Factor("y", 10)}), "filed under 'x'"),
        (
            lambda p: with_module(
                p, "layers.0.up", ModulePlan(outputs=(Boundary("", shard(-1, cut(4, "layers.0.hidden"))),))
            ),
            "module 'layers.0.up' output '' dim -1: given 4 units",
        ),
        (
            lambda p: with_module(
                p, "layers.0.up", ModulePlan(attributes=(LocalSize("heads", cut(10, "layers.0.hidden")),))
            ),
            r"\(Linear\) has no attribute 'heads'",
        ),
        (
            lambda p: with_module(
                p, "layers.0.up", ModulePlan(lookups=(Lookup("input", "table", cut(10, "layers.0.hidden")),))
            ),
            "no weight 'table'",
        ),
        (
            lambda p: with_module(p, "layers.0.up", ModulePlan(call_sites=(CallSite("go", (1, 2, 3, 4), (0,), 10),))),
            "no method 'go'",
        ),
    ],
)
def test_what_does_not_fit_is_named(broken, says):
    with pytest.raises(PlanError, match=says):
        check_plan(broken(mlp_plan()), Mlp())


def test_a_tie_of_the_model_must_be_in_the_plan():
    model = Mlp()
    model.layers[1]["up"].weight = model.layers[0]["up"].weight
    with pytest.raises(PlanError, match=r"'layers.1.up.weight' is tied to 'layers.0.up.weight' in the model"):
        check_plan(mlp_plan(), model)


def test_buffers_count():
    model = Mlp()
    model.register_buffer("scale", torch.ones(3))
    with pytest.raises(PlanError, match=r"buffer 'scale' of shape \(3,\) is missing"):
        check_plan(mlp_plan(), model)
    plan = mlp_plan()
    tensor = replace(plan.tensors["layers.0.up.bias"], names=("scale",), layout=whole(3), is_buffer=True)
    check_plan(replace(plan, tensors={**plan.tensors, "scale": tensor}), model)
