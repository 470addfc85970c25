"""Explains an out-of-memory error: which memory was full, in which call, and which settings reduce its use.

Called by `futures`. Such errors come from torch (GPU or host memory), NCCL, vLLM, Python, and Ray, which terminates a
process before its node is full. The settings are named as the user writes them.
"""

from __future__ import annotations

import re

import torch
from ray.exceptions import OutOfMemoryError as NodeOutOfMemoryError

from ppojob_api.v1alpha1.pools import base_role
from ppojob_trainer.engines.errors import RolloutHostMemoryError, RolloutMemoryError
from ppojob_trainer.engines.rollout.failure_log import memory_shortage
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.errors import WorkerOutOfMemoryError

__all__ = ["explain_memory"]

_USAGE_OF_NODE = re.compile(r"was (\S+ used / \S+ limit)")
_SENTENCE_ENDS = re.compile(r"(?<=[.!])\s")
_NUM_SENTENCES = 3
_CPU_ALLOCATOR = "DefaultCPUAllocator"
_MORE_ROOM_ON_A_GPU = "rollout.gpuMemoryUtilization where vLLM is on the same GPU"
_LESS_OF_A_GPU = "rollout.gpuMemoryUtilization, rollout.maxNumSeqs or rollout.maxNumBatchedTokens"
_MORE_ROOM_ON_A_NODE = "give the pool more memory (resourcesPerGPU.memory)"

_MAY_STAY_GATHERED = ("actor", "critic", "ref")

LESS_OF = {
    "actor": "actor.maxTokensPerGPU",
    "critic": "critic.maxTokensPerGPU",
    "ref": "actor.maxTokensPerGPU, which is ref's too",
    "rollout": "rollout.maxNumSeqs, rollout.maxNumBatchedTokens or rollout.cpuCacheGib",
    "reward": "reward.function.numWorkers",
    "reward_model": "model.reward.maxTokensPerGPU",
}
"""Role -> the settings that reduce its memory."""


def explain_memory(error: BaseException, role: str, rank: int, method: str) -> WorkerOutOfMemoryError | None:
    """Return the explanation of a call's error, or None if memory was not the cause."""
    base = base_role(role)
    setting = LESS_OF.get(base)
    who, lower = f"{role} rank {rank}", f"lower {setting}, or " if setting else ""
    if isinstance(error, NodeOutOfMemoryError):
        # Ray's message is a page long; only the numbers in it matter.
        found = _USAGE_OF_NODE.search(str(error))
        usage = f" ({found[1]})" if found else ""
        said = f"{who} was terminated because its node ran out of memory{usage} during {method}"
        return WorkerOutOfMemoryError(f"{said}: {lower}{_MORE_ROOM_ON_A_NODE}")
    of_gpu = _words_of_gpu(error)
    if of_gpu is not None:
        # Without `lower` the role is user-defined; freeing memory is the only remedy.
        room = _MORE_ROOM_ON_A_GPU if lower else f"lower {_MORE_ROOM_ON_A_GPU}"
        free = f"set model.{base}.reshardAfterForward: true, " if base in _MAY_STAY_GATHERED else ""
        return WorkerOutOfMemoryError(f"{who} ran out of memory during {method} ({of_gpu}): {free}{lower}{room}")
    if isinstance(error, RolloutMemoryError):
        said = f"{who} found too little memory on its GPU during {method} ({_beginning(error)})"
        return WorkerOutOfMemoryError(f"{said}: lower {_LESS_OF_A_GPU}, or give the rollout its own pool")
    if isinstance(error, (MemoryError, RolloutHostMemoryError)) or _CPU_ALLOCATOR in str(error):
        said = f"{who} ran out of memory during {method} ({_beginning(error)})"
        return WorkerOutOfMemoryError(f"{said}: {lower}{_MORE_ROOM_ON_A_NODE}")
    return None


def _words_of_gpu(error: BaseException) -> str | None:
    """Return the message of torch, or of NCCL (whose buffers are not torch's), about a full GPU; None if not full."""
    if isinstance(error, torch.OutOfMemoryError):
        return _beginning(error)
    return memory_shortage(str(error)) if is_of_communication(error) else None


def _beginning(error: BaseException) -> str:
    """Return the first sentences of a message, or the error's class if it has none."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return " ".join(_SENTENCE_ENDS.split(first_line)[:_NUM_SENTENCES])
