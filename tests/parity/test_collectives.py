"""What a Llama's forward says between the ranks, counted on the group that it uses."""

import pytest
import torch
from families import build, padded

import tensor_parallel as tp
from tensor_parallel.comm import recorded
from tensor_parallel.shard import shards_of


def ops_of_one_forward(split, inputs):
    with recorded(shards_of(split).team.groups[0]) as calls, torch.no_grad():
        split(**inputs)
    return [call[0] for call in calls]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_two_all_reduces_a_layer_one_for_the_embedding_one_gather_for_the_head(family, ranks):
    layers = 3
    model = build(family, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    split = tp.tensor_parallel(model, ["cpu"] * ranks)
    ops = ops_of_one_forward(split, padded())
    assert ops.count("all_reduce") == 2 * layers + 1, ops
    assert ops.count("all_gather") == 1, ops
    assert len(ops) == 2 * layers + 2
    report = tp.report(split)
    assert report.collectives == len(ops)
    assert sum(t.calls for t in report.traffic if t.op == "all_gather") == 1


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_the_report_counts_what_the_group_counts(family):
    split = tp.tensor_parallel(build(family), ["cpu"] * 2)
    assert tp.report(split).collectives == len(ops_of_one_forward(split, padded()))


def test_one_rank_says_nothing():
    split = tp.tensor_parallel(build("llama"), ["cpu"])
    assert tp.report(split).collectives == 0
