"""Inner modules called from outside: on all ranks, whole tensors in, whole tensors out, gradients too."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from families import build, padded
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import noisy

FAMILIES = ["llama", "qwen3", "gpt2", "bert"]


def close(mine, theirs, where=""):
    torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-10, msg=lambda text: f"{where}: {text}")


def calls_of(model, inputs):
    """(module, args, kwargs) of the first call of every module in one forward."""
    found, handles = {}, []

    def note(module, args, kwargs, name):
        found.setdefault(name, (copy.deepcopy(args), copy.deepcopy(kwargs)))

    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            hook = lambda m, a, k, name=name: note(m, a, k, name)  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model(**inputs, **({"use_cache": False} if "use_cache" in model.config.to_dict() else {}))
    for handle in handles:
        handle.remove()
    return found


def first_tensor(output):
    if isinstance(output, torch.Tensor):
        return output
    values = list(output.values()) if isinstance(output, dict) else list(output)
    return first_tensor(values[0])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_can_be_called_by_itself(family, ranks):
    reference = build(family)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)
    calls = calls_of(reference, padded(left=False))
    assert len(calls) > 20
    for name, (args, kwargs) in calls.items():
        outputs, leaves = [], []
        for model in (reference, split):
            own = [a.clone().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
            model.zero_grad()
            output = first_tensor(model.get_submodule(name)(*own, **kwargs))
            if output.requires_grad:
                weight = torch.linspace(0.1, 1, output.numel(), dtype=output.dtype).view_as(output)
                (output * weight).sum().backward()
            outputs.append(output)
            leaves.append([a.grad for a in own if torch.is_tensor(a) and a.is_floating_point()])
        close(outputs[1], outputs[0], name)
        close(leaves[1], leaves[0], f"input gradient of {name}")
        mine = tp.full_gradients(split)
        theirs = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        assert set(theirs) <= set(mine), name
        for parameter, gradient in mine.items():
            close(gradient, theirs.get(parameter, torch.zeros_like(gradient)), f"{parameter} after {name}")


def test_the_usual_names():
    reference = build("llama")
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    ids = padded()["input_ids"]
    hidden = reference.model(ids).last_hidden_state
    close(split.model(ids).last_hidden_state, hidden)
    close(split.get_input_embeddings()(ids), reference.get_input_embeddings()(ids))
    close(split.lm_head(hidden), reference.lm_head(hidden))
    close(split.get_output_embeddings()(hidden), reference.lm_head(hidden))
    close(split.base_model(ids).last_hidden_state, hidden)
    embedded = split.get_input_embeddings()(ids)
    close(split(inputs_embeds=embedded).logits, reference(ids).logits)


def test_an_encoder_by_itself_and_its_output_handed_back():
    config = transformers.T5Config(
        vocab_size=101,
        d_model=24,
        d_kv=4,
        d_ff=20,
        num_layers=2,
        num_heads=6,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    reference = noisy(transformers.T5ForConditionalGeneration(config).double().eval())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3)
    ids = padded()["input_ids"]
    mine, theirs = (model.get_encoder()(ids) for model in (split, reference))
    close(mine.last_hidden_state, theirs.last_hidden_state)
    decoder = torch.tensor([[0, 5, 6]] * 3)
    a = split(encoder_outputs=mine, decoder_input_ids=decoder)
    b = reference(encoder_outputs=theirs, decoder_input_ids=decoder)
    close(a.logits, b.logits)


def test_a_list_of_inputs_and_a_module_that_the_forward_does_not_reach():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.spare = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    reference = noisy(Net().double())
    x = torch.randn(4, 6, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs=(x,))
    close(split.spare(x), reference.spare(x))
    close(split.down(split.up(x).relu()), reference(x))
