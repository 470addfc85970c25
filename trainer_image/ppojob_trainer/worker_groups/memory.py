"""A role that ran out of memory: whose memory it was, when, and which settings take less of it.

Called by `futures`. Five can say that memory is short: torch (of a GPU, or of the process), NCCL, vLLM, Python, and
Ray, which ends a process before its node is full. The settings are named as the user writes them.
"""

from __future__ import annotations

import re

import torch
from ray.exceptions import OutOfMemoryError as NodeOutOfMemoryError

from ppojob_trainer.engines.errors import RolloutMemoryError
from ppojob_trainer.engines.vllm.failure_log import memory_shortage
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
"""Role -> the settings that make it take less."""


def explain_memory(error: BaseException, role: str, rank: int, method: str) -> WorkerOutOfMemoryError | None:
    """Return what to say of an error that a call met, or None where memory was not the matter."""
    # Engines in a pool that is lent are rollout_<pool>.
    setting = LESS_OF.get("rollout" if role.startswith("rollout_") else role)
    who, lower = f"{role} rank {rank}", f"lower {setting}, or " if setting else ""
    if isinstance(error, NodeOutOfMemoryError):
        # Ray's message is a page long; the numbers are what matters of it.
        found = _USAGE_OF_NODE.search(str(error))
        usage = f" ({found[1]})" if found else ""
        said = f"{who} was ended because its node ran out of memory{usage} during {method}"
        return WorkerOutOfMemoryError(f"{said}: {lower}{_MORE_ROOM_ON_A_NODE}")
    of_gpu = _words_of_gpu(error)
    if of_gpu is not None:
        # Without `lower` the role is of the user's own, and only making room is left.
        room = _MORE_ROOM_ON_A_GPU if lower else f"lower {_MORE_ROOM_ON_A_GPU}"
        free = f"set model.{role}.reshardAfterForward: true, " if role in _MAY_STAY_GATHERED else ""
        return WorkerOutOfMemoryError(f"{who} ran out of memory during {method} ({of_gpu}): {free}{lower}{room}")
    if isinstance(error, RolloutMemoryError):
        said = f"{who} found too little memory on its GPU during {method} ({_beginning(error)})"
        return WorkerOutOfMemoryError(f"{said}: lower {_LESS_OF_A_GPU}, or give the rollout a pool of its own")
    if isinstance(error, MemoryError) or _CPU_ALLOCATOR in str(error):
        said = f"{who} ran out of memory during {method} ({_beginning(error)})"
        return WorkerOutOfMemoryError(f"{said}: {lower}{_MORE_ROOM_ON_A_NODE}")
    return None


def _words_of_gpu(error: BaseException) -> str | None:
    """Return what torch, or NCCL with its buffers beside torch's, says of a GPU that is full; None: it is not."""
    if isinstance(error, torch.OutOfMemoryError):
        return _beginning(error)
    return memory_shortage(str(error)) if is_of_communication(error) else None


def _beginning(error: BaseException) -> str:
    """Return the first sentences of a message, or the error's class if it has none."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return " ".join(_SENTENCE_ENDS.split(first_line)[:_NUM_SENTENCES])
