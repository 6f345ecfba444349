"""The group of processes against the group of threads: the same collectives give the same values and gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import process_work
import pytest
import torch

from tensor_parallel.testing.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(Path(process_work.__file__))]
    ranks = range(process_work.RANKS)
    started = [subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in ranks]
    try:
        for process in started:
            process.wait(timeout=100)
    finally:
        for process in started:
            process.kill()
            process.wait()
    results = [torch.load(folder / f"rank{rank}", weights_only=False) for rank in ranks]
    assert not [result["failed"] for result in results if "failed" in result]
    return results


@pytest.mark.parametrize("name", process_work.WORK)
def test_processes_do_what_threads_do(name, found):
    by_rank = run_ranks(process_work.WORK[name], process_work.RANKS)
    process_work.backward([output for _, outputs in by_rank for output in outputs])
    for rank, expected in enumerate(map(process_work.findings, by_rank)):
        for what in ("outputs", "gradients"):
            pairs = zip(found[rank][name][what], expected[what], strict=True)
            for given, wanted in pairs:
                torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12, msg=f"{name}, rank {rank}: {what}")
