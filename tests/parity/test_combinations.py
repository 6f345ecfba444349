"""What meets what: checkpoints and the last gather, changes and threads, errors in hooks that the model catches."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from families import build
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensor_parallel as tp
from tensor_parallel.testing import noisy

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


class Language(nn.Module):
    """Its head and loss are one checkpoint, around the last gather."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.head = nn.Linear(12, 101)

    def loss(self, x, ids):
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.up(x)))
        return checkpoint(self.loss, x, ids, use_reentrant=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_around_the_last_gather(ranks):
    reference = noisy(Language().double().train())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs={"ids": IDS})
    for model in (reference, split):
        model(IDS).backward()
    mine = tp.full_gradients(split)
    for name, parameter in reference.named_parameters():
        close(mine[name], parameter.grad)


def test_callers_in_threads_after_a_change():
    reference = build("llama")
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    for _ in range(3):
        for model in (reference, split):
            torch.manual_seed(1)
            model.lm_head = nn.Linear(48, 101, bias=False).double()
        results, barrier = [], threading.Barrier(4)

        def call(results=results, barrier=barrier):
            barrier.wait()
            results.append(split(IDS).logits)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        for logits in results:
            close(logits, reference(IDS).logits)


class Catches(nn.Module):
    """Its own code catches what a part of it raises."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)

    def forward(self, x):
        x = self.down(torch.tanh(self.up(x)))
        try:
            return self.norm(x)
        except KeyError:
            return self.down(torch.tanh(self.up(x)))


def test_an_error_in_a_hook_that_the_models_code_catches():
    reference = noisy(Catches().double())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 3, example_inputs={"x": X})

    def fails(module, args):
        raise KeyError("in a hook")

    for model in (reference, split):
        model.norm.register_forward_pre_hook(fails)
    close(split(X), reference(X))


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def energy(self, x):
        return self.down(torch.tanh(self.up(x))).pow(2).sum()

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(checkpoint(self.energy, x, use_reentrant=False), x)[0]


def test_a_gradient_through_a_checkpoint_in_the_forward_raises_and_does_not_hang():
    split = tp.tensor_parallel(noisy(Forces().double()), ["cpu"] * 2, example_inputs={"x": X})
    with pytest.raises((NotImplementedError, tp.RankError), match="inside a rank"):
        split(X)


def test_outputs_are_freed_with_their_last_name():
    split = tp.tensor_parallel(build("llama"), ["cpu"] * 2)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            output = split(IDS)
        gone = weakref.ref(output.past_key_values)
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_the_callers_number_of_threads_stays():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        split = tp.tensor_parallel(build("llama"), ["cpu"] * 2)
        split(IDS, labels=IDS)
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), found) == (4, [4])
    finally:
        torch.set_num_threads(before)


def test_recorders_that_were_there_before_the_split():
    """transformers installs them once a model and remembers it: a trace must neither take them off nor add to them."""
    reference = build("llama")
    wanted = reference(IDS, output_hidden_states=True).hidden_states
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    found = split(IDS, output_hidden_states=True).hidden_states
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)


class MakesItsCache(nn.Module):
    """A root whose own code makes the cache and reads nothing of it from its parts."""

    def __init__(self):
        super().__init__()
        self.language = build("llama")

    def forward(self, ids, cache=None):
        from transformers import DynamicCache

        cache = DynamicCache() if cache is None else cache
        hidden = self.language.model(ids, cache=cache).last_hidden_state
        return self.language.lm_head(hidden), cache


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_cache_that_the_roots_own_code_makes(ranks):
    from tensor_parallel.shard import shards_of
    from tensor_parallel.transformers_support.caches import CacheAdapter

    reference = MakesItsCache()
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks, example_inputs={"ids": IDS})
    shards_of(split).adapters.append(CacheAdapter())
    found = []
    for model in (reference, split):
        with torch.no_grad():
            first, cache = model(IDS[:, :3])
            found.append((first, model(IDS[:, 3:], cache)[0]))
    close(found[1], found[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loss_whose_logits_the_root_itself_finishes(ranks):
    """BART adds a bias to its logits in the root, and its loss reads them there: only a call with labels shows it."""
    import transformers

    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(vocab_size=101, dropout=0.1, activation_dropout=0.1, **sizes, **heads, **tokens)
    reference = noisy(transformers.BartForConditionalGeneration(config).double().train())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)
    losses = []
    for model in (reference, split):
        torch.manual_seed(2)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
    close(losses[1], losses[0])
    mine = tp.full_gradients(split)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            close(mine[name], parameter.grad)
