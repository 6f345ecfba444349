import copy
import gc
import pickle
import threading
import timeit
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig

from tensor_parallel.shard.attributes import Overlay, install_local_attributes, local_attributes


class Here(threading.local):
    """Which rank runs in this thread."""

    rank = None

    def __call__(self):
        return self.rank


class Attention(nn.Module):
    groups = 7

    def __init__(self, heads=8, config=None):
        super().__init__()
        self.num_heads = heads
        self.config = config
        self.proj = nn.Linear(4, 4)

    def forward(self):
        return self.num_heads

    @property
    def twice(self):
        return 2 * self.num_heads


@dataclass
class Inner:
    heads: int = 8
    names: list = field(default_factory=list)


@dataclass
class Settings:
    heads: int = 8
    width: int = 64
    inner: Inner = field(default_factory=Inner)

    @property
    def head_dim(self):
        return self.width // self.heads

    def doubled(self):
        return 2 * self.heads

    def __getitem__(self, key):
        return getattr(self, key)


def private(module):
    module.__class__ = type(type(module).__name__, (type(module),), {})
    return module


@pytest.fixture
def here():
    return Here()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_own_and_everybody_else_the_whole(here, rank):
    module = private(Attention())
    local_attributes(module, {"num_heads": 3}, here)
    assert (module(), module.twice) == (8, 16)
    here.rank = rank
    assert (module(), module.twice, module.num_heads) == (3, 6, 3)
    seen = []
    other = threading.Thread(target=lambda: seen.append(module()))
    other.start()
    other.join()
    assert seen == [8]
    here.rank = None
    assert module() == 8
    assert module.__dict__["num_heads"] == 8


def test_active_may_be_a_plain_truth_value():
    state = [False]
    module = private(Attention())
    local_attributes(module, {"num_heads": 3}, lambda: state[0])
    assert module() == 8
    state[0] = True
    assert module() == 3


def test_writes_and_deletions_reach_the_real_attribute(here):
    module = private(Attention())
    local_attributes(module, {"num_heads": 3}, here)
    here.rank = 0
    module.num_heads = 10
    assert module() == 3
    here.rank = None
    assert module() == 10
    del module.num_heads
    with pytest.raises(AttributeError, match="num_heads"):
        module()
    with pytest.raises(AttributeError):
        del module.num_heads
    module.num_heads = nn.Parameter(torch.ones(2))  # goes to nn.Module's own registry
    assert module.num_heads is module._parameters["num_heads"]


def test_modules_of_one_class_have_their_own_sizes_or_none(here):
    first, second, third = Attention(8), Attention(16), Attention(24)
    cls = type("Attention", (Attention,), {})
    for module in (first, second, third):
        module.__class__ = cls
    install_local_attributes(cls, ["num_heads", "groups"])
    local_attributes(first, {"num_heads": 3}, here)
    local_attributes(second, {"num_heads": 5}, here)
    here.rank = 1
    assert [m() for m in (first, second, third)] == [3, 5, 24]
    assert third.groups == 7  # a class attribute goes on being read
    third.groups = 9
    assert (third.groups, second.groups) == (9, 7)
    assert Attention()() == 8


def test_copies_and_pickles_of_a_module(here):
    module = Attention()
    local_attributes(private(module), {"num_heads": 3}, here)
    twin = copy.deepcopy(module)
    here.rank = 0
    assert twin() == 3
    assert twin.__dict__["_tp_sizes"] is not module.__dict__["_tp_sizes"]
    state = pickle.loads(pickle.dumps({k: v for k, v in module.__dict__.items() if k == "_tp_sizes"}))
    module.__dict__.update(state)
    assert module() == 8


def overlaid(config, sizes, here):
    module = private(Attention(config=config))
    local_attributes(module, {f"config.{path}": size for path, size in sizes.items()}, here)
    return module


def test_an_overlay_answers_the_local_integers_and_hands_on_the_rest(here):
    config = Settings()
    module = overlaid(config, {"heads": 2, "inner.heads": 1}, here)
    assert module.config is config
    here.rank = 0
    seen = module.config
    assert seen is module.config
    assert isinstance(seen, Settings)
    assert (seen.heads, seen.width, seen["heads"], seen.inner.heads) == (2, 64, 2, 1)
    assert isinstance(seen.inner, Inner)
    assert (seen.head_dim, seen.doubled()) == (32, 4)  # what the class computes, it computes from local integers
    seen.width = 128
    seen.heads = 16
    seen.inner.names = ["x"]
    assert (config.width, config.heads, config.inner.names, seen.width, seen.heads) == (128, 16, ["x"], 128, 2)
    config.later = "edit"
    assert seen.later == "edit"
    del seen.later
    assert not hasattr(config, "later")
    assert not hasattr(seen, "nothing")
    here.rank = None
    assert (seen.heads, seen.inner.heads, module.config.heads) == (16, 8, 16)  # one that was kept past the run


def test_an_overlay_is_equal_to_the_real_config_and_copies_as_it(here):
    config = LlamaConfig(num_attention_heads=8)
    module = overlaid(config, {"num_attention_heads": 2}, here)
    here.rank = 0
    seen = module.config
    assert type(seen) is Overlay
    assert isinstance(seen, LlamaConfig)
    assert seen == config
    assert seen != LlamaConfig(num_attention_heads=4)
    for made in (copy.copy(seen), copy.deepcopy(seen), pickle.loads(pickle.dumps(seen))):
        assert type(made) is LlamaConfig
        assert made.num_attention_heads == 8
    assert seen.to_dict() == config.to_dict()
    assert (repr(seen), str(seen), vars(seen)) == (repr(config), str(config), vars(config))
    assert seen.get_text_config().num_attention_heads == 2
    assert hash(overlaid(Frozen(), {"heads": 2}, here).config) == hash(Frozen())


@dataclass(frozen=True)
class Frozen:
    heads: int = 8


def test_another_config_put_in_place_is_overlaid_too(here):
    module = overlaid(Settings(), {"heads": 2}, here)
    here.rank = 0
    first = module.config
    module.config = other = Settings(width=1)
    assert (module.config.heads, module.config.width, module.config is first) == (2, 1, False)
    here.rank = None
    assert module.config is other


def test_transformers_aliases_are_local_too(here):
    module = overlaid(GPT2Config(n_head=8, n_embd=64), {"n_head": 2}, here)
    here.rank = 1
    assert (module.config.n_head, module.config.num_attention_heads, module.config.hidden_size) == (2, 2, 64)
    module.config.num_attention_heads = 12
    assert module.__dict__["config"].n_head == 12


def test_sizes_do_not_keep_a_module_alive(here):
    gc.disable()
    try:
        module = overlaid(Settings(), {"heads": 2}, here)
        here.rank = 0
        assert module.config.heads == 2
        ref = weakref.ref(module)
        del module
        assert ref() is None
    finally:
        gc.enable()


def test_a_read_in_a_rank_is_cheap(here):
    module = private(Attention())
    local_attributes(module, {"num_heads": 3}, here)
    here.rank = 0
    best = min(timeit.repeat(lambda: module.num_heads, number=2000, repeat=5)) / 2000
    assert best < 20e-6  # some 0.3 us on a quiet machine; this only catches a blunder
