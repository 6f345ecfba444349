"""generate on split models in all its usual ways: the unsplit model's tokens, scores and random state."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers
from families import build, padded

import tensor_parallel as tp
from tensor_parallel.testing import noisy

WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8, "num_return_sequences": 2},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def made(family):
    if family == "t5":
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=101, d_model=24, d_kv=4, d_ff=20, num_layers=2, num_heads=6, decoder_start_token_id=0
        )
        return noisy(transformers.T5ForConditionalGeneration(config).double().eval())
    return build(family)


def pair(family, ranks):
    reference = made(family)
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-9)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_ways_of_generating(family, way):
    if way == "prompt lookup" and family == "t5":
        pytest.skip("an encoder-decoder has no prompt to look up")
    reference, split = pair(family, 3)
    inputs, found = padded(), []
    if way == "prompt lookup":
        inputs = {name: value[2:] for name, value in inputs.items()}
    for model in (reference, split):
        torch.manual_seed(11)
        tokens = model.generate(**inputs, max_new_tokens=8, pad_token_id=0, **WAYS[way])
        found.append((tokens, torch.rand(2)))
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1]), "the generator ends elsewhere"
    assert not [name for name, module in split.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_everything_in_the_result_is_whole(family):
    reference = made(family)
    reference.set_attn_implementation("eager")
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted |= {"output_hidden_states": True, "output_attentions": True}
    inputs = padded(left=False)
    theirs, mine = (m.generate(**inputs, max_new_tokens=3, do_sample=False, **wanted) for m in (reference, split))
    assert torch.equal(mine.sequences, theirs.sequences)
    names = ["scores", "logits"]
    names += ["attentions", "hidden_states"] if family == "llama" else ["cross_attentions", "decoder_hidden_states"]
    for name in names:
        assert mine[name]
        close(mine[name], theirs[name])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_in_and_out_as_one_object(name):
    reference, split = pair("llama", 3)
    ids = padded()["input_ids"][2:]
    found = []
    for model in (reference, split):
        first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        cache = first.past_key_values
        more = torch.cat([first.sequences, torch.tensor([[9, 8]])], 1)
        second = model.generate(more, **{name: cache}, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        assert second.past_key_values is cache
        cache.crop(-(cache.get_seq_length() - 5))
        third = model(more[:, 5:7], **{name: cache}).logits
        found.append((second.sequences, third, cache.get_seq_length()))
    assert torch.equal(found[1][0], found[0][0])
    close(found[1][1], found[0][1])
    assert found[1][2] == found[0][2]


def test_streamers_and_stopping_criteria():
    reference, split = pair("llama", 2)
    ids = padded()["input_ids"][2:]

    class Keeps(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.seen, self.ended, self.thread = [], False, None

        def put(self, value):
            self.seen.append(value.flatten().tolist())
            self.thread = threading.get_ident()

        def end(self):
            self.ended = True

    class Stops(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= ids.shape[1] + 5)

    found = []
    for model in (reference, split):
        streamer = Keeps()
        criteria = transformers.StoppingCriteriaList([Stops()])
        tokens = model.generate(
            ids, max_new_tokens=20, do_sample=False, streamer=streamer, stopping_criteria=criteria, pad_token_id=0
        )
        assert streamer.ended
        assert streamer.thread == threading.get_ident()
        found.append((tokens.tolist(), streamer.seen))
    assert found[1] == found[0]
    assert len(found[0][0][0]) == ids.shape[1] + 5


def test_generating_in_a_thread_of_the_callers():
    reference, split = pair("llama", 2)
    ids, results = padded()["input_ids"][2:], []
    work = lambda: results.append(split.generate(ids, max_new_tokens=6, do_sample=False))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = reference.generate(ids, max_new_tokens=6, do_sample=False)
    assert len(results) == 3
    assert all(torch.equal(tokens, wanted) for tokens in results)
