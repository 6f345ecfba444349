"""What the library says of itself: its log, names in Plan.explain, and who runs out of memory."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys

import pytest
import torch
from families import build
from torch import nn

import tensor_parallel as tp
from tensor_parallel.plan.table import bytes_text
from tensor_parallel.testing import Mlp, noisy


def test_the_log_says_what_was_planned_and_why(caplog):
    with caplog.at_level(logging.DEBUG, logger="tensor_parallel"):
        tp.tensor_parallel(build("llama"), ["cpu"] * 2)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    (planned,) = [text for text in said if text.startswith("planned LlamaForCausalLM")]
    assert "5 all-reduces and 1 all-gather" in planned
    assert "2 ranks" in planned
    assert any(text.startswith("split LlamaForCausalLM over cpu, cpu") for text in said)
    split = tp.tensor_parallel(build("llama"), ["cpu"] * 2)
    held = "; ".join(map(bytes_text, tp.report(split).bytes_per_device))
    assert planned.endswith(f"bytes of parameters by rank: {held}")
    assert any(text.startswith("split Llama") and text.endswith(held) for text in said)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    costs = r"saves \d+ bytes a device and costs as much as \d+"
    assert any(re.match(rf"candidate \S+ of \d+ units is cut: it {costs}$", text) for text in told)
    assert any(re.match(rf"candidate \S+ of \d+ units loses: it {costs}; .+", text) for text in told)
    assert any("norm.weight stays whole" in record.getMessage() for record in caplog.records)


def test_the_log_says_which_cuts_are_not_worth_their_collectives(caplog):
    model = noisy(Mlp((2, 3, 2)))
    with caplog.at_level(logging.DEBUG, logger="tensor_parallel"):
        tp.make_plan(model, 2, example_inputs=model.inputs())
    told = [record.getMessage() for record in caplog.records]
    loses = r"candidate layers\.0\.weight\.0\.0 of 3 units loses: it saves \d+ bytes a device and costs as much as \d+"
    assert any(re.match(rf"{loses}; not worth its collectives$", text) for text in told), told


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_plan_and_its_split_model_report_the_same_bytes(family, ranks):
    model = build(family)
    planned = tp.report(tp.make_plan(model, ranks))
    found = tp.report(tp.tensor_parallel(model, ["cpu"] * ranks))
    assert planned.bytes_per_device == found.bytes_per_device
    assert (planned.split_fraction, planned.kept_whole) == (found.split_fraction, found.kept_whole)


def test_nothing_is_printed_by_default():
    code = (
        "import torch, tensor_parallel as tp\n"
        "m = tp.tensor_parallel(torch.nn.Linear(4, 4), ['cpu'] * 2, example_inputs=(torch.ones(1, 4),))\n"
        "m(torch.ones(1, 4))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_explain_takes_the_end_of_a_name():
    plan = tp.make_plan(build("llama"), 2)
    full = plan.explain("model.layers.0.mlp.down_proj")
    assert plan.explain("layers.0.mlp.down_proj") == full
    assert "1 all-reduce" in full
    assert "norm" in plan.explain("layers.0")
    whole = plan.tensors["model.layers.0.mlp.down_proj.weight"].nbytes
    assert f"Over 2 ranks, bytes by rank: {bytes_text(whole / 2)}; {bytes_text(whole / 2)}; whole:" in full
    assert f"Over 1 rank, bytes by rank: {bytes_text(whole)}; whole:" in plan.explain("layers.0.mlp.down_proj", 1)
    with pytest.raises(tp.PlanError, match="end of 2 names"):
        plan.explain("mlp.down_proj")
    with pytest.raises(tp.PlanError, match=r"nearest: 'model\.layers\.0\.mlp\.down_proj'"):
        plan.explain("model.layers.0.mlp.down_prj")


class Hungry(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        x = self.down(torch.relu(self.up(x)))
        if self.training and self.how == "allocator":
            torch.empty(2**60)
        if self.training and self.how == "gpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x


@pytest.mark.parametrize("how", ["allocator", "gpu"])
def test_out_of_memory_names_the_devices_and_what_they_held(how):
    x = torch.ones(2, 6)
    split = tp.tensor_parallel(Hungry(how).eval(), ["cpu"] * 2, example_inputs=(x,))
    split(x).sum().backward()
    split.train()
    with pytest.raises(torch.OutOfMemoryError if how == "gpu" else RuntimeError) as caught:
        split(x)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0 on cpu: parameters" in notes
    assert "rank 1 on cpu: parameters" in notes
    assert "gradients" in notes
    assert "torch.utils.checkpoint" in notes
    assert "checkpointing_enable" not in notes
    assert re.search(r"raised on rank [01] \(cpu\)", notes)
    assert split.eval()(x).shape == (2, 6)


def test_other_errors_get_no_such_note():
    reference = noisy(Mlp())
    split = tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * 2, example_inputs=reference.inputs())
    with pytest.raises(RuntimeError) as caught:
        split(torch.ones(2, 5))
    assert not any("out of memory" in note for note in caught.value.__notes__)


def test_out_of_memory_while_splitting_names_them_too(monkeypatch):
    from tensor_parallel.shard import trees

    reference, plain, cut = noisy(Mlp()), trees.cut_parameter, []

    def cut_parameter(*args, **kwargs):
        cut.append(args)
        if len(cut) == 3:
            torch.empty(2**60)
        return plain(*args, **kwargs)

    monkeypatch.setattr(trees, "cut_parameter", cut_parameter)
    with pytest.raises(tp.SplitError) as caught:
        tp.tensor_parallel(reference, ["cpu"] * 2, example_inputs=reference.inputs())
    assert "raised on rank" not in str(caught.value)  # the hook below failed, not an allocation for a rank
    (note,) = caught.value.__cause__.__notes__
    assert "while the model was being split" in note
    held = [line for line in note.splitlines() if line.startswith("  rank")]
    assert len(held) == 2
    assert "parameters 0 B" not in held[1]
    assert "more devices" in note
    assert "gradient_checkpointing_enable" not in note


def test_out_of_memory_while_splitting_names_the_rank_that_failed(monkeypatch):
    from tensor_parallel.shard import pieces

    reference, plain = noisy(Mlp()), pieces.local_shape

    def local_shape(layout, cuts, rank):
        return (2**60,) if rank == 1 else plain(layout, cuts, rank)

    monkeypatch.setattr(pieces, "local_shape", local_shape)
    with pytest.raises(tp.SplitError, match=r"\(raised on rank 1 \(cpu\)\); the module is used up") as caught:
        tp.tensor_parallel(reference, ["cpu"] * 3, example_inputs=reference.inputs())
    named, note = caught.value.__cause__.__notes__
    assert named == "raised on rank 1 (cpu)"
    assert "out of memory while the model was being split" in note
    assert len([line for line in note.splitlines() if line.startswith("  rank")]) == 3


def test_out_of_memory_before_anything_is_cut_leaves_the_module(monkeypatch):
    from tensor_parallel.shard import pieces

    reference = noisy(Mlp())
    reference.register_buffer("scale", torch.ones(3))
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    plain = pieces.moved

    def moved(tensor, rank, device, *, copy=False):
        if rank == 2:
            torch.empty(2**60)
        return plain(tensor, rank, device, copy=copy)

    monkeypatch.setattr(pieces, "moved", moved)
    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        tp.tensor_parallel(reference, ["cpu"] * 3, example_inputs=reference.inputs())
    assert "buffers 12 B" in caught.value.__notes__[-1]
    monkeypatch.undo()
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())
    tp.tensor_parallel(reference, ["cpu"] * 3, example_inputs=reference.inputs())


class Waiting(nn.Module):
    """Two cut layers, whose gradients are summed over the ranks in between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Mlp((6, 10, 6)), Mlp((6, 10, 6))
        self.register_buffer("scale", torch.full((5,), 2.0))

    def forward(self, x):
        return self.second(self.first(x)) * self.scale.sum()


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_in_a_collectives_backward_names_rank_and_holdings(monkeypatch, rank):
    x = torch.ones(2, 6, requires_grad=True)
    split = tp.tensor_parallel(noisy(Waiting()), ["cpu"] * 2, example_inputs=(x.detach(),))
    split(x).sum().backward()
    loss, plain, calls = split(x).sum(), torch.Tensor.clone, []

    def clone(tensor):
        calls.append(tensor)
        if len(calls) > rank:  # a gradient that rank 0 alone has is copied for each rank in turn
            torch.empty(2**60)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        loss.backward()
    monkeypatch.undo()
    named, note = caught.value.__notes__
    assert named == f"raised on rank {rank} (cpu)"
    assert "out of memory in a backward; the ranks held:" in note
    lines = [line for line in note.splitlines() if line.startswith("  rank")]
    assert len(lines) == 2
    assert all("buffers 20 B" in line and "gradients 0 B" not in line for line in lines)
    assert "torch.utils.checkpoint" in note
    assert "checkpointing_enable" not in note
    assert "inference_mode" not in note


