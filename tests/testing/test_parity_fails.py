"""assert_parity fails on every split that was broken on purpose, and names what differs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import tensor_parallel as tp
from tensor_parallel.layout import DimLayout, Part, Placement, Segment, TensorLayout, partial, shard
from tensor_parallel.plan import Boundary, Factor, ModulePlan, Plan, TensorPlan, Traffic
from tensor_parallel.shard import shards_of
from tensor_parallel.testing import ConvNet, Gpt, Mlp, assert_parity, noisy, run_ranks

HIDDEN = DimLayout((Segment((Part(10, "hidden"),)),))
WIDTH = DimLayout.whole(6)


def mlp_plan():
    """layers.0 by columns, layers.1 by rows with its bias on rank 0."""
    tensors = {
        "layers.0.weight": TensorPlan(("layers.0.weight",), TensorLayout((HIDDEN, WIDTH)), 480),
        "layers.0.bias": TensorPlan(("layers.0.bias",), TensorLayout((HIDDEN,)), 80),
        "layers.1.weight": TensorPlan(("layers.1.weight",), TensorLayout((WIDTH, HIDDEN)), 480),
        "layers.1.bias": TensorPlan(("layers.1.bias",), TensorLayout((WIDTH,)), 48, rank0_only=True, reason="summed"),
    }
    lies = shard(-1, HIDDEN)
    modules = {
        "layers.0": ModulePlan(outputs=(Boundary("", lies, lies),)),
        "layers.1": ModulePlan(
            inputs=(Boundary("input", lies, lies),), outputs=(Boundary("", partial("hidden"), Placement()),)
        ),
    }
    return Plan({"hidden": Factor("hidden", 10)}, tensors, modules, (Traffic("layers.1", "", "all_reduce", 1, 144),))


def split_with(plan, ranks=2):
    reference = noisy(Mlp((6, 10, 6)).double())
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, plan)


def pieces(split, key):
    return [piece.tensor for piece in shards_of(split).tensors[key].pieces]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_unbroken_split_passes(ranks):
    reference, split = split_with(mlp_plan(), ranks)
    assert_parity(reference, split, reference.inputs(), steps=3)


def test_swapped_ranks_fail():
    reference, split = split_with(mlp_plan())
    first, second = pieces(split, "layers.0.weight")
    with torch.no_grad():
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    with pytest.raises(AssertionError, match=r"^output output"):
        assert_parity(reference, split, reference.inputs())


def test_a_dropped_bias_fails():
    reference, split = split_with(mlp_plan())
    with torch.no_grad():
        pieces(split, "layers.1.bias")[0].zero_()
    with pytest.raises(AssertionError, match=r"^output output"):
        assert_parity(reference, split, reference.inputs())


def test_a_bias_added_by_every_rank_fails():
    plan = mlp_plan()
    bias = replace(plan.tensors["layers.1.bias"], rank0_only=False)
    reference, split = split_with(replace(plan, tensors={**plan.tensors, "layers.1.bias": bias}))
    with pytest.raises(AssertionError, match=r"^output output"):
        assert_parity(reference, split, reference.inputs())


def test_a_missing_all_reduce_fails():
    plan = mlp_plan()
    row = replace(plan.modules["layers.1"], outputs=())
    reference, split = split_with(replace(plan, modules={**plan.modules, "layers.1": row}))
    with pytest.raises(AssertionError, match=r"^output output"):
        assert_parity(reference, split, reference.inputs())


def test_a_wrong_gradient_alone_fails_by_name():
    reference, split = split_with(mlp_plan())
    hook = pieces(split, "layers.1.weight")[1].register_hook(lambda grad: grad * 2)
    with pytest.raises(AssertionError, match=r"^gradient layers\.1\.weight"):
        assert_parity(reference, split, reference.inputs())
    hook.remove()
    assert_parity(reference, split, reference.inputs())


def test_a_missing_gradient_fails_by_name():
    reference, split = split_with(mlp_plan())
    split.layers[0].bias.requires_grad_(False)
    with pytest.raises(AssertionError, match=r"^gradient layers\.0\.bias.*no gradient"):
        assert_parity(reference, split, reference.inputs())


def test_a_parameter_counted_twice_fails_by_its_norm():
    reference, split = split_with(mlp_plan())
    kept = split.parameters

    def with_a_copy(recurse=True):
        found = list(kept(recurse))
        twin = torch.nn.Parameter(found[0].detach().clone())
        twin.grad = found[0].grad
        return iter([*found, twin])

    object.__setattr__(split, "parameters", with_a_copy)
    with pytest.raises(AssertionError, match=r"^gradient norm total"):
        assert_parity(reference, split, reference.inputs())


def test_a_part_that_the_optimiser_does_not_see_fails():
    reference, split = split_with(mlp_plan())

    def visible_only(model):
        return torch.optim.AdamW([p for n, p in model.named_parameters() if "@" not in n], lr=1e-2)

    with pytest.raises(tp.TensorParallelError, match=r"layers\.0\.weight.*rank 1"):
        assert_parity(reference, split, reference.inputs(), steps=1, optimizer=visible_only)


def test_a_copy_that_differs_fails_by_name_and_rank():
    reference = noisy(ConvNet().double().eval())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3, example_inputs=reference.inputs())
    assert_parity(reference, split, reference.inputs())
    key = "stem_norm.num_batches_tracked"
    shards_of(split).trees[2].get_buffer(key).add_(1)
    with pytest.raises(AssertionError, match=f"{key}: rank 2's copy differs from rank 0's"):
        assert_parity(reference, split, reference.inputs())


def test_another_models_weights_fail():
    reference = noisy(Gpt().double().eval())
    other = noisy(Gpt().double().eval(), seed=1)
    split = tp.tensor_parallel(other, ["cpu"] * 2, example_inputs=reference.inputs())
    with pytest.raises(AssertionError, match=r"^output output"):
        assert_parity(reference, split, reference.inputs())


def test_a_looser_tolerance_is_obeyed():
    reference, split = split_with(mlp_plan())
    with torch.no_grad():
        split.layers[1].bias.mul_(1 + 1e-7)
    with pytest.raises(AssertionError):
        assert_parity(reference, split, reference.inputs())
    assert_parity(reference, split, reference.inputs(), tolerance=1e-5)


def test_run_ranks_runs_each_rank_and_raises_its_error():
    ones = torch.ones(2)
    sums = run_ranks(lambda group: group.all_reduce(ones * group.rank()), 3)
    assert [s.tolist() for s in sums] == [[3.0, 3.0]] * 3

    def fails(group):
        if group.rank() == 1:
            raise KeyError("here")
        group.barrier()

    with pytest.raises(KeyError, match="here"):
        run_ranks(fails, 3)
