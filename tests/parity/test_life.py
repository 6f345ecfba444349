"""A whole split model in a real process: the caller's modes, Ctrl-C at every stage, threads, forks, fresh processes."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwad
from families import padded, pair
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tensor_parallel as tp
from tensor_parallel.testing import assert_parity, noisy


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def loss_and_gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).logits.pow(2).mean()
    loss.backward()
    grads = tp.full_gradients(model) if isinstance(model, tp.TensorParallel) else None
    return loss.detach(), grads or {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(reference, split, inputs):
    (mine, my_grads), (theirs, their_grads) = (loss_and_gradients(m, inputs) for m in (split, reference))
    close(mine, theirs)
    for name, gradient in their_grads.items():
        close(my_grads[name], gradient)


class TripledActivation(TorchFunctionMode):
    """Changes a function of the model's own code; what no rank may miss."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func in (torch.nn.functional.silu, torch.tanh) else out


class TripledOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func in (torch.ops.aten.silu.default, torch.ops.aten.tanh.default) else out


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", [TripledActivation, TripledOperator])
def test_the_callers_modes_reach_every_rank_and_are_undone(family, mode):
    reference, split = pair(family, 3)
    inputs = padded()
    plain = reference(**inputs).logits
    with mode():
        mine, theirs = split(**inputs).logits, reference(**inputs).logits
    close(mine, theirs)
    assert (theirs - plain).abs().max() > 1e-3
    close(split(**inputs).logits, plain)
    with mode():
        assert_same_step(reference, split, inputs)
    with mode(), pytest.raises(IndexError):
        split(input_ids=torch.full((1, 3), 1000))
    assert_parity(reference, split, inputs, steps=1)


class Reads(nn.Module):
    """Reads what a thread has of its own: a context variable and the default device."""

    def __init__(self, variable):
        super().__init__()
        self.up, self.down, self.variable = nn.Linear(6, 10), nn.Linear(10, 6), variable

    def __deepcopy__(self, memo):
        other = Reads(self.variable).double()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * self.variable.get()) + torch.ones(6).to(x)


def test_context_variables_reach_the_model():
    variable = contextvars.ContextVar("scale", default=1.0)
    reference = noisy(Reads(variable).double())
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3, example_inputs={"x": x})
    plain = reference(x)
    close(split(x), plain)
    token = variable.set(5.0)
    close(split(x), reference(x))
    assert (reference(x) - plain).abs().max() > 1e-3
    variable.reset(token)
    close(split(x), plain)


def test_saved_tensor_hooks_of_the_caller_see_the_models_tensors():
    reference, split = pair("llama", 3)
    inputs = padded()
    threads, seen = set(), {"packed": 0, "unpacked": 0}

    def pack(tensor):
        threads.add(threading.get_ident())
        seen["packed"] += 1
        return tensor.clone()

    def unpack(tensor):
        seen["unpacked"] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert_same_step(reference, split, inputs)
    assert threads == {threading.get_ident()}
    assert seen["packed"] > 0
    assert seen["unpacked"] > 0
    with torch.autograd.graph.save_on_cpu():
        assert_same_step(reference, split, inputs)


def test_inference_mode_and_autocast_around_generate():
    reference, split = pair("llama", 2)
    inputs = padded()
    with torch.inference_mode():
        mine, theirs = (m.generate(**inputs, max_new_tokens=5, pad_token_id=0) for m in (split, reference))
    assert torch.equal(mine, theirs)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.no_grad():
        assert split(**inputs).logits.dtype == reference(**inputs).logits.dtype
    assert torch.is_autocast_cache_enabled()
    assert_parity(reference, split, inputs, steps=1)


# Ctrl-C


