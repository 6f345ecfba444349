"""What holds for every test: one torch thread, a fixed seed, no network, nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded_and_restored() -> Iterator[None]:
    """Seed each test by itself (the same alone and in the suite), and undo what it did to the process."""
    torch.manual_seed(0)
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture(scope="session", autouse=True)
def _threads_end() -> Iterator[None]:
    """Every thread that a test's ranks ran in is a daemon, or the suite would hang at its end."""
    yield
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    assert not left, f"threads that keep the process alive: {left}"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job begins deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
