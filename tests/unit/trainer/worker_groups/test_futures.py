"""Which of several ranks' failures is reported, and in which words. Coroutines replace Ray's references."""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from torch.distributed import DistBackendError

from ppojob_api.v1alpha1.reference import field_reference
from ppojob_trainer.engines.errors import RolloutHostMemoryError, RolloutMemoryError
from ppojob_trainer.worker_groups import futures, memory
from ppojob_trainer.worker_groups.errors import (
    WorkerFailedError,
    WorkerGroupError,
    WorkerLostError,
    WorkerOutOfMemoryError,
)
from ppojob_trainer.worker_groups.futures import Future, Origin

RAYS_PAGE = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 9bd2) was "
    "5.51GB used / 6.00GB limit (0.917831)\nOOM kill reason: ...\nTop 10 memory users: ..."
)
TORCHS_PARAGRAPH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.02 GiB is "
    "free. Including non-PyTorch memory, this process has 138.79 GiB memory in use. Of the allocated memory ..."
)


NCCLS_PAGE = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
    "version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("update_actor", "Traceback ...", cause)


async def answer(value: Any, after_s: float = 0.0) -> Any:
    await asyncio.sleep(after_s)
    if isinstance(value, Exception):
        raise value
    return value


def future_of(*parts: Coroutine[Any, Any, Any]) -> Future[list[Any]]:
    origin = Origin("actor", "update_actor", tuple(range(len(parts))))
    return Future(list(parts), list, origin)  # type: ignore[arg-type]


async def test_answers_are_merged_in_the_order_of_ranks() -> None:
    assert await future_of(answer("a", 0.02), answer("b")) == ["a", "b"]


LOST = r"actor rank 0 was lost during update_actor"
OF_MEMORY = (
    r"actor rank 0 .* ran out of memory \(5.51GB used / 6.00GB limit\) during update_actor: "
    r"lower actor.maxTokensPerGPU, or give the pool more memory \(resourcesPerGPU.memory\)$"
)
OF_GPU_MEMORY = (
    r"^actor rank 0 ran out of memory during update_actor \(CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
    r"a total capacity of 139.81 GiB of which 1.02 GiB is free.\): set model.actor.reshardAfterForward: true, "
    r"lower actor.maxTokensPerGPU, or rollout.gpuMemoryUtilization where vLLM is on the same GPU$"
)
OF_NCCL = r"actor rank 0 ran out of memory during update_actor \(Cuda failure 2 'out of memory'\): set model\.actor\."


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            task_error(ZeroDivisionError("of theirs")),
            WorkerFailedError,
            r"rank 0 failed in update_actor: Zero.*: of theirs",
        ),
        (ActorDiedError(), WorkerLostError, LOST),
        (WorkerCrashedError(), WorkerLostError, LOST),
        (OutOfMemoryError(RAYS_PAGE), WorkerOutOfMemoryError, OF_MEMORY),
        (OutOfMemoryError("other words"), WorkerOutOfMemoryError, r"ran out of memory during update_actor"),
        (task_error(torch.OutOfMemoryError(TORCHS_PARAGRAPH)), WorkerOutOfMemoryError, OF_GPU_MEMORY),
        (task_error(DistBackendError(NCCLS_PAGE)), WorkerOutOfMemoryError, OF_NCCL),
        (task_error(DistBackendError("NCCL error: remote process exited")), WorkerFailedError, "remote process exited"),
        (task_error(MemoryError()), WorkerOutOfMemoryError, r"\(MemoryError\): lower .* more memory"),
        (
            task_error(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")),
            WorkerOutOfMemoryError,
            r"tried to allocate 8 bytes.\): lower",
        ),
        (
            task_error(OutOfMemoryError(RAYS_PAGE)),
            WorkerFailedError,
            r"rank 0 failed in update_actor: OutOfMemoryError: 1 worker\(s\) were killed .* limit \(0.917831\)$",
        ),
    ],
)
async def test_a_failure_is_reported_with_role_rank_and_method(
    error: Exception, kind: type[WorkerGroupError], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        await future_of(answer(error))

    assert "\n" not in str(raised.value)
    assert raised.value.role == "actor"


def test_vllms_own_words_about_its_gpu_come_with_its_settings() -> None:
    failure = memory.explain_memory(RolloutMemoryError("CUDA out of memory. Tried to"), "rollout", 1, "wake")
    assert str(failure) == (
        "rollout rank 1 found too little memory on its GPU during wake (CUDA out of memory. Tried to): lower "
        "rollout.gpuMemoryUtilization, rollout.maxNumSeqs or rollout.maxNumBatchedTokens, or give the rollout its "
        "own pool"
    )


def test_vllms_own_words_about_its_node_come_with_its_settings() -> None:
    failure = memory.explain_memory(RolloutHostMemoryError("Available memory on node 0"), "rollout", 1, "load")
    assert str(failure) == (
        "rollout rank 1 ran out of memory during load (Available memory on node 0): lower rollout.maxNumSeqs, "
        "rollout.maxNumBatchedTokens or rollout.cpuCacheGib, or give the pool more memory (resourcesPerGPU.memory)"
    )


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("critic", "lower critic.maxTokensPerGPU, or"),
        ("ref_critic", "lower actor.maxTokensPerGPU, which is ref's too, or"),
        ("rollout", "lower rollout.maxNumSeqs, rollout.maxNumBatchedTokens or rollout.cpuCacheGib, or"),
        ("reward_model_critic", "lower model.reward.maxTokensPerGPU, or"),
        ("rollout_critic", "lower rollout.maxNumSeqs, rollout.maxNumBatchedTokens or rollout.cpuCacheGib, or"),
        ("reward", "lower reward.function.numWorkers, or"),
        ("of_a_user", "during run: give the pool more memory"),
    ],
)
def test_memory_is_reported_with_the_settings_of_the_role_that_take_less(role: str, settings: str) -> None:
    failure = memory.explain_memory(OutOfMemoryError(RAYS_PAGE), role, 1, "run")

    assert settings in str(failure)


