"""User code at modules of a split model: it sees whole values, once, in the order of the unsplit model."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from families import build
from families import padded as padded_batch
from torch import nn

import tensor_parallel as tp
from tensor_parallel.testing import Mlp, noisy

FAMILIES = ["llama", "gpt2", "bert"]


def eager_pair(family, ranks, **changes):
    reference = build(family, attn_implementation="eager", **changes)
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)


def padded():
    batch = padded_batch(left=False)
    return batch["input_ids"], batch["attention_mask"]


def gradients(model):
    if isinstance(model, tp.TensorParallel):
        return tp.full_gradients(model)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(mine, theirs, where=""):
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-10, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b, where)
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), where
        for name in theirs:
            assert_same(mine[name], theirs[name], f"{where} {name}")
    else:
        assert mine == theirs, where


def watched(model, wanted):
    """(what forward hooks saw in order, what backward hooks saw by module) of one training forward."""
    forward, backward = [], {}
    names = {id(module): name for name, module in model.named_modules()}
    tensors = lambda values: [value for value in values if isinstance(value, torch.Tensor)]  # noqa: E731

    def pre(module, args, kwargs):
        forward.append((names[id(module)], "in", tensors(args), tensors(kwargs.values())))

    def post(module, args, kwargs, output):
        items = [output] if isinstance(output, torch.Tensor) else list(dict(enumerate(output)).values())
        forward.append((names[id(module)], "out", tensors(args), tensors(items)))

    def back(module, grad_in, grad_out):
        backward[names[id(module)]] = (tensors(grad_in), tensors(grad_out))

    def back_pre(module, grad_out):
        backward[names[id(module)] + " before"] = tensors(grad_out)

    handles = []
    for name, module in model.named_modules():
        if name and wanted(name, module):
            handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
            handles.append(module.register_forward_hook(post, with_kwargs=True))
            handles.append(module.register_full_backward_hook(back))
            handles.append(module.register_full_backward_pre_hook(back_pre))
    ids, mask = padded()
    model.zero_grad()
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    for handle in handles:
        handle.remove()
    return forward, dict(sorted(backward.items())), gradients(model)


WANTED = {
    "everything": lambda name, module: True,
    "inside attention": lambda name, module: name.endswith(("o_proj", "q_proj", "c_proj", "c_attn", "self.query")),
    "one layer": lambda name, module: name.endswith(("layers.1", "h.1", "layer.1")),
}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_see_whole_values_and_gradients(family, wanted, ranks):
    reference, split = eager_pair(family, ranks)
    theirs = watched(reference, WANTED[wanted])
    mine = watched(split, WANTED[wanted])
    assert [entry[:2] for entry in mine[0]] == [entry[:2] for entry in theirs[0]]
    assert theirs[0], "no module was hooked"
    for a, b in zip(mine[0], theirs[0], strict=True):
        assert_same(a, b, " ".join(b[:2]))
    assert_same(mine[1], theirs[1])
    assert_same(mine[2], theirs[2])


@pytest.mark.parametrize("ranks", [2, 4])
def test_hooks_may_return_values(ranks):
    reference, split = eager_pair("llama", ranks)
    results = []
    for model in (reference, split):
        layer = model.model.layers[0]
        handles = [
            layer.self_attn.o_proj.register_forward_hook(lambda m, args, out: out * 1.5),
            layer.mlp.down_proj.register_forward_pre_hook(lambda m, args: (args[0] * 0.5 + 1,)),
            layer.mlp.up_proj.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)),
            model.model.layers[1].register_forward_pre_hook(
                lambda m, args, kwargs: (args, {**kwargs, "position_ids": None}), with_kwargs=True
            ),
        ]
        ids, mask = padded()
        model.zero_grad()
        output = model(input_ids=ids, attention_mask=mask, labels=ids)
        output.loss.backward()
        results.append((output.logits, gradients(model)))
        for handle in handles:
            handle.remove()
    assert_same(results[1], results[0])
    ids, mask = padded()
    assert_same(split(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits)


def test_a_hook_may_call_modules_of_the_model():
    """Logit lens, a hooked module inside a hooked module, and the module itself once more."""
    reference, split = eager_pair("llama", 3)
    found = []
    for model in (reference, split):
        seen = []

        def lens(module, args, output, model=model, seen=seen):
            hidden = output[0] if isinstance(output, tuple) else output
            seen.append(model.lm_head(model.model.norm(hidden)))
            seen.append(model.model.layers[1].mlp.down_proj.weight.requires_grad)
            with torch.no_grad():
                seen.append(model.model.layers[0].mlp(hidden))
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled()

        def again(module, args, output, seen=seen):
            if len(seen) < 20:
                seen.append(type(module).forward(module, *args))

        handles = [
            model.model.layers[0].register_forward_hook(lens),
            model.model.layers[0].mlp.register_forward_hook(again),
        ]
        ids, mask = padded()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        (loss + seen[1].pow(2).mean()).backward()
        found.append((seen, gradients(model)))
        for handle in handles:
            handle.remove()
    assert len(found[0][0]) > 4
    assert_same(found[1], found[0])


def test_hooks_set_before_the_split_and_global_ones():
    reference = noisy(Mlp().double())
    reference.layers[1].register_forward_hook(lambda m, args, out: out + args[0].sum())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs=reference.inputs())
    inputs = reference.inputs()
    assert_same(split(**inputs), reference(**inputs))
    found = []
    for model in (reference, split):
        seen = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, args, out, seen=seen: seen.append((type(m).__name__, out))
        )
        try:
            model(**inputs)
        finally:
            handle.remove()
        found.append(seen)
    assert [name for name, _ in found[0]].count("Linear") >= 2
    assert_same(found[1], found[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_patched_forward_acts_on_all_ranks(ranks):
    reference, split = eager_pair("llama", ranks)
    for model in (reference, split):
        for module in (model.model.layers[0].mlp, model.model.layers[1].self_attn.o_proj, model):
            inner = module.forward

            def patched(*args, inner=inner, scale=2.0 if module is not model else 1.0, **kwargs):
                output = inner(*args, **kwargs)
                return output * scale if scale != 1 else output

            module.forward = patched
    ids, mask = padded()
    results = []
    for model in (reference, split):
        output = model(input_ids=ids, attention_mask=mask, labels=ids)
        output.loss.backward()
        results.append((output.logits, gradients(model)))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_attentions_are_whole_and_keep_their_gradients(family, ranks):
    reference, split = eager_pair(family, ranks)
    ids, mask = padded()
    found = []
    for model in (reference, split):
        output = model(ids, attention_mask=mask, labels=ids, output_hidden_states=True, output_attentions=True)
        for hidden in output.hidden_states:
            hidden.retain_grad()
        by_hand = torch.autograd.grad(output.loss, output.hidden_states[1], retain_graph=True)
        output.loss.backward()
        found.append(
            (output.hidden_states, output.attentions, [h.grad for h in output.hidden_states], by_hand, gradients(model))
        )
    assert found[0][1][0].shape[1] > 1
    assert_same(found[1], found[0])


def collecting(kind, ranks, **examples):
    """A model whose own code collects hidden states and attentions, without recorders."""
    import transformers

    sizes = {"vocab_size": 101, "n_layer": 2, "n_head": 4}
    if kind == "bloom":
        config = transformers.BloomConfig(hidden_size=32, hidden_dropout=0.0, attention_dropout=0.0, **sizes)
        model = transformers.BloomForCausalLM(config)
    else:
        config = transformers.OpenAIGPTConfig(
            n_embd=32, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
        )
        model = transformers.OpenAIGPTLMHeadModel(config)
    reference = noisy(model.double().eval())
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, **examples)


@pytest.mark.parametrize("kind", ["bloom", "openai"])
def test_attentions_collected_by_the_models_own_code_are_whole(kind):
    ids = torch.arange(14).view(2, 7)
    asked = {"example_inputs": {"input_ids": ids, "output_attentions": True}} if kind == "openai" else {}
    reference, split = collecting(kind, 3, **asked)
    found = []
    for model in (reference, split):
        output = model(ids, output_attentions=True, output_hidden_states=True)
        for hidden in output.hidden_states:
            hidden.retain_grad()
        output.logits.pow(2).mean().backward()
        found.append((output.attentions, output.hidden_states, [h.grad for h in output.hidden_states]))
    assert len(found[0][0]) == 2
    assert_same(found[1], found[0])
    assert_same(split(ids).logits, reference(ids).logits)


def test_attentions_that_no_module_gives_unless_asked_are_refused_with_the_cure():
    ids = torch.arange(14).view(2, 7)
    reference, split = collecting("openai", 2)
    with pytest.raises(tp.PlanError, match="'output_attentions': True"):
        split(ids, output_attentions=True)
    assert_same(split(ids).logits, reference(ids).logits)


def test_planning_leaves_no_hooks_behind():
    model = build("llama", attn_implementation="eager")
    ids, _ = padded()
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda *args: seen.append(args))
    tp.make_plan(model, 2, {"input_ids": ids, "output_attentions": True})
    assert not seen, "the user's hook ran while planning"
    handle.remove()
    assert not [name for name, module in model.named_modules() if module._forward_hooks]


@pytest.mark.parametrize("family", FAMILIES)
def test_none_asks_for_what_it_asks_for_unsplit(family):
    reference = build(family)
    reference.set_attn_implementation("eager")
    reference.config.output_attentions = reference.config.output_hidden_states = True
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    ids, mask = padded()
    given = {"attention_mask": mask, "output_attentions": None, "output_hidden_states": None}
    wanted, found = reference(ids, **given), split(ids, **given)
    assert found.keys() == wanted.keys()
    for name in ("attentions", "hidden_states"):
        assert_same(found.get(name), wanted.get(name))


def test_attentions_of_an_implementation_that_the_plan_was_not_made_for():
    reference = build("llama")
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    for model in (reference, split):
        model.set_attn_implementation("eager")
    ids, mask = padded()
    assert_same(split(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits)
    wanted, found = (m(ids, attention_mask=mask, output_attentions=True).attentions for m in (reference, split))
    assert len(found) == len(wanted) > 0
    for theirs, mine in zip(wanted, found, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("place", ["hook", "called by a hook", "caught"])
def test_an_error_in_user_code_frees_the_ranks_and_reaches_the_caller(place):
    reference, split = eager_pair("llama", 3)

    def fails(module, args, output):
        if place == "hook":
            raise KeyError("the hook's own")
        try:
            split.lm_head(output[..., :-1])  # the wrong width
        except Exception:
            if place == "called by a hook":
                raise

    handle = split.model.layers[0].mlp.register_forward_hook(fails)
    ids, mask = padded()
    with pytest.raises(KeyError if place == "hook" else Exception) as caught:
        split(ids, attention_mask=mask)
    assert caught.value.__notes__
    handle.remove()
    assert_same(split(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits)


def test_hooks_work_while_decoding_and_cost_no_collective_elsewhere():
    reference, split = eager_pair("llama", 2)
    ids, mask = padded()
    tokens = []
    for model in (reference, split):
        seen = []
        handle = model.model.layers[1].self_attn.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out[0]))
        made = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        handle.remove()
        tokens.append((made, seen))
    assert len(tokens[0][1]) == 5
    assert_same(tokens[1], tokens[0])


def test_hooks_of_models_in_training_draw_what_the_unsplit_model_draws():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x + self.down(torch.relu(self.up(x))))

    reference = noisy(Net().double())
    x = torch.randn(5, 6, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs=(x,))
    found = []
    for model in (reference, split):
        handle = model.down.register_forward_hook(lambda m, args, out: out + torch.rand_like(out))
        torch.manual_seed(3)
        found.append((model(x), torch.rand(1)))
        handle.remove()
    assert_same(found[1], found[0])


def test_a_hook_does_not_see_the_ranks_own_sizes():
    _, split = eager_pair("llama", 2)
    attention, seen = split.model.layers[0].self_attn, []
    handle = attention.register_forward_hook(
        lambda m, args, out: seen.append((m.num_key_value_groups, m.q_proj.out_features, threading.get_ident()))
    )
    split(*padded()[:1])
    handle.remove()
    assert [entry[:2] for entry in seen] == [(2, 48)]
