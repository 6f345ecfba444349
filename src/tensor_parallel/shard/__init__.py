"""Plan -> this rank's module: pieces, trees, borders, sizes, whole state dicts."""

from tensor_parallel.shard.assembly import is_assembled
from tensor_parallel.shard.joined import base_class, joined_copy
from tensor_parallel.shard.memory import bytes_held
from tensor_parallel.shard.module import SplitModule
from tensor_parallel.shard.optimizers import check_optimizers
from tensor_parallel.shard.pieces import MARK, Piece, SplitTensor, part_of
from tensor_parallel.shard.shard_dicts import is_by_rank, joined_state
from tensor_parallel.shard.shards import Adapter, Leaves, ModelShards, shards_of
from tensor_parallel.shard.team import Team
from tensor_parallel.shard.trees import check_splittable, named_tensors, split_module
from tensor_parallel.shard.unsplit import kinds_of, up_to_date, whole_parameters

__all__ = [
    "MARK",
    "Adapter",
    "Leaves",
    "ModelShards",
    "Piece",
    "SplitModule",
    "SplitTensor",
    "Team",
    "base_class",
    "bytes_held",
    "check_optimizers",
    "check_splittable",
    "is_assembled",
    "is_by_rank",
    "joined_copy",
    "joined_state",
    "kinds_of",
    "named_tensors",
    "part_of",
    "shards_of",
    "split_module",
    "up_to_date",
    "whole_parameters",
]