def test_the_settings_that_are_named_exist() -> None:
    named = {name for words in memory.LESS_OF.values() for name in re.findall(r"[a-z]\w*(?:\.\w+)+", words)}

    assert len(named) > 5
    assert {name for name in named if f"`spec.{name}`" not in field_reference()} == set()


async def test_a_dead_rank_explains_the_broken_connections_of_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "GRACE_S", 30.0)
    broken = task_error(RuntimeError("Connection closed by peer"))

    with pytest.raises(WorkerLostError, match="actor rank 1"):
        await future_of(answer(broken), answer(ActorDiedError(), after_s=0.05))


async def test_an_error_without_a_name_is_reported_before_the_broken_connections_of_other_ranks() -> None:
    broken, wrong = task_error(DistBackendError("remote process exited")), task_error(RuntimeError("shapes do not fit"))

    with pytest.raises(WorkerFailedError, match=r"rank 1 .* shapes do not fit"):
        await future_of(answer(broken), answer(wrong))


async def test_memory_explains_a_death_and_a_named_error_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "GRACE_S", 30.0)

    with pytest.raises(WorkerOutOfMemoryError):
        await future_of(answer(ActorDiedError()), answer(OutOfMemoryError(RAYS_PAGE), after_s=0.05))
    with pytest.raises(WorkerFailedError, match="ValueError"):
        await future_of(answer(ActorDiedError()), answer(task_error(ValueError("bad")), after_s=0.05))


async def test_peers_that_never_answer_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "GRACE_S", 0.05)

    with pytest.raises(WorkerFailedError, match="rank 0"):
        async with asyncio.timeout(30):
            await future_of(answer(task_error(ValueError("bad"))), answer("late", after_s=60))


async def test_a_caller_that_gives_up_leaves_nothing_behind() -> None:
    waiting = asyncio.create_task(_await(future_of(answer("late", after_s=60))))
    await asyncio.sleep(0.01)

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)

    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def _await(future: Future[Any]) -> Any:
    return await future
