"""Key-value caches of transformers: every rank keeps its own heads', the caller holds one object.

The caller's object is adopted in place and is rank 0's. The other ranks' hang on it as peers; its class becomes a
subclass made on the fly that hands on what changes a cache from outside (`crop`, `reorder_cache`, ...) to all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.output_capturing import _active_collector

from tensor_parallel.errors import TensorParallelError
from tensor_parallel.own_hooks import is_recorder
from tensor_parallel.shard import ModelShards
from tensor_parallel.shard.values import leaves

_FORWARDED = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "reorder_cache",
    "reset",
)
_CACHES = (Cache, EncoderDecoderCache)


class CacheAdapter:
    """Gives each rank its own cache for the caller's one; see `shard.Adapter`."""

    def asks_for_spare(self, module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
        """Whether attention weights or hidden states are asked for."""
        config = getattr(module, "config", None)
        names = ("output_attentions", "output_hidden_states")
        asked = (kwargs.get(name) for name in names)
        return any(
            bool(getattr(config, name, False) if value is None else value)
            for name, value in zip(names, asked, strict=True)
        )

    def records(self, module: nn.Module) -> str:
        """Whether transformers' capturing of hidden states or attentions is on for one of the module's hooks. What was
        captured while planning is left to the plan: it takes up the ranks' parts, and gathers them where it has to (a
        call that it was not made for is noticed where the outputs leave)."""
        collected = _active_collector.get()
        if not collected:
            return ""
        captured = {_captured(hook) for hook in module._forward_hooks.values() if is_recorder(hook)} & set(collected)
        if not captured:
            return ""
        shards = module.__dict__["_tp_slot"].shards
        own = shards.resolved.plan.modules.get(module.__dict__["_tp_slot"].name)
        cut = own is not None and any(b.after.kind != "replicate" and not b.spare for b in own.outputs)
        return "part" if cut or captured & shards.gathered else "whole"

    def localise(self, value: Any, shards: ModelShards) -> list[Any] | None:
        """The ranks' caches for the caller's `value`, which is adopted at its first use.

        Raises:
            NotImplementedError: it holds keys and values of an unsplit model already.
            TensorParallelError: it belongs to a model split over another number of ranks.
        """
        if not isinstance(value, _CACHES):
            return None
        peers = value.__dict__.get("_tp_peers")
        if peers is None and shards.world_size == 1:
            return [value]
        if peers is None:
            _forget_early_sizes(value)
            peers = [copy.deepcopy(value) for _ in range(shards.world_size - 1)]
            _adopt(value, peers)
        if len(peers) != shards.world_size - 1:
            raise TensorParallelError(
                f"this cache was filled by a model split over {len(peers) + 1} ranks, not {shards.world_size}; "
                "start with a new one"
            )
        return [value, *peers]

    def adopt(self, outputs: Sequence[Any], shards: ModelShards) -> None:
        """Make the caches in rank 0's output stand for all ranks'."""
        found = {path: leaf for path, leaf in leaves(outputs[0]) if isinstance(leaf, _CACHES)}
        new = {path: cache for path, cache in found.items() if "_tp_peers" not in cache.__dict__}
        if not new:
            return
        others = [dict(leaves(output)) for output in outputs[1:]]
        for path, cache in new.items():
            if "_tp_peers" not in cache.__dict__:
                _adopt(cache, [other[path] for other in others])


def _captured(hook: Any) -> str | None:
    """What a capturing hook collects: "hidden_states", "attentions"."""
    names = hook.__code__.co_freevars
    return str(hook.__closure__[names.index("key")].cell_contents) if "key" in names else None


def _layers(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def _forget_early_sizes(cache: Any) -> None:
    """Layers that were given room for whole heads before their first use: let them find their own sizes."""
    for layer in _layers(cache):
        if not getattr(layer, "is_initialized", False):
            continue
        length = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 1
        if int(length):
            raise NotImplementedError(
                f"this {type(cache).__name__} holds {int(length)} positions of an unsplit model; "
                "a split model can only go on with a cache that it filled itself, or start with an empty one"
            )
        layer.is_initialized = False
        layer.keys = layer.values = None


def _adopt(cache: Any, peers: list[Any]) -> None:
    cache.__dict__["_tp_peers"] = peers
    cache.__class__ = _shared_class(type(cache))


def _forwarding(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__

    def forwarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        for peer in self.__dict__.get("_tp_peers", ()):
            getattr(peer, name)(*args, **kwargs)
        return result

    forwarded.__name__, forwarded.__doc__ = name, method.__doc__
    return forwarded


def _shared_class(base: type) -> type:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        "__deepcopy__": _deepcopy,
    }
    for name in _FORWARDED:
        method = getattr(base, name, None)
        if method is not None:
            namespace[name] = _forwarding(method)
    return type(base)(base.__name__, (base,), namespace)


def _reduce(self: Any, protocol: Any) -> Any:
    raise TypeError("the cache of a split model lives in its ranks and cannot be pickled; deepcopy works")


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    fresh = object.__new__(type(self))
    memo[id(self)] = fresh
    fresh.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return fresh
