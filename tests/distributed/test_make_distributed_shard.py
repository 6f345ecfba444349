"""make_distributed_shard: two gloo processes against the unsplit model, in float64 with noise on every parameter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch

import tensor_parallel as tp

SAID = {
    "no group": "TensorParallelError: .*init_process_group",
    "no such device": "DeviceError: a model cannot run on the meta device",
    "several devices": r"DeviceError: \['cpu', 'cpu'\] is no device",
    "unknown keyword": "TypeError: .*'proces_group'; did you mean 'process_group'",
    "foreign group": "TypeError: process_group is a str",
    "other values": "PlanError: layers.0.weight is not the same on rank 0 and rank 1",
    "other plans": "PlanError: rank 0 and rank 1 have different plans: for the tensor layers.0.weight",
    "twice": "AlreadySplitError: Mlp is split already",
    "state": "TensorParallelError: Mlp is one rank's part",
    "copied": "NotImplementedError: a copy of Mlp",
    "pickled": "NotImplementedError: layers.0, one rank's part",
    "attribute": "PlanError: scale was 2 and is 3",
    "attribute back": "nothing",
    "changed": "PlanError: layers.0.extra was absent",
    "freed": "True",
}
BY_RANK = {
    "unknown device": (
        "DeviceError: unknown device 'abacus'",
        "RankError: make_distributed_shard failed on rank 0: DeviceError: unknown device 'abacus'",
    ),
    "one rank": ("RankError: make_distributed_shard failed on rank 1: PlanError: ReLU", "PlanError: ReLU has no"),
    "alone": ("DeadlineError: .*rank 0 of 2 waited for the others", "nothing"),
    "after": ("RankError: this process group is not usable any more", "nothing"),
    "failing": ("RankError: .*rank 1 failed: (.|\n)*ValueError: something odd", "ValueError: something odd"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the two ranks found, after at most DEADLINE in each wait and 100 s in all."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(Path(ranks.__file__))]
    log = [open(folder / f"log{rank}", "w") for rank in range(ranks.RANKS)]
    started = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment, stdout=log[rank], stderr=log[rank])
        for rank in range(ranks.RANKS)
    ]
    try:
        for process in started:
            process.wait(timeout=100)
    finally:
        for process, file in zip(started, log, strict=True):
            process.kill()
            process.wait()
            file.close()
    for rank in range(ranks.RANKS):
        assert (folder / f"rank{rank}").exists(), (folder / f"log{rank}").read_text()[-3000:]
    results = [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(ranks.RANKS)]
    assert not [result["failed"] for result in results if "failed" in result]
    return results


def compare(given, expected, where):
    if isinstance(expected, dict):
        assert given.keys() == expected.keys(), where
        assert expected, where
        for name, value in expected.items():
            compare(given[name], value, f"{where}: {name}")
    else:
        assert torch.allclose(given, expected, rtol=1e-10, atol=1e-12), f"{where}: {(given - expected).abs().max()}"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_every_rank_gives_what_the_unsplit_module_gives(name, found):
    expected = ranks.SCENARIOS[name](lambda module, inputs, config=None: module)
    for rank, result in enumerate(found):
        compare(result[name], expected, f"{name}, rank {rank}")


@pytest.mark.parametrize("name", [*SAID, *BY_RANK])
def test_what_is_wrong_is_said_by_name(name, found):
    for rank, result in enumerate(found):
        said = {**result["errors"], "no group": result["no group"]}[name]
        pattern = BY_RANK[name][rank] if name in BY_RANK else SAID[name]
        assert re.match(pattern, said), said


def test_ranks_hold_parts_of_the_module():
    """One process alone may not split: nothing is initialised here."""
    with pytest.raises(tp.TensorParallelError, match="init_process_group"):
        tp.make_distributed_shard(ranks.mlp())
