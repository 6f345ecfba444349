"""How ranks talk: the Group protocol, its thread group, joint autograd nodes, a recording group."""

from tensor_parallel.comm.group import Group
from tensor_parallel.comm.joint import copy_to_ranks
from tensor_parallel.comm.recording import RecordingGroup, recorded
from tensor_parallel.comm.threads import Call, ThreadGroup, thread_groups

__all__ = ["Call", "Group", "RecordingGroup", "ThreadGroup", "copy_to_ranks", "recorded", "thread_groups"]
