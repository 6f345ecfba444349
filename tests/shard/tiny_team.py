"""The smallest team of threads: a fresh thread a rank for each run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensor_parallel.comm.threads import thread_groups


class TinyTeam:
    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.world_size = len(self.devices)
        self.groups = thread_groups(self.devices, deadline=20.0)
        self.owner = self.groups[0].rendezvous
        self._here = threading.local()

    def rank_here(self) -> int | None:
        return getattr(self._here, "rank", None)

    def run(self, work: Callable[[int], Any], *, joint_random: Any = False) -> list[Any]:
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException] = []
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def body(rank: int) -> None:
            self._here.rank = rank
            try:
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.groups[rank].abort(error)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.groups[0].rendezvous.reset()
            raise errors[0]
        return results

    def as_caller(self, rank: int, work: Callable[[list[Any]], Any], value: Any) -> Any:
        raise NotImplementedError

    def acts_as_caller(self) -> bool:
        return False

    def close(self) -> None:
        pass
