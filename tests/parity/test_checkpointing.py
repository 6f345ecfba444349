"""Activation checkpointing inside split models and around them: the unsplit model's numbers, and its memory."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from families import CLASSES, config
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint, checkpoint_sequential

import tensor_parallel as tp
from tensor_parallel.testing import noisy

FAMILIES = ["llama", "qwen3", "gpt2"]
DROPOUT = {
    "llama": {"attention_dropout": 0.1},
    "qwen3": {"attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1},
}


def build(family, **changes):
    torch.manual_seed(0)
    return noisy(CLASSES[family](config(family, **changes)).double().train())


def batch(seed=1):
    ids = torch.randint(3, 101, (3, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def close(mine, theirs, tolerance=1e-11):
    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def gradients(model):
    if isinstance(model, tp.TensorParallel):
        return tp.full_gradients(model)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_equal(split, reference, tolerance=1e-11):
    mine, theirs = gradients(split), gradients(reference)
    assert list(mine) == list(theirs)
    for name in theirs:
        close(mine[name], theirs[name], tolerance)


def decay_groups(model):
    decays = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    others = [(n, p) for n, p in model.named_parameters() if p.dim() <= 1]
    return [
        {"params": [p for _, p in decays], "weight_decay": 0.1},
        {"params": [p for _, p in others], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_clipped_adamw_steps(family, ranks, reentrant):
    reference = build(family, **DROPOUT.get(family, {}))
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)
    losses = []
    for model in (reference, split):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2)
        torch.manual_seed(4)
        for step in range(3):
            loss = model(**batch(step)).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            losses.append((loss.detach(), norm))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(torch.rand(1))
    half = len(losses) // 2
    for mine, theirs in zip(losses[half:], losses[:half], strict=True):
        close(mine, theirs, 1e-9)
    for (name, mine), theirs in zip(split.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


class Saved:
    """Counts and sizes what is saved for backward under it."""

    def __init__(self):
        self.count = self.bytes = 0

    def __enter__(self):
        def pack(tensor):
            self.count += 1
            self.bytes += tensor.nbytes
            return tensor

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_it_saves_what_it_saves_unsplit(family):
    ranks = 2
    reference = build(family)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)
    counts = {}
    for name, model in (("unsplit", reference), ("split", split)):
        for on in (False, True):
            if on:
                model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            with Saved() as saved:
                _ = model(**batch()).loss
            counts[name, on] = saved.count
    assert counts["unsplit", True] < counts["unsplit", False] / 2
    assert counts["split", True] < counts["split", False] / 2
    # Rank 0 keeps what the unsplit model keeps; the others less, where no gradient leads.
    assert counts["split", True] <= ranks * counts["unsplit", True]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_switched_on_before_the_split_and_off_after_it(family):
    reference = build(family, **DROPOUT.get(family, {}))
    reference.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3)
    counts = []
    for on in (True, False):
        for model in (reference, split):
            if not on:
                model.activation_checkpointing_disable()
            model.zero_grad()
            torch.manual_seed(2)
            with Saved() as saved:
                loss = model(**batch()).loss
            loss.backward()
            counts.append((saved.count, loss.detach()))
        assert_gradients_equal(split, reference)
        close(counts[-1][1], counts[-2][1])
    assert counts[1][0] < counts[3][0] / 2


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_around_the_whole_model(reentrant, inner):
    reference = build("gpt2", **DROPOUT["gpt2"])
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    ends = []
    for model in (reference, split):
        if inner:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        embedded = model.get_input_embeddings()(batch()["input_ids"]).detach().requires_grad_()
        model.zero_grad()
        torch.manual_seed(2)
        run = lambda x, model=model: model(inputs_embeds=x).logits  # noqa: E731
        logits = checkpoint(run, embedded, use_reentrant=reentrant)
        logits.pow(2).mean().backward()
        ends.append((logits.detach(), embedded.grad))
    close(ends[1], ends[0])
    assert_gradients_equal(split, reference)


class Blocks(nn.Module):
    """Checkpoints by hand, in each other, around a whole MLP and around a half of one, with dropout."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.up = nn.ModuleList(nn.Linear(6, 10) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(10, 6) for _ in range(3))
        self.drop = nn.Dropout(0.3)

    def block(self, x, index):
        return x + self.drop(self.down[index](torch.tanh(self.up[index](x))))

    def two(self, x):
        x = checkpoint(self.block, x, 0, use_reentrant=False)
        return torch.tanh(checkpoint(self.block, x, 1, use_reentrant=False))

    def forward(self, x):
        if self.how == "nested":
            return self.block(checkpoint(self.two, x, use_reentrant=False), 2)
        if self.how == "sequence":
            parts = [lambda x, i=i: self.block(x, i) for i in range(3)]
            return checkpoint_sequential(parts, 2, x, use_reentrant=False)
        if self.how == "half":
            hidden = checkpoint(lambda x: torch.tanh(self.up[0](x)), x, use_reentrant=False)
            return self.block(self.down[0](hidden) + x, 1)
        if self.how == "same twice":
            for _ in range(2):
                x = checkpoint(self.block, x, 1, use_reentrant=False)
            return x
        return self.block(checkpoint(self.block, x, 0, use_reentrant=True), 1)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", ["nested", "sequence", "half", "same twice", "reentrant"])
