"""A split module against itself unsplit: outputs, gradients, optimiser steps, inner modules, names."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from shard_models import MLP, Attention, TiedLM, attention_plan, mlp_plan, noisy, tensor_plans, tied_plan
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tensor_parallel as tp
from tensor_parallel.errors import SplitError
from tensor_parallel.plan import Plan
from tensor_parallel.shard import pieces, shards_of, trees

DEVICE = "cpu"


def tensors(output):
    if torch.is_tensor(output):
        return [output]
    items = output.values() if isinstance(output, dict) else output
    return [t for item in items for t in tensors(item)]


CASES = {
    "mlp": (MLP, mlp_plan, lambda: (torch.randn(3, 6, dtype=torch.float64),)),
    "tied": (TiedLM, tied_plan, lambda: (torch.randint(0, 11, (2, 5)),)),
    "heads": (Attention, attention_plan, lambda: (torch.randn(2, 5, 12, dtype=torch.float64),)),
    "grouped": (lambda: Attention(12, 6, 2, 2), attention_plan, lambda: (torch.randn(2, 5, 12, dtype=torch.float64),)),
    "one kv": (lambda: Attention(12, 3, 1, 4), attention_plan, lambda: (torch.randn(2, 5, 12, dtype=torch.float64),)),
}


def pair(case, ranks):
    make, plan, inputs = CASES[case]
    reference = noisy(make())
    split = tp.tensor_parallel(copy.deepcopy(reference), [DEVICE] * ranks, plan(reference))
    return reference, split, inputs()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_steps_equal_the_unsplit_models(case, ranks):
    reference, split, inputs = pair(case, ranks)
    steppers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-3, foreach=True) for m in (reference, split)]
    weights, unclipped = None, {}
    for _ in range(3):
        norms, found = [], []
        for model, stepper in zip((reference, split), steppers, strict=True):
            stepper.zero_grad()
            outputs = tensors(model(*inputs))
            weights = weights or [torch.randn_like(o) for o in outputs]
            sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
            found.append(outputs)
            if model is split:
                gradients = tp.full_gradients(split)
                for name, _ in reference.named_parameters():
                    torch.testing.assert_close(gradients[name], unclipped[name], atol=1e-12, rtol=1e-12, msg=name)
            unclipped = {n: p.grad.clone() for n, p in reference.named_parameters()}
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True))
            stepper.step()
        torch.testing.assert_close(norms[1], norms[0], atol=1e-12, rtol=1e-12)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(b, a, atol=1e-12, rtol=1e-12)
    whole = split.state_dict()
    assert list(whole) == list(reference.state_dict())
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(whole[name], tensor, atol=1e-12, rtol=1e-12, msg=name)


def test_parts_are_registered_beside_their_weight():
    _, split, _ = pair("mlp", 3)
    names = [n for n, _ in split.named_parameters()]
    assert names[:6] == ["up.weight", "up.weight@1", "up.weight@2", "up.bias", "up.bias@1", "up.bias@2"]
    assert list(split.up._parameters) == ["weight", "weight@1", "weight@2", "bias", "bias@1", "bias@2"]
    assert names[-3:] == ["down.bias", "norm.weight", "norm.bias"]
    assert isinstance(split, MLP)
    assert type(split).__name__ == "MLP"
    assert type(split).__module__ == MLP.__module__
    assert type(type(split)(6, 5, 4)) is MLP
    assert split.up.out_features == 5


@pytest.mark.parametrize("ranks", [2, 3])
def test_inner_modules_take_and_give_whole_tensors(ranks):
    reference, split, (x,) = pair("mlp", ranks)
    hidden = reference.up(x)
    torch.testing.assert_close(split.up(x), hidden)
    torch.testing.assert_close(split.act(hidden), reference.act(hidden))
    torch.testing.assert_close(split.down(hidden), reference.down(hidden))
    given = hidden.detach().requires_grad_()
    expected = torch.autograd.grad(reference.down(given).sum(), given)
    torch.testing.assert_close(torch.autograd.grad(split.down(given).sum(), given), expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_gradient_of_an_input_is_whole(ranks):
    reference, split, (x,) = pair("heads", ranks)
    given = x.requires_grad_()
    mask = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(reference(given, mask=mask)[0].square().sum(), (given, mask))
    torch.testing.assert_close(torch.autograd.grad(split(given, mask=mask)[0].square().sum(), (given, mask)), expected)


def test_keyword_and_positional_arguments_find_the_same_border():
    reference, split, (x,) = pair("mlp", 2)
    torch.testing.assert_close(split(x=x, scale=2.0), reference(x, 2.0))
    torch.testing.assert_close(split.down(input=torch.ones(2, 5).double()), reference.down(torch.ones(2, 5).double()))


def test_freezing_reaches_every_part():
    reference, split, (x,) = pair("mlp", 3)
    split.up.weight.requires_grad_(False)
    reference.up.weight.requires_grad_(False)
    for model in (reference, split):
        model(x).sum().backward()
    assert "up.weight" not in tp.full_gradients(split)
    assert not [n for n, p in split.named_parameters() if n.startswith("up.weight") and p.requires_grad]
    split.requires_grad_(False)
    assert not split(x).requires_grad
    split.zero_grad()
    assert not tp.full_gradients(split)


def test_a_parameter_replaced_after_the_split_is_cut_by_the_same_plan():
    reference, split, (x,) = pair("mlp", 2)
    shape = reference.up.weight.shape
    for model in (reference, split):
        model.norm.weight = nn.Parameter(torch.linspace(1, 2, 4).double())
        model.up.weight = nn.Parameter(torch.linspace(-1, 1, shape.numel()).double().view(shape))
    torch.testing.assert_close(split(x), reference(x))


CHANGES = {
    "module": lambda m: setattr(m, "act", nn.ReLU()),
    "new module": lambda m: setattr(m, "extra", nn.Linear(2, 2)),
    "added": lambda m: m.add_module("extra", nn.Linear(2, 2)),
    "deleted": lambda m: delattr(m, "act"),
    "new parameter": lambda m: setattr(m.norm, "extra", nn.Parameter(torch.ones(2))),
    "deleted parameter": lambda m: delattr(m.norm, "bias"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_a_plan_by_hand_was_not_made_for_are_refused(change):
    _, split, (x,) = pair("mlp", 2)
    CHANGES[change](split)
    with pytest.raises(tp.PlanError, match="given by hand"):
        split(x)


def test_assigning_what_is_there_already_changes_nothing():
    reference, split, (x,) = pair("tied", 2)
    split.head.weight = split.embed.weight
    split.norm = split.norm
    split.config = dataclass_like = type("Config", (), {"width": 3})()
    assert all(tree.config is dataclass_like for tree in shards_of(split).trees)
    torch.testing.assert_close(split(x)["logits"], reference(x)["logits"])


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that live, at every operation."""

    def __init__(self, tensors):
        super().__init__()
        self.known = {}
        self.peak = 0
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def now(self):
        self.known = {k: v for k, v in self.known.items() if not v[0].expired()}
        return sum(nbytes for _, nbytes in self.known.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        self.peak = max(self.peak, self.now())
        return result


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MLP(64, 96, 64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def deep_plan(model):
    factors, planned, modules = {}, {}, {}
    for i, block in enumerate(model.blocks):
        plan = mlp_plan(block)
        factors |= plan.factors
        modules |= {f"blocks.{i}.{name}": part for name, part in plan.modules.items()}
        for key, tensor in plan.tensors.items():
            name = f"blocks.{i}.{key}"
            planned[name] = type(tensor)((name,), tensor.layout, tensor.nbytes, rank0_only=tensor.rank0_only)
    return Plan(factors, planned, modules)


@pytest.mark.parametrize("ranks", [2, 4])
def test_splitting_holds_the_model_and_its_largest_parameter_at_most(ranks):
    model = Deep()
    plan = deep_plan(model)
    total = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    zeros = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("down.bias")) * (ranks - 1)
    with Live(model.parameters()) as live:
        split = tp.tensor_parallel(model, [DEVICE] * ranks, plan)
        after = live.now()
    assert total + largest // 2 < live.peak <= total + largest + zeros
    assert after == total + zeros
    assert split is model


def test_a_failure_halfway_says_so_and_frees_everything(monkeypatch):
    model = Deep()
    plan = deep_plan(model)
    before = set(threading.enumerate())
    calls = 0

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("out of memory, say")
        return pieces_cut(*args)

    pieces_cut = pieces.cut
    monkeypatch.setattr(pieces, "cut", failing)
    with Live(model.parameters()) as live, pytest.raises(SplitError, match=r"used up.*free again") as caught:
        tp.tensor_parallel(model, [DEVICE] * 2, plan)
    assert "out of memory" in str(caught.value.__cause__)
    assert live.now() == 0
    _wait_for_threads(before)


def test_checks_come_before_anything_is_changed():
    model = MLP()
    plan = mlp_plan(model)
    state = copy.deepcopy(model.state_dict())
    other = MLP(width=8)
    with pytest.raises(tp.PlanError):
        tp.tensor_parallel(other, [DEVICE] * 2, plan)
    model.lock = threading.Lock()
    with pytest.raises(TypeError):
        tp.tensor_parallel(model, [DEVICE] * 2, plan)
    assert type(model) is MLP
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())


