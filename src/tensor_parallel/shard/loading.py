"""Models that were split before they had values: what is put into the ranks' modules later becomes their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tensor_parallel.errors import PlanError
from tensor_parallel.shard.pieces import MARK, Piece, SplitTensor
from tensor_parallel.shard.shards import ModelShards, survey_of


def empty_tensors(shards: ModelShards) -> list[str]:
    """The tensors that have no values on some rank, by their names in the unsplit model."""
    return [key for key, split in shards.tensors.items() if any(piece.tensor.is_meta for piece in split.pieces)]


def adopt_loaded(shards: ModelShards) -> None:
    """Take up tensors that were put in place of empty ones in any rank's modules, under any of a tensor's names."""
    for key, split in shards.tensors.items():
        for piece in split.pieces:
            if piece.tensor.is_meta:
                _adopt(split, piece, key, shards)
            _put_everywhere(split, piece, shards)
        if not any(piece.tensor.is_meta for piece in split.pieces):
            _make_stand_ins(split, shards)
    survey = survey_of(shards)
    if survey is not None:
        survey.renew()


def finish_loading(shards: ModelShards) -> None:
    """At the first run: from here on the parts are what they are.

    Raises:
        PlanError: tensors have no values yet.
    """
    names = empty_tensors(shards)
    shards.empty = bool(names)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise PlanError(
            f"{', '.join(names[:3])}{more} have no values yet (they are on the meta device): load them, rank by rank "
            "(tp.convert_state_dict, then accelerate's set_module_tensor_to_device), before the model is called"
        )


def _adopt(split: SplitTensor, piece: Piece, key: str, shards: ModelShards) -> None:
    owner = piece.ranks[0]
    places = list(_places(split, owner, shards))
    found = next((t for holder, name in places if (t := holder.get(name)) is not None and not t.is_meta), None)
    if found is None:
        return
    old = piece.tensor
    if found.shape != old.shape:
        raise PlanError(
            f"{key}: what was loaded for rank {owner} has shape {list(found.shape)}, its part is {list(old.shape)}: "
            "tp.convert_state_dict makes the parts"
        )
    shards.key_of.pop(id(old), None)
    piece.tensor = found
    if piece is split.pieces[0]:
        shards.key_of[id(found)] = key
    for shared in shards.shared:
        if shared.leaf is old:
            shared.leaf = found
    shards.assigned.add(id(found))


def _put_everywhere(split: SplitTensor, piece: Piece, shards: ModelShards) -> None:
    """In the modules of all ranks that hold the piece, and where rank 0 registers it."""
    owner = piece.ranks[0]
    for rank in piece.ranks if not split.plan.rank0_only else (owner,):
        for holder, name in _places(split, rank, shards):
            if holder.get(name) is not None and not split.plan.is_buffer:
                holder[name] = piece.tensor
    for holder, name in _places(split, 0, shards):
        if owner and f"{name}{MARK}{owner}" in holder:
            holder[f"{name}{MARK}{owner}"] = piece.tensor


def _make_stand_ins(split: SplitTensor, shards: ModelShards) -> None:
    """What ranks compute with that hold nothing of the tensor."""
    holding = {rank for piece in split.pieces for rank in piece.ranks}
    for rank in range(shards.world_size):
        for holder, name in _places(split, rank, shards) if rank not in holding else ():
            if holder.get(name) is not None and holder[name].is_meta:
                holder[name] = split.part(split.whole(), rank, shards.devices[rank])


def _places(split: SplitTensor, rank: int, shards: ModelShards) -> Iterator[tuple[Any, str]]:
    """Where `rank`'s tree holds the tensor: (dict, name)."""
    for full in split.plan.names:
        path, _, name = full.rpartition(".")
        module: nn.Module = shards.module(rank, path)
        yield (module._buffers if split.plan.is_buffer else module._parameters), name
