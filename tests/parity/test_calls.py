"""What a caller does around a forward: modes, autocast, an error in one rank, several models and threads, the end."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from families import build, padded, pair
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import Gpt, Mlp, assert_parity, noisy


def split_of(model, ranks):
    reference = noisy(model.double().eval())
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=reference.inputs())


# G5: what a new thread does not have by itself
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_grad_modes_reach_the_ranks_and_are_undone(ranks):
    reference, split = split_of(Gpt(), ranks)
    inputs = reference.inputs()
    assert split(**inputs).requires_grad
    with torch.no_grad():
        out = split(**inputs)
    assert not out.requires_grad
    assert out.grad_fn is None
    with torch.inference_mode():
        out = split(**inputs)
        assert out.is_inference()
    with torch.no_grad(), torch.enable_grad():
        assert split(**inputs).requires_grad
    assert split(**inputs).requires_grad
    assert_parity(reference, split, inputs)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_autocast_reaches_the_ranks_and_is_undone(ranks):
    reference = noisy(Gpt().float().eval())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=reference.inputs())
    inputs = reference.inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mine, theirs = split(**inputs), reference(**inputs)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()
    assert split(**inputs).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        for model in (split, reference):
            model(**inputs).float().pow(2).mean().backward()
    gradients = tp.full_gradients(split)
    for name, parameter in reference.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert gradients[name].dtype == torch.float32
        assert error < 0.1, name


def test_the_default_dtype_of_new_tensors_is_the_callers():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x) + torch.ones(4).to(x.dtype) * torch.finfo(torch.get_default_dtype()).eps

    reference = Made().double()
    x = torch.randn(2, 4, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs={"x": x})
    torch.set_default_dtype(torch.float64)
    assert torch.allclose(split(x), reference(x), rtol=0, atol=1e-15)


# G6: one rank fails
class Alarm:
    """Raises in the n-th of the calls while it is armed; one object for all ranks."""

    def __init__(self):
        self.lock = threading.Lock()
        self.left = None

    def __deepcopy__(self, memo):
        return self

    def arm(self, nth):
        self.left = nth

    def ring(self):
        with self.lock:
            if self.left is None:
                return
            self.left -= 1
            if self.left == 0:
                raise KeyError("the alarm rang")


class Alarmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Mlp((6, 10, 6))
        self.bell = Bell()
        self.after = Mlp((6, 10, 6))

    def forward(self, x):
        return self.after(self.bell(self.net(x)))

    def inputs(self):
        return self.net.inputs()


class Bell(nn.Module):
    def __init__(self):
        super().__init__()
        self.alarm = Alarm()

    def forward(self, x):
        self.alarm.ring()
        return x * 1.0


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_error_in_one_rank_frees_the_others_and_the_next_call_works(nth):
    reference, split = split_of(Alarmed(), 3)
    inputs = reference.inputs()
    for _ in range(3):
        split.bell.alarm.arm(nth)
        start = time.monotonic()
        with pytest.raises(KeyError, match="the alarm rang") as caught:
            split(**inputs)
        assert time.monotonic() - start < 5
        assert any("rank" in note for note in caught.value.__notes__)
        split.bell.alarm.arm(None)
        assert torch.allclose(split(**inputs), reference(**inputs), rtol=1e-9, atol=1e-12)
    reference.bell.alarm.arm(None)
    assert_parity(reference, split, inputs)


def test_a_wrong_input_says_what_the_unsplit_model_says():
    reference, split = split_of(Gpt(), 2)
    wrong = {"ids": torch.full((1, 3), 101)}
    with pytest.raises(IndexError):
        reference(**wrong)
    with pytest.raises(IndexError):
        split(**wrong)
    with pytest.raises(TypeError, match="nonsense"):
        split(nonsense=1)
    assert_parity(reference, split, reference.inputs())


def test_two_models_in_one_process():
    first, first_split = split_of(Gpt(), 2)
    second, second_split = pair("llama", 3)
    third, third_split = split_of(Gpt(heads=4, width=16), 2)
    for _ in range(2):
        assert_parity(first, first_split, first.inputs())
        assert_parity(second, second_split, padded())
        assert_parity(third, third_split, third.inputs())
    del first_split
    gc.collect()
    assert_parity(second, second_split, padded(), steps=1)
    with pytest.raises(AssertionError):
        assert_parity(second, build_other(), padded())


def build_other():
    return tp.tensor_parallel(build("llama", seed=4), ["cpu"] * 2)


def test_several_caller_threads():
    models = [split_of(Gpt(), 2), split_of(Mlp((6, 10, 6)), 3)]
    wrong = []

    def work(index):
        reference, split = models[index % 2]
        inputs = reference.inputs(batch=index + 1)
        with torch.no_grad():
            expected = reference(**inputs)
            for _ in range(5):
                if not torch.allclose(split(**inputs), expected, rtol=1e-9, atol=1e-12):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []


def test_del_ends_the_threads_and_frees_the_tensors_without_the_collector():
    before = set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        _, split = split_of(Gpt(), 3)
        split(**Gpt().inputs()).sum().backward()
        own = [t for t in threading.enumerate() if t not in before]
        parts = [weakref.ref(p) for p in split.parameters()]
        assert len(own) >= 3
        del split
        deadline = time.monotonic() + 5
        while any(t.is_alive() for t in own) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(t.is_alive() for t in own)
        assert [ref for ref in parts if ref() is not None] == []
    finally:
        gc.enable()


def test_modes_and_casts_reach_every_rank():
    reference, split = split_of(Gpt(), 3)
    assert split.train().training
    assert all(m.training for m in split.modules())
    assert not any(m.training for m in split.eval().modules())
    split.to("cpu")
    half = split.bfloat16()
    assert half is split
    assert {p.dtype for p in split.parameters()} == {torch.bfloat16}
    out = split(**reference.inputs())
    expected = copy.deepcopy(reference).bfloat16()(**reference.inputs())
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() < 0.05 * expected.abs().max()
    split.double()
    rounded = copy.deepcopy(reference).bfloat16().double()
    assert_parity(rounded, split, reference.inputs())