def test_of_joint_work_the_rank_is_named_for_which_it_is_done(monkeypatch):
    """The last rank to come does it for all, whichever that is."""
    from tensor_parallel.comm import joint

    x = torch.ones(2, 6)
    split = tp.tensor_parallel(noisy(Waiting()), ["cpu"] * 3, example_inputs=(x,))
    plain = joint.add_in_order

    def hungry(*args):
        torch.empty(2**60)
        return plain(*args)

    for _ in range(6):
        with monkeypatch.context() as patched:
            patched.setattr(joint, "add_in_order", hungry)
            with pytest.raises(RuntimeError, match="allocate memory") as caught:
                split(x)
        named, note = caught.value.__notes__
        assert named == "raised on rank 0 (cpu)"
        assert "out of memory in a forward" in note
    assert split(x).shape == (2, 6)


def test_the_cure_is_one_that_the_model_has():
    split = tp.tensor_parallel(build("llama"), ["cpu"] * 2)
    ids = torch.ones(1, 3, dtype=torch.long)

    def hook(module, inputs, output):
        torch.empty(2**60)

    split.model.norm.register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        split(ids)
    (note,) = [note for note in caught.value.__notes__ if "what helps" in note]
    (name,) = re.findall(r"model\.(\w+checkpointing_enable)\(\)", note)
    getattr(split, name)()
