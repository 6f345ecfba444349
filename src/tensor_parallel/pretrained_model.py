"""TensorParallelPreTrainedModel: a transformers model that runs split, with everything it has from transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tensor_parallel.shard import Adapter, whole_parameters
from tensor_parallel.shard.shards import plain_name
from tensor_parallel.tensor_parallel import TensorParallel
from tensor_parallel.transformers_support.caches import CacheAdapter


class TensorParallelPreTrainedModel(TensorParallel, PreTrainedModel):  # type: ignore[misc]
    """A transformers model split over several devices; still an instance of its own class, with the same config.

    `generate` runs its one loop in the caller's thread; only forwards go to the ranks.
    """

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As for the unsplit model: every part counts with its parameter."""
        embeddings = set()
        if exclude_embeddings:
            embeddings = {f"{n}.weight" for n, m in self.named_modules() if isinstance(m, nn.Embedding)}
        return sum(
            parameter.numel()
            for name, parameter in self.named_parameters()
            if plain_name(name) not in embeddings and (parameter.requires_grad or not only_trainable)
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As of the unsplit model, which it is meanwhile (see `tp.whole_parameters`); planned anew after it."""
        with whole_parameters(self):
            return self.resize_token_embeddings(*args, **kwargs)

    @classmethod
    def _adapters(cls) -> list[Adapter]:
        return [CacheAdapter()]