def _wait_for_threads(known):
    """Until there are no other threads than the known ones (some of which may have ended meanwhile)."""
    for _ in range(100):
        if set(threading.enumerate()) <= known:
            return
        time.sleep(0.01)
    assert set(threading.enumerate()) <= known


def test_del_frees_threads_and_tensors_without_the_garbage_collector():
    before = set(threading.enumerate())
    _, split, (x,) = pair("tied", 3)
    split(x)["logits"].sum().backward()
    kept = [weakref.ref(p) for p in split.parameters()]
    hidden = [weakref.ref(tree) for tree in shards_of(split).hidden]
    assert len(set(threading.enumerate()) - before) == 3
    gc.disable()
    try:
        del split
        assert not [r for r in (*kept, *hidden) if r() is not None]
        _wait_for_threads(before)
    finally:
        gc.enable()


def test_an_inner_module_outlives_its_model():
    reference, split, (x,) = pair("mlp", 2)
    up = split.up
    del split
    torch.testing.assert_close(up(x), reference.up(x))


def test_an_error_in_one_rank_comes_out_as_itself_and_the_next_call_works():
    reference, split, (x,) = pair("mlp", 3)
    peer = shards_of(split).peers[1]["act"]

    def broken(module, value):
        raise ValueError("rank one's own trouble")

    kept, peer._tp_slot.own_forward = peer._tp_slot.own_forward, broken
    with pytest.raises(ValueError, match="rank one's own trouble"):
        split(x)
    peer._tp_slot.own_forward = kept
    torch.testing.assert_close(split(x), reference(x))


