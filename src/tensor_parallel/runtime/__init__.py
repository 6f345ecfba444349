"""How ranks run: as threads of one process."""

from tensor_parallel.runtime.threads import ThreadTeam

__all__ = ["ThreadTeam"]
