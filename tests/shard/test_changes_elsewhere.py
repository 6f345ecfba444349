"""Changes after the split of models other than transformers' Llama: containers, buffers, biases, modes, optimisers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from changed import assert_equal_models, assert_equal_tensors
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import noisy

RANKS = [2, 3]
X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, 14), nn.Linear(14, 6), F.gelu

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Stack(nn.Module):
    """Blocks in a list, heads in a dict, a buffer that the forward reads."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.heads = nn.ModuleDict({"first": nn.Linear(6, 5), "second": nn.Linear(6, 5)})
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("shift", torch.linspace(0, 1, 6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x + self.shift)
        if "table" in self._buffers:
            x = x * self.table
        return sum(head(x) for head in self.heads.values())


def fresh(make, seed=3):
    torch.manual_seed(seed)
    return noisy(make().double())


def stack():
    return fresh(Stack, 0)


def delete_bias(model):
    del model.blocks[0].up.bias
    model.blocks[0].up.register_parameter("bias", None)


def bias_none(model):
    model.blocks[1].down.bias = None
    model.blocks[0].up.bias = None


def add_buffer(model):
    model.register_buffer("table", torch.linspace(1, 2, 6, dtype=torch.float64))


def other_buffer(model):
    model.shift = torch.linspace(2, 1, 6, dtype=torch.float64)


def by_dict(model):
    model._modules["blocks"]._modules["1"] = fresh(Block)


def set_item(model):
    model.heads["third"] = fresh(lambda: nn.Linear(6, 5))
    model.heads["first"] = fresh(lambda: nn.Linear(6, 5), 4)


def delete_item(model):
    del model.heads["first"]


def insert(model):
    model.blocks.insert(1, fresh(Block))


def pop(model):
    model.blocks.pop(0)


def extend(model):
    model.blocks.extend([fresh(Block, 5), fresh(Block, 6)])


def new_container(model):
    model.heads = nn.ModuleDict({"only": fresh(lambda: nn.Linear(6, 9))})


def evaluate_one(model):
    model.norm.eval()


def new_norm_in_eval(model):
    model.norm = fresh(lambda: nn.BatchNorm1d(6)).eval()


def function(model):
    model.blocks[1].act = torch.tanh


def method_of_a_module(model):
    model.blocks[1].act = model.blocks[1].down.forward_after = nn.Softplus()


def function_for_a_module(model):
    method_of_a_module(model)
    model(X)
    del model.blocks[1].act
    model.blocks[1].act = torch.tanh


def number_for_a_buffer(model):
    del model.shift
    model.shift = 0.25


def tensor_for_a_buffer(model):
    del model.shift
    model.shift = torch.linspace(2, 1, 6, dtype=torch.float64)


def closure(model):
    factor = 0.3
    model.blocks[0].act = lambda h: torch.relu(h) * factor


def shared_block(model):
    model.blocks[2] = model.blocks[0]


def untie_blocks(model):
    model.blocks[2] = copy.deepcopy(model.blocks[0])


def half_the_model(model):
    model.blocks[0].float()
    model.blocks[0].double()


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, fresh(lambda: nn.Linear(base.in_features, base.out_features, bias=False))

    def forward(self, x):
        return self.base(x) + self.more(x)


def adapt(model):
    for block in model.blocks:
        block.up = Adapted(block.up)


def cut_list(model):
    model.blocks = model.blocks[:2]


def delete_block(model):
    del model.blocks[0]


def swap_blocks(model):
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


def other_width(model):
    model.blocks[1].up = fresh(lambda: nn.Linear(6, 9))
    model.blocks[1].down = fresh(lambda: nn.Linear(9, 6))


def assign_parameter(model):
    model.blocks[0].up.weight = nn.Parameter(torch.linspace(-1, 1, 84, dtype=torch.float64).view(14, 6))


def bias_back(model):
    bias_none(model)
    model(X)
    model.blocks[0].up.bias = nn.Parameter(torch.linspace(0, 1, 14, dtype=torch.float64))


def freeze(model):
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)


def tie(model):
    model.heads["second"].weight = model.heads["first"].weight


def tie_and_untie(model):
    tie(model)
    model(X)
    model.heads["second"].weight = nn.Parameter(model.heads["second"].weight.detach().clone())


def attribute(model):
    model.norm.eps = 0.3


def buffer_removed(model):
    add_buffer(model)
    model(X)
    del model.table


def apply_to_all(model):
    def init(module):
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
            nn.init.normal_(module.weight, std=0.3)

    torch.manual_seed(8)
    model.apply(init)


def write_whole(model):
    with tp.whole_parameters(model), torch.no_grad():
        model.blocks[0].up.weight[3:9] *= 2
        model.blocks[1].down.weight.data = model.blocks[1].down.weight.data.flip(1)


def load_after_a_change(model):
    set_item(model)
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


def train_new_in_eval(model):
    model.eval()
    model.blocks[1] = fresh(Block)
    model.norm = fresh(lambda: nn.BatchNorm1d(6))


def modes_after(model):
    model.blocks[1].act = nn.Dropout(0.5).eval()
    model.norm = fresh(lambda: nn.BatchNorm1d(6))
    model.eval()
    model(X)
    model.train()


def new_dropout(model):
    model.blocks[1].act = nn.Dropout(0.5)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.mixing = nn.Parameter(torch.tensor(0.7)), nn.Linear(14, 14)

    def act(self, h):
        return torch.relu(h) * self.scale

    def mix(self, h):
        return self.mixing(h)


def method_of_a_child(model):
    model.blocks[1].gate = fresh(Gate)
    model.blocks[1].act = model.blocks[1].gate.act


def method_that_calls(model):
    model.blocks[1].gate = fresh(Gate)
    model.blocks[1].act = model.blocks[1].gate.mix