def test_two_models_do_not_know_each_other():
    first, one, (x,) = pair("mlp", 2)
    second, two, _ = pair("mlp", 3)
    with torch.no_grad():
        second.up.weight.add_(1)
    two.load_state_dict(second.state_dict())
    torch.testing.assert_close(two(one.up(x).new_ones(2, 6)), second(x.new_ones(2, 6)))
    torch.testing.assert_close(one(x), first(x))


@pytest.mark.parametrize("ranks", [2, 3])
def test_deepcopy_and_pickle_split_again(ranks, tmp_path):
    reference, split, (x,) = pair("tied", ranks)
    split(x)["logits"].sum().backward()
    twin = copy.deepcopy(split)
    torch.save(split, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (twin, loaded):
        assert isinstance(other, tp.TensorParallel)
        assert other.embed.weight is other.head.weight
        assert other.embed.weight is not split.embed.weight
        torch.testing.assert_close(other(x)["logits"], reference(x)["logits"])
    torch.testing.assert_close(tp.full_gradients(twin), tp.full_gradients(split))
    inner = copy.deepcopy(split.embed)
    assert type(inner) is nn.Embedding
    assert torch.equal(inner.weight, reference.embed.weight)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP(6, 5, 6)
        self.bn = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.bn(self.mlp(x))


def test_buffers_stay_equal_on_all_ranks():
    reference = noisy(Normed())
    plan = mlp_plan(reference.mlp)
    own = tensor_plans(
        reference, {f"mlp.{k}": dict(enumerate(t.layout.dims)) for k, t in plan.tensors.items()}, {"mlp.down.bias"}
    )
    split = tp.tensor_parallel(
        copy.deepcopy(reference),
        [DEVICE] * 3,
        Plan(plan.factors, own, {f"mlp.{k}": m for k, m in plan.modules.items()}),
    )
    x = torch.randn(8, 6, dtype=torch.float64)
    for model in (reference, split):
        model(x)
    torch.testing.assert_close(split.bn.running_mean, reference.bn.running_mean)
    for model in (reference, split):
        model.bn.reset_running_stats()
        model.bn.momentum = 0.5
        model(x)
        model.eval()
    for tree in shards_of(split).trees:
        torch.testing.assert_close(tree.bn.running_var, reference.bn.running_var)
        assert not tree.bn.training
    torch.testing.assert_close(split(x), reference(x))


def test_casts_reach_every_tree():
    _, split, (x,) = pair("mlp", 3)
    split.float()
    assert split(x.float()).dtype == torch.float32
    split.bfloat16()
    for tree in shards_of(split).trees:
        assert {p.dtype for p in tree._parameters.values()} <= {torch.bfloat16}
        assert {p.dtype for m in tree.modules() for p in m._parameters.values()} == {torch.bfloat16}
    assert split.to("cpu") is split
    with pytest.raises(tp.DeviceError, match="cannot move"):
        split.to("cuda:0")
    with pytest.raises(tp.DeviceError):
        split.up.cuda()


def test_hooks_on_the_model_fire_once_and_see_whole_values():
    reference, split, (x,) = pair("mlp", 3)
    seen = []
    split.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    split.register_forward_hook(lambda m, args, out: out * 2)
    grads = []
    split.register_full_backward_hook(lambda m, gi, go: grads.append(go[0]))
    out = split(x.requires_grad_())
    torch.testing.assert_close(out, reference(x) * 2)
    out.sum().backward()
    assert seen == [x.shape]
    torch.testing.assert_close(grads, [torch.ones_like(out)])


def test_hooks_inside_see_whole_values():
    reference, split, (x,) = pair("mlp", 2)
    for name in ("norm", "up"):
        seen = []
        for model in (reference, split):
            handle = getattr(model, name).register_forward_hook(
                lambda m, args, out, seen=seen: seen.append((*args, out))
            )
            model(x)
            handle.remove()
        assert len(seen) == 2
        torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(split(x), reference(x))


def test_checkpointing_around_the_model_works():
    from torch.utils.checkpoint import checkpoint

    reference, split, (x,) = pair("mlp", 2)
    checkpoint(split, x, use_reentrant=False).sum().backward()
    reference(x).sum().backward()
    torch.testing.assert_close(tp.full_gradients(split)["up.weight"], reference.up.weight.grad)


def test_hidden_trees_share_the_config():
    class Config:
        width = 3

    model = MLP()
    model.config = Config()
    split = tp.tensor_parallel(model, [DEVICE] * 2, mlp_plan(model))
    assert shards_of(split).hidden[0].config is split.config


def test_a_plan_for_another_model_changes_nothing():
    model = MLP()
    plan = mlp_plan(model)
    trees.check_splittable(model, tp_resolve(plan))
    smaller = Plan(plan.factors, {k: v for k, v in plan.tensors.items() if k != "norm.bias"}, plan.modules)
    with pytest.raises(tp.PlanError, match=r"norm\.bias"):
        trees.check_splittable(model, tp_resolve(smaller))


def tp_resolve(plan):
    from tensor_parallel.plan import resolve

    return resolve(plan, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_graph_kept_from_before_the_split_does_not_hinder(ranks):
    reference = noisy(MLP())
    model = copy.deepcopy(reference)
    x = torch.randn(3, 6, dtype=torch.float64)
    kept = model(x).sum()
    split = tp.tensor_parallel(model, [DEVICE] * ranks, mlp_plan(reference))
    split(x).sum().backward()
    reference(x).sum().backward()
    gradients = tp.full_gradients(split)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    assert kept.requires_grad


def test_gradients_from_before_the_split_are_kept():
    reference = noisy(MLP())
    x = torch.randn(3, 6, dtype=torch.float64)
    reference(x).sum().backward()
    model = copy.deepcopy(reference)
    for own, parameter in zip(model.parameters(), reference.parameters(), strict=True):
        own.grad = parameter.grad.clone()
    split = tp.tensor_parallel(model, [DEVICE] * 3, mlp_plan(reference))
    gradients = tp.full_gradients(split)
    for name, parameter in reference.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_id_that_is_no_row_is_refused_as_by_the_unsplit_model(ranks):
    reference, split, (ids,) = pair("tied", ranks)
    for wrong in (11, -1, 400):
        bad = ids.clone()
        bad[0, 0] = wrong
        for model in (reference, split):
            with pytest.raises(IndexError):
                model(bad)
    torch.testing.assert_close(split(ids)["logits"], reference(ids)["logits"])


class Noisy(nn.Module):
    """Draws in training (dropout) and, where asked, always (a sample)."""

    def __init__(self, samples):
        super().__init__()
        self.mlp = MLP(6, 5, 6)
        self.drop = nn.Dropout(0.5)
        self.samples = samples

    def forward(self, x):
        x = self.drop(self.mlp(self.drop(x)))
        return x + torch.randn_like(x) if self.samples else x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicated_draws_are_the_unsplit_models(ranks, training):
    reference = noisy(Noisy(samples=not training)).train(training)
    plan = mlp_plan(reference.mlp)
    cuts = {f"mlp.{k}": dict(enumerate(t.layout.dims)) for k, t in plan.tensors.items()}
    whole = Plan(
        plan.factors,
        tensor_plans(reference, cuts, {"mlp.down.bias"}),
        {f"mlp.{k}": m for k, m in plan.modules.items()},
    )
    split = tp.tensor_parallel(copy.deepcopy(reference), [DEVICE] * ranks, whole)
    x = torch.randn(4, 6, dtype=torch.float64)
    for seed in range(3):
        found = []
        for model in (reference, split):
            torch.manual_seed(seed)
            out = model(x)
            model.zero_grad()
            out.square().sum().backward()
            found.append((out, torch.rand(1)))
        torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-12)
        gradients = tp.full_gradients(split)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize("case", ["mlp", "tied", "one kv"])
def test_copies_on_other_devices_are_made_anew_for_each_run(case, monkeypatch):
    """Several devices, as far as one kind of device can show it: leaves are then copied with and without gradients."""
    reference, split, inputs = pair(case, 3)
    for shared in shards_of(split).shared:
        shared.one_device = False
    for model in (reference, split):
        with torch.no_grad():
            before = tensors(model(*inputs))[0]
            for name, parameter in model.named_parameters():
                if name.startswith(("norm", "q_norm")):
                    parameter.add_(1.0)
        after = tensors(model(*inputs))[0]
        after.square().sum().backward()
        assert not torch.equal(before, after)
        found = (before, after)
        if model is reference:
            expected = found
    torch.testing.assert_close(found, expected)
    gradients = tp.full_gradients(split)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    for rank, bindings in enumerate(shards_of(split).bindings):
        for binding in bindings:
            leaf = shards_of(split).shared[binding.shared].leaf
            assert binding.holder[binding.name] is leaf, (rank, binding.name)
