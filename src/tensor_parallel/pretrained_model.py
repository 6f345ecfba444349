"""TensorParallelPreTrainedModel: a transformers model that runs split, with everything it has from transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tensor_parallel.shard import Adapter, shards_of, whole_parameters
from tensor_parallel.shard.shards import plain_name
from tensor_parallel.tensor_parallel import TensorParallel
from tensor_parallel.transformers_support.caches import CacheAdapter


def device_names(devices: Sequence[torch.device]) -> list[str]:
    """The devices' own names, by rank; those of devices that several ranks share are the rank's number instead."""
    return [str(d) if devices.count(d) == 1 else f"{d.type}:{rank}" for rank, d in enumerate(devices)]


class TensorParallelPreTrainedModel(TensorParallel, PreTrainedModel):  # type: ignore[misc]
    """A transformers model split over several devices; still an instance of its own class, with the same config.

    `generate` runs its one loop in the caller's thread; only forwards go to the ranks.
    """

    @property
    def hf_device_map(self) -> dict[str, str]:
        """Where the ranks are, an entry a rank. Trainer reads from several entries that the model looks after its
        devices itself: it moves it nowhere and, with several visible GPUs, does not put it into DataParallel. Ranks
        that share a device are numbered: one entry alone would mean a model to move, and "cpu" offloaded weights."""
        devices = shards_of(self).devices
        if len(devices) == 1 or "_tp_hides_device_map" in self.__dict__:
            raise AttributeError("hf_device_map")
        return {f"rank {rank}": name for rank, name in enumerate(device_names(devices))}

    def _prepare_text_encoder_decoder_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """As of the unsplit model: by a device map it would patch the encoder's forward, to move what it returns."""
        self.__dict__["_tp_hides_device_map"] = True
        try:
            return super()._prepare_text_encoder_decoder_kwargs_for_generation(*args, **kwargs)
        finally:
            self.__dict__.pop("_tp_hides_device_map", None)

    @property
    def wrapped_model(self) -> TensorParallelPreTrainedModel:
        """The model itself, which version 2.0 kept inside another."""
        return self

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