def test_checkpoints_by_hand(how, ranks):
    reference = noisy(Blocks(how).double().train())
    x = torch.randn(4, 6, dtype=torch.float64)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs=(x,))
    assert any(tensor.is_cut for tensor in tp.make_plan(reference, ranks, (x,)).tensors.values())
    found = []
    for model in (reference, split):
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        out = model(given)
        out.pow(2).sum().backward(retain_graph=True)
        out.sum().backward()
        found.append((out.detach(), given.grad, torch.rand(1)))
    close(found[1], found[0])
    assert_gradients_equal(split, reference)


def test_one_bit_pattern():
    split = tp.tensor_parallel(build("gpt2", **DROPOUT["gpt2"]), ["cpu"] * 3)
    split.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    patterns = set()
    for _ in range(8):
        split.zero_grad()
        torch.manual_seed(3)
        split(**batch()).loss.backward()
        patterns.add(tuple(float(g.sum()) for g in tp.full_gradients(split).values()))
    assert len(patterns) == 1


def test_regions_go_with_their_graph():
    split = tp.tensor_parallel(build("llama"), ["cpu"] * 2)
    split.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    from tensor_parallel.shard.regions import Region

    def alive():
        return sum(type(item) is Region for item in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        loss = split(**batch()).loss
        assert alive() == before + 2
        loss.backward()
        del loss
        assert alive() == before
        gone = weakref.ref(split)
        del split
        assert gone() is None
    finally:
        gc.enable()


def test_a_recomputation_that_does_something_else_is_an_error_on_all_ranks():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
            self.calls = []

        def inner(self, x):
            self.calls.append(1)
            x = self.down(torch.tanh(self.up(x)))
            return torch.tanh(x) if len(self.calls) < 4 else x

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    split = tp.tensor_parallel(noisy(Changing().double()), ["cpu"] * 2, example_inputs=(x.detach(),))
    for part in [split, *split._tp_slot.peers()]:
        part.calls = []
    out = split(x)
    for part in [split, *split._tp_slot.peers()]:
        part.__dict__["calls"] = [1] * 4
    with pytest.raises(CheckpointError, match=r"rank \d saved"):
        out.sum().backward()
    for part in [split, *split._tp_slot.peers()]:
        part.__dict__["calls"] = []
    assert split(x).isfinite().all()


def test_selective_checkpoints_are_refused_by_name_and_others_are_untouched():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    class Selective(nn.Module):
        def __init__(self, **how):
            super().__init__()
            self.how = how
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

        def forward(self, x):
            return checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=False, **self.how)

    x = torch.randn(4, 6)
    reference = Selective(context_fn=contexts)
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs=(x,))
    with pytest.raises(NotImplementedError, match="context_fn"):
        split(x)
    reference(x).sum().backward()
    assert reference.up.weight.grad is not None