def method_of_an_outsider(model):
    model.blocks[0].act = fresh(Gate).mix


def lambda_over_itself(model):
    block = model.blocks[0]
    block.factor = 0.4
    block.act = lambda h: torch.relu(h) * block.factor


def lambda_over_a_parameter(model):
    weight = model.norm.weight
    model.blocks[0].act = lambda h: torch.relu(h) * weight.sum()


def lambda_over_a_cut_parameter(model):
    head = model.heads["first"]
    model.blocks[0].act = lambda h: torch.relu(h) * head.weight.sum()


def partial_function(model):
    model.blocks[0].act = functools.partial(F.leaky_relu, negative_slope=0.3)


def patched_forward(model):
    block = model.blocks[0]
    block.forward = lambda x: block.down(block.act(block.up(x))) * 0.5


STACK = [
    function_for_a_module, number_for_a_buffer, tensor_for_a_buffer, delete_bias, bias_none, bias_back, add_buffer,
    other_buffer, buffer_removed, by_dict, set_item, delete_item, insert, pop, extend, new_container, evaluate_one,
    new_norm_in_eval, train_new_in_eval, modes_after, new_dropout, function, method_of_a_module, method_of_a_child,
    method_that_calls, method_of_an_outsider, closure, lambda_over_itself, lambda_over_a_parameter,
    lambda_over_a_cut_parameter, partial_function, patched_forward, shared_block, untie_blocks, half_the_model,
    adapt, cut_list, delete_block, swap_blocks, other_width, assign_parameter, freeze, tie, tie_and_untie,
    attribute, apply_to_all, write_whole, load_after_a_change,
]  # fmt: skip


def seeded(model):
    torch.manual_seed(3)
    return model(X)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("change", STACK, ids=lambda change: change.__name__)
def test_changes_of_a_hand_written_model(change, ranks, tmp_path):
    reference = stack()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=(X,))
    split(X), reference(X)
    change(reference), change(split)
    assert_equal_models(split, reference, seeded)
    for model, name in ((reference, "reference"), (split, "split")):
        torch.save(model.state_dict(), tmp_path / name)
    wanted, found = (torch.load(tmp_path / name) for name in ("reference", "split"))
    assert_equal_tensors(found, wanted, 1e-8)


@pytest.mark.parametrize("ranks", RANKS)
def test_one_weights_parts_over_two_optimisers_are_refused(ranks):
    """At the first step of each, before anything is written."""
    split = tp.tensor_parallel(stack(), ["cpu"] * ranks, example_inputs=(X,))
    parameters = dict(split.named_parameters())
    parts = [p for name, p in parameters.items() if name.startswith("blocks.0.up.weight")]
    assert len(parts) == ranks
    others = [p for p in parameters.values() if all(p is not part for part in parts)]
    split(X).sum().backward()
    before = split.state_dict()
    for held in ([*others, parts[0]], parts[1:]):
        with pytest.raises(tp.TensorParallelError, match=r"AdamW holds some parts of blocks\.0\.up\.weight"):
            torch.optim.AdamW(held, lr=1e-2).step()
    for name, tensor in split.state_dict().items():
        assert torch.equal(tensor, before[name])


class Moving(nn.Module):
    """Cut buffers: one that the forward exchanges, one that it reads."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6)
        self.register_buffer("average", torch.linspace(0, 1, 14))
        self.register_buffer("scale", torch.linspace(1, 2, 14))

    def forward(self, x):
        hidden = self.up(x) * self.scale
        self.average = 0.9 * self.average + 0.1 * hidden.mean(0).detach()
        return self.down(hidden - self.average)


@pytest.mark.parametrize("ranks", RANKS)
def test_cut_buffers_that_the_forward_and_the_user_exchange(ranks):
    reference = fresh(Moving, 0)
    plan = tp.make_plan(reference, ranks, (X,))
    assert plan.tensors["average"].is_cut
    assert plan.tensors["scale"].is_cut
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, plan)
    assert_equal_models(split, reference, lambda model: model(X))
    for name in ("scale", "average"):
        for model in (reference, split):
            setattr(model, name, torch.linspace(3, 4, 14, dtype=torch.float64))
        assert_equal_models(split, reference, lambda model: model(X))
    with tp.whole_parameters(split):
        assert split.average.shape == (14,)
        split.average.zero_()
    reference.average.zero_()
    assert_equal_models(copy.deepcopy(split), copy.deepcopy(reference), lambda model: model(X))
    assert_equal_models(split, reference, lambda model: model(X))


class Late(nn.Module):
    """Reads `late` on a path that is not traced."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.late = nn.Linear(6, 14), nn.Linear(14, 6), F.gelu
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, late=False):
        hidden = self.up(x)
        return self.down(self.late(hidden) if late else torch.relu(hidden))


class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, h):
        return h * self.factor


def late_function(model):
    model.late = torch.tanh


def late_lambda(model):
    model.late = lambda h: torch.relu(h) * model.scale


def late_tensor(model):
    factor = torch.tensor(2.0, dtype=torch.float64)
    model.late = lambda h: torch.relu(h) * factor


def late_object(model):
    model.late = Times(3.0)


def late_method(model):
    model.late = fresh(Gate).act


def late_module(model):
    del model.late
    model.late = nn.Softplus()


LATE = [late_function, late_lambda, late_tensor, late_object, late_method, late_module]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("change", LATE, ids=lambda change: change.__name__)
def test_a_callable_reaches_all_ranks_also_off_the_traced_path(change, ranks):
    reference = fresh(Late, 0)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=(X,))
    split(X), change(reference), change(split)
    assert_equal_models(split, reference, lambda model: model(X, late=True))
