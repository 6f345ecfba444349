"""What cannot reach the ranks' threads raises by name instead of giving constants or zeros; processes and copies."""

from __future__ import annotations

import copy
import io
import os
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensor_parallel as tp
from tensor_parallel.testing import assert_parity, noisy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


def pair(ranks=2):
    reference = noisy(Net().double())
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs={"x": X})


def dual(model):
    with fwad.dual_level():
        return fwad.unpack_dual(model(fwad.make_dual(X, torch.ones_like(X)))).tangent


WAYS = {
    "grad": lambda m: torch.func.grad(lambda y: m(y).sum())(X),
    "vmap": lambda m: torch.func.vmap(m)(X),
    "jvp": lambda m: torch.func.jvp(m, (X,), (torch.ones_like(X),)),
    "jacrev": lambda m: torch.func.jacrev(m)(X[0]),
    "functional_call": lambda m: torch.func.functional_call(
        m, {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in Net().double().named_parameters()}, (X,)
    ),
    "functional_call with parameters": lambda m: torch.func.functional_call(
        m, dict(Net().double().named_parameters()), (X,)
    ),
    "forward mode": dual,
    "jit.trace": lambda m: torch.jit.trace(m, (X,)),
    "jit.trace of a part": lambda m: torch.jit.trace(m.up, (X,)),
    "jit.script": torch.jit.script,
    "export": lambda m: torch.export.export(m, (X,)),
    "fx": torch.fx.symbolic_trace,
    "fx of a part": lambda m: torch.fx.symbolic_trace(m.up),
    "compile of a part": lambda m: m.up.compile(),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_that_do_not_reach_the_ranks_raise_by_name(way):
    reference, split = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match="split"):
            WAYS[way](split)
    assert isinstance(split, tp.TensorParallel)
    assert_parity(reference, split, {"x": X})


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def test_a_backward_that_recomputes_inside_a_transform_raises_by_name_and_batched_gradients_do_not():
    reference = noisy(Checkpointed().double())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs={"x": X})
    x, rows = X.clone().requires_grad_(), torch.eye(4, dtype=X.dtype)
    y = split(x).sum(1)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*split"):
        torch.func.vmap(lambda row: torch.autograd.grad(y, x, row, retain_graph=True)[0])(rows)
    found, expected = (
        torch.autograd.grad(model(x).sum(1), x, rows, is_grads_batched=True)[0] for model in (split, reference)
    )
    torch.testing.assert_close(found, expected)


def test_torch_compile_around_it_runs_it_as_it_is():
    reference, split = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.compile(split, backend="eager")(X * 2), reference(X * 2))


class Energy(Net):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).pow(2).sum()
            return torch.autograd.grad(energy, x)[0]


def test_a_gradient_taken_inside_the_forward_is_right_or_raises():
    reference = noisy(Energy().double())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs={"x": X})
    try:
        found = split(X)
    except NotImplementedError as error:
        assert "inside a rank" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, reference(X))


def test_workers_of_a_data_loader_and_a_call_in_a_forked_child():
    reference, split = pair()
    split(X)
    loader = torch.utils.data.DataLoader(list(X), batch_size=2, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forking with threads
        batches = list(loader)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                split(X)
                said = "ran"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 4096).decode()
    assert said.startswith("RuntimeError")
    assert "forked process" in said
    torch.testing.assert_close(torch.cat(batches), X)
    torch.testing.assert_close(split(X), reference(X))


def test_pickles_and_copies_are_split_again():
    reference, split = pair(3)
    file = io.BytesIO()
    torch.save(split, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (loaded, copy.deepcopy(split)):
        assert isinstance(other, tp.TensorParallel)
        assert other is not split
        assert_parity(reference, other, {"x": X})
    torch.testing.assert_close(copy.deepcopy(split.up)(X), reference.up(X))


def test_a_class_of_a_notebook_cell_is_split_again_under_the_same_name():
    cell = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

torch.manual_seed(0)
model = Cell().double()
whole = copy.deepcopy(model)
model = tp.tensor_parallel(model, ["cpu"] * 2, example_inputs=(X,))
found = model(X)
"""
    names = {"nn": nn, "torch": torch, "tp": tp, "copy": copy, "X": X}
    for _ in range(2):
        exec(cell, names)
        torch.testing.assert_close(names["found"], names["whole"](X))
    with pytest.raises(tp.AlreadySplitError):
        tp.tensor_parallel(names["model"], ["cpu"] * 2)
