"""tp.verify passes right splits, catches wrong ones, and leaves both models as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tensor_parallel as tp
from tensor_parallel.shard import shards_of
from tensor_parallel.testing import ConvNet, Gpt, Mlp, noisy


def split_of(model, ranks=2, inputs=None):
    split = tp.tensor_parallel(
        copy.deepcopy(model), ["cpu"] * ranks, example_inputs=inputs or {k: v for k, v in model.inputs().items()}
    )
    return split


@pytest.fixture
def gpt():
    model = noisy(Gpt().double().eval())
    return model, split_of(model)


def spoil(split, key, change):
    """Change one piece of one tensor in place."""
    with torch.no_grad():
        change(shards_of(split).tensors[key].pieces[-1].tensor)


def test_a_right_split_passes(gpt):
    model, split = gpt
    found = tp.verify(split, model, model.inputs())
    assert found.passed
    assert bool(found)
    assert found.failures == []
    kinds = {check.what: sum(c.what == check.what for c in found.checks) for check in found.checks}
    parameters = len(list(model.parameters()))
    state = len(model.state_dict())
    assert kinds == {"output": 1, "gradient": parameters, "state": state, "gradient norm": 1, "step": state}
    assert found.where == ""
    assert all(check.tolerance == 1e-9 for check in found.checks)
    name, difference = found.worst
    assert difference < 1e-9
    assert name
    assert "equal to the reference" in str(found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_splits_pass_in_coarse_dtypes(dtype, ranks):
    model = noisy(Gpt().eval()).to(dtype)
    split = split_of(model, ranks)
    found = tp.verify(split, model, model.inputs())
    assert found.passed, str(found)
    assert found.checks[0].tolerance >= 1e-4


def test_a_wrong_element_is_found_in_outputs_gradients_and_steps(gpt):
    model, split = gpt
    spoil(split, "h.1.c_proj.bias", lambda t: t.view(-1)[0].add_(1e-6))
    found = tp.verify(split, model, model.inputs())
    assert not found.passed
    assert not found
    failed = {check.what for check in found.failures}
    assert "output" in failed
    assert "step" in failed
    assert "DIFFERS" in str(found)
    with pytest.raises(tp.VerificationError, match=r"first: output output.*worst: "):
        tp.verify(split, model, model.inputs(), raise_on_failure=True)


def test_the_first_module_that_differs_is_named(gpt):
    model, split = gpt
    spoil(split, "h.1.c_proj.bias", lambda t: t.view(-1)[0].add_(1e-6))
    found = tp.verify(split, model, model.inputs())
    assert found.where == "the first module whose output differs is h.1.c_proj"
    assert found.where in str(found)
    assert {check.name for check in found.failures if check.what == "state"} == {"h.1.c_proj.bias"}


def test_a_state_that_would_be_saved_otherwise_is_found(gpt):
    model, split = gpt
    split.register_buffer("extra", torch.ones(2))
    found = tp.verify(split, model, model.inputs(), step=False)
    assert [(c.what, c.name, c.note) for c in found.failures] == [("state", "extra", "only the split model has it")]


def test_in_float32_a_wrong_bias_is_not_taken_for_noise():
    model = noisy(Gpt().float().eval())
    split = split_of(model, 3)
    spoil(split, "h.1.c_proj.bias", lambda t: t.mul_(3))
    assert not tp.verify(split, model, model.inputs(), gradients=False).passed


def test_a_gradient_that_differs_alone_is_found():
    class Detached(nn.Module):
        """Gives right outputs, and a gradient that depends on how it is built."""

        def __init__(self, scale=1.0):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.scale = scale

        def forward(self, x):
            y = self.lin(x)
            return y * self.scale + (y * (1 - self.scale)).detach()

    model = noisy(Detached().double())
    other = copy.deepcopy(model)
    other.scale = 0.5
    inputs = {"x": torch.randn(3, 4, dtype=torch.float64)}
    split = split_of(other, 2, inputs)
    found = tp.verify(split, model, inputs)
    assert {check.what for check in found.failures} >= {"gradient", "gradient norm"}
    assert "output" not in {check.what for check in found.failures}
    assert tp.verify(split, model, inputs, gradients=False).passed


def state_of(model):
    trees = shards_of(model).trees if isinstance(model, tp.TensorParallel) else [model]
    return {
        "values": [t.detach().clone() for tree in trees for t in [*tree.parameters(), *tree.buffers()]],
        "grads": [id(p.grad) for tree in trees for p in tree.parameters()],
        "modes": [m.training for tree in trees for m in tree.modules()],
        "flags": [p.requires_grad for tree in trees for p in tree.parameters()],
    }


@pytest.mark.parametrize("fails", [False, True])
def test_both_models_are_left_as_they_were(fails):
    model = noisy(ConvNet().double()).train()
    model.stem_norm.eval()
    split = split_of(model, 3)
    inputs, wrong = model.inputs(), {"pixels": torch.randn(1, 4, 8, 8, dtype=torch.float64)}
    for each in (model, split):
        each(**inputs).sum().backward()
    torch.manual_seed(11)
    expected = torch.rand(2)
    torch.manual_seed(11)
    before = [state_of(each) for each in (model, split)]
    if fails:
        with pytest.raises(RuntimeError):
            tp.verify(split, model, wrong)
    else:
        with torch.no_grad():
            assert tp.verify(split, model, inputs, steps=2).passed
    assert torch.equal(torch.rand(2), expected)
    for each, old in zip((model, split), before, strict=True):
        new = state_of(each)
        assert all(torch.equal(a, b) for a, b in zip(new["values"], old["values"], strict=True))
        assert {k: v for k, v in new.items() if k != "values"} == {k: v for k, v in old.items() if k != "values"}


def test_several_inputs_and_their_forms(gpt):
    model, split = gpt
    cases = [model.inputs(), model.inputs(batch=1, length=3, seed=4)]
    found = tp.verify(split, model, cases)
    assert found.passed
    assert [c.name for c in found.checks if c.what == "output"] == ["output (inputs 0)", "output (inputs 1)"]
    ids = model.inputs()["ids"]
    for form in ((ids,), [ids], ids):
        assert tp.verify(split, model, form, step=False).passed


def test_gradients_of_floating_inputs_that_require_one():
    model = noisy(Mlp((6, 10, 6)).double())
    split = split_of(model)
    inputs = model.inputs()
    inputs["x"].requires_grad_()
    found = tp.verify(split, model, inputs)
    assert found.passed
    assert [c.name for c in found.checks if c.what == "input gradient"] == ["x"]
    assert inputs["x"].grad is None


def test_frozen_parameters_and_another_optimiser(gpt):
    model, split = gpt
    for each in (model, split):
        each.h[0].requires_grad_(False)
    found = tp.verify(split, model, model.inputs(), step=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert found.passed, str(found)


class Late(nn.Module):
    """The same outputs and gradients for every `late`, as long as the weight is what it was made with."""

    def __init__(self, late=0.0):
        super().__init__()
        self.lin, self.late = nn.Linear(4, 6), late
        self.register_buffer("start", self.lin.weight.detach().sum())

    def forward(self, x):
        return self.lin(x) + self.late * (self.lin.weight.sum() - self.start) ** 2


def late_pair(late):
    torch.manual_seed(0)
    model = Late().double()
    model.start = model.lin.weight.detach().sum()
    other = copy.deepcopy(model)
    other.late = late
    inputs = {"x": torch.randn(3, 4, dtype=torch.float64)}
    return model, split_of(other, 1, inputs), inputs


def test_more_steps_see_what_one_does_not():
    model, split, inputs = late_pair(1e3)
    assert tp.verify(split, model, inputs).passed
    found = tp.verify(split, model, inputs, steps=2)
    assert {(c.what, c.name) for c in found.failures} >= {("gradient norm", "step 2"), ("step", "lin.weight")}
    assert {c.what for c in found.failures} == {"gradient norm", "step"}
    assert found.where == "no module's output differs: it is in the backward, the saved state or the steps"
    assert tp.verify(late_pair(0.0)[1], model, inputs, steps=2).passed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_several_steps_of_a_right_split(dtype):
    model = noisy(Gpt().eval()).to(dtype)
    split = split_of(model, 3)
    cases = [model.inputs(), model.inputs(batch=1, length=3, seed=4)]
    found = tp.verify(split, model, cases, steps=4)
    assert found.passed, str(found)
    assert [c.name for c in found.checks if c.what == "gradient norm"] == [f"step {n}" for n in (1, 2, 3, 4)]
    assert {c.name for c in found.checks if c.what == "step"} == set(model.state_dict())


def test_steps_that_fail_leave_both_models_and_their_graphs(gpt):
    model, split = gpt
    losses = [each(**model.inputs()).sum() for each in (model, split)]
    before = [state_of(each) for each in (model, split)]
    assert tp.verify(split, model, model.inputs(), steps=2).passed

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        tp.verify(split, model, model.inputs(), step=lambda parameters: Failing(parameters, lr=1.0))
    for each, old in zip((model, split), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state_of(each)["values"], old["values"], strict=True))
    for loss in losses:
        loss.backward()


def test_tokens():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=30, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = noisy(transformers.LlamaForCausalLM(config).double().eval())
    split = tp.tensor_parallel(copy.deepcopy(model), ["cpu"] * 2)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = tp.verify(split, model, inputs, generate=9)
    assert found.passed, str(found)
    assert [c.name for c in found.checks if c.what == "tokens"] == ["9 tokens"]
    spoil(split, "model.norm.weight", lambda t: t.copy_(t.flip(0)))
    wrong = tp.verify(split, model, inputs, generate=9, gradients=False)
    (tokens,) = [c for c in wrong.failures if c.what == "tokens"]
    assert "differs from new token" in tokens.note
    assert "margin of the two best" in tokens.note


def test_arguments_that_do_not_go_together(gpt):
    model, split = gpt
    with pytest.raises(ValueError, match="the split model itself"):
        tp.verify(split, split, model.inputs())
    with pytest.raises(ValueError, match="has no generate"):
        tp.verify(split, model, model.inputs(), generate=3)
    with pytest.raises(ValueError, match="at least 1"):
        tp.verify(split, model, model.inputs(), generate=0)
    for steps in (0, True, 1.5):
        with pytest.raises(ValueError, match=f"steps is {steps}; give a number"):
            tp.verify(split, model, model.inputs(), steps=steps)
    with pytest.raises(ValueError, match="steps=2, but gradients or step is off"):
        tp.verify(split, model, model.inputs(), steps=2, gradients=False)
    with pytest.raises(tp.TensorParallelError, match="not split"):
        tp.verify(copy.deepcopy(model), model, model.inputs())
