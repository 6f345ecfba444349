"""ZeRO-3 of what tensor parallelism leaves whole: which parameters, and how much of each a rank keeps. How they are put
together for a forward is `shard/assembly.py`'s."""

from tensor_parallel.zero.deal import ShardingManager, sharded_plan

__all__ = ["ShardingManager", "sharded_plan"]