@contextlib.contextmanager
def ctrl_c(after):
    """SIGINT to this process once, `after` seconds from now."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def steps_for_ever(split, inputs):
    while True:
        split.zero_grad()
        split(**inputs).logits.pow(2).mean().backward()


STAGES = {
    "forward": lambda split, inputs: [split(**inputs) for _ in range(100_000)],
    "generate": lambda split, inputs: [
        split.generate(**inputs, max_new_tokens=20, pad_token_id=0, eos_token_id=None) for _ in range(10_000)
    ],
    "training": steps_for_ever,
    "recomputation": steps_for_ever,
    "a hooked module": steps_for_ever,
}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_at_any_moment_leaves_a_model_that_works(stage):
    reference, split = pair("llama", 3)
    inputs = padded()
    if stage == "recomputation":
        split.train().gradient_checkpointing_enable()
        reference.train()
    handles = []
    if stage == "a hooked module":
        handles.append(split.model.layers[0].mlp.register_forward_hook(lambda m, i, o: o * 1.0))
    for nth in range(12):
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt), ctrl_c(0.03 + 0.0037 * nth):
            STAGES[stage](split, inputs)
        assert time.monotonic() - start < 10
        with torch.no_grad():
            close(split(**inputs).logits, reference(**inputs).logits)
    for handle in handles:
        handle.remove()
    assert_same_step(reference, split, inputs)


# threads, forks, fresh processes


@pytest.mark.parametrize("callers", [2, 4])
def test_callers_in_threads_train_and_generate_on_two_models(callers):
    models = [pair("llama", 2), pair("gpt2", 3)]
    inputs, wrong = padded(), []
    expected = [
        (reference.generate(**inputs, max_new_tokens=4, pad_token_id=0), reference(**inputs).logits)
        for reference, _ in models
    ]

    def work(index):
        try:
            tokens, logits = expected[index % 2]
            split = models[index % 2][1]
            for _ in range(3):
                assert torch.equal(split.generate(**inputs, max_new_tokens=4, pad_token_id=0), tokens)
                found = split(**inputs).logits
                close(found, logits)
                found.pow(2).mean().backward()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


CHILD = {
    "forward": (lambda m, i: m(**i), "forked process"),
    "generate": (lambda m, i: m.generate(**i, max_new_tokens=2), "forked process"),
    "inner": (lambda m, i: m.model.norm(torch.zeros(1, 1, 48, dtype=torch.float64)), "forked process"),
    "state_dict": (lambda m, i: m.state_dict(), "no error"),
    "a call of a copy": (lambda m, i: copy.deepcopy(m)(**i), "no error"),
}


@pytest.mark.parametrize("act", CHILD)
def test_a_forked_child_does_not_hang(act):
    _, split = pair("llama", 2)
    inputs = padded()
    split(**inputs)
    work, expected = CHILD[act]
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forking with threads
        child = os.fork()
    if child == 0:
        try:
            work(split, inputs)
            said = "no error"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said[:4000].encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    said = os.read(read, 4096).decode()
    os.close(read)
    assert said.startswith("RuntimeError") or said == "no error", said
    assert expected in said


SCRIPT = """
import sys, torch, tensor_parallel as tp
model = torch.load(sys.argv[1], weights_only=False)
assert isinstance(model, tp.TensorParallel), type(model)
inputs, expected = torch.load(sys.argv[2])
model.zero_grad()
found = model(**inputs).logits
found.sum().backward()
torch.testing.assert_close(found.detach(), expected)
print("same")
"""


def test_a_pickle_loads_in_a_fresh_process_which_ends_quietly_with_the_model_alive(tmp_path):
    reference, split = pair("llama", 2)
    inputs = dict(padded())
    torch.save(split, tmp_path / "model")
    torch.save((inputs, reference(**inputs).logits.detach()), tmp_path / "io")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), str(tmp_path / "io")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"
    assert done.stderr == ""


# refusals that no other file has


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_dual_tensors_in_place_of_parameters_raise_by_name():
    reference, split = pair("llama", 2)
    inputs = padded()
    weight = split.model.norm.weight
    with fwad.dual_level():
        del split.model.norm.weight  # as torch's tutorial does
        split.model.norm.weight = fwad.make_dual(weight.detach(), torch.ones_like(weight))
        with pytest.raises(NotImplementedError, match="split"):
            split(**inputs)
    del split.model.norm.weight
    split.model.norm.weight = weight
    assert_parity(reference, split, inputs, steps=1)


@pytest.mark.parametrize("name", ["up", "down"])
def test_a_plain_tensor_in_place_of_a_deleted_parameter_is_followed(name):
    models = []
    reference = noisy(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).double())
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3, example_inputs=(x,))
    split(x)
    for model in (reference, split):
        linear = model[0 if name == "up" else 2]
        shape = (10, 6) if name == "up" else (6, 10)
        del linear.weight
        linear.weight = torch.linspace(-1, 1, 60, dtype=torch.float64).view(shape)
        models.append(model(x))
    close(models[1], models[0])
    assert sorted(split.state_dict()) == sorted(reference.state_dict())


class Forces(nn.Module):
    """Takes a gradient inside its forward, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.up, self.down, self.way = nn.Linear(6, 10), nn.Linear(10, 6), way

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            hidden = torch.tanh(self.up(x))
            out = self.down(hidden)
            energy = (hidden if "hidden" in self.way else out).pow(2).sum()
            if self.way == "backward":
                energy.backward()
                return out + x.grad
            of = {"x": x, "out": out, "hidden": hidden}[self.way.split()[-1]]
            force = torch.autograd.grad(energy, of, create_graph=True)[0]
            return self.down(hidden + force) if of is hidden else out + force


@pytest.mark.parametrize("way", ["to out", "of hidden to hidden", "to x", "of hidden to x", "backward"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_inside_cut_layers_is_right_or_raises(way, ranks):
    reference = noisy(Forces(way).double())
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs={"x": x})
    assert any("@" in name for name, _ in split.named_parameters())
    if way in ("to x", "of hidden to x", "backward"):
        with pytest.raises(NotImplementedError, match="inside a rank"):
            split(x)
        return
    (mine, my_grads), (theirs, their_grads) = (stepped(m, x) for m in (split, reference))
    close(mine, theirs)
    for name, gradient in their_grads.items():
        close(my_grads[name], gradient)


def stepped(model, x):
    out = model(x)
    out.pow(2).sum().backward()
    if isinstance(model, tp.TensorParallel):
        return out, tp.full_gradients(model)
    return out, {name: p.grad for name, p in model.named_parameters()}
