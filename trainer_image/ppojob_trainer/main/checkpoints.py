"""Checkpoints: the ranks write shards, the data role the responses that wait, the store decides which one is valid.

Implements `controller.ports.CheckpointPort` for `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.checkpoints import Checkpoint, CheckpointStore, CheckpointUnreadableError
from ppojob_trainer.checkpoints.address import below
from ppojob_trainer.controller.errors import PhaseTimeoutError
from ppojob_trainer.controller.layout import pools_of_roles
from ppojob_trainer.controller.storage_ports import Restored
from ppojob_trainer.engines.errors import CheckpointUnreadableError as EngineCheckpointError
from ppojob_trainer.engines.errors import CheckpointUnwritableError
from ppojob_trainer.main.groups import Groups
from ppojob_trainer.worker_groups.errors import WorkerFailedError
from ppojob_trainer.worker_groups.roles.trained import EngineWorker
from ppojob_trainer.worker_groups.table import Table

__all__ = ["JobCheckpoints"]

_ACTOR, _CRITIC, _QUEUE = "actor", "critic", "queue"
_POLL_S = 1.0


class JobCheckpoints:
    """See the module's docstring."""

    def __init__(
        self,
        store: CheckpointStore,
        groups: Groups,
        spec: PPOJobSpec,
        found: Checkpoint | None,
    ) -> None:
        """`found` is the checkpoint to resume from: the store's `resume_point`."""
        self._store = store
        self._groups = groups
        pool_of = pools_of_roles(spec)
        self._is_shared = pool_of.get("critic") == pool_of["actor"]
        self._limit_s = float(spec.trainer.phase_timeout_seconds)
        self._found = found

    async def restore(self) -> Restored[Table] | None:
        """See `CheckpointPort`. Engines that share their GPUs sleep from then on; the push that follows wakes them.

        Raises:
            CheckpointUnreadableError: the checkpoint cannot be read into the models.
        """
        found = self._found
        if found is None:
            return None
        # Gradients and moments are on the GPU while they are read, which does not fit beside an engine that is awake.
        await asyncio.gather(*(engines.sleep() for engines in (self._groups.rollout, *self._groups.shared.values())))
        calls = self._calls(EngineWorker.restore, found.location)
        try:
            # Roles that share GPUs load one after the other: gradients and moments are on the GPU while they are read,
            # and are offloaded only afterwards.
            await (_in_turn(calls) if self._is_shared else asyncio.gather(*calls))
            batches = [await self._groups.data.saved_rows(each) for each in _queued(found.location, _num_queued(found))]
        except WorkerFailedError as error:
            if isinstance(error.__cause__, EngineCheckpointError):
                raise self._unreadable(found, error) from error
            raise
        return Restored(found.step, found.state, batches)

    async def stage(self, step: int, *, in_background: bool, batches: Sequence[Table]) -> None:
        """See `CheckpointPort`.

        Raises:
            CheckpointUnwritableError: the storage refuses it, for example because it is full.
            FencedOutError: a newer attempt owns the place.
        """
        with _as_unwritable(step):
            location = await asyncio.to_thread(self._store.begin, step)
        with self._abandoning(step):
            saving = self._calls(EngineWorker.save, location, in_background)
            files = _queued(location, len(batches))
            queued = (self._groups.data.save_rows(*each) for each in zip(batches, files, strict=True))
            await asyncio.gather(*saving, *queued)

    async def commit(self, step: int, state: Mapping[str, Any], keep: int) -> str:
        """See `CheckpointPort`.

        Raises:
            CheckpointUnwritableError: see `stage`.
            FencedOutError: a newer attempt owns the place.
            PhaseTimeoutError: the ranks did not write it in time.
        """
        with self._abandoning(step):
            await self._until_written()
        with _as_unwritable(step):
            done = await asyncio.to_thread(self._store.commit, step, state=state, keep=keep)
        return done.location

    @contextmanager
    def _abandoning(self, step: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # The folder is abandoned, whatever the reason; the error is raised on.
            self._store.abandon(step)
            raise

    async def _until_written(self) -> None:
        groups = [group.group for group in (self._groups.actor, self._groups.critic) if group is not None]
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                # The call queues behind the ranks' computation, so it does not interrupt them.
                while not all([all(await group.call(EngineWorker.is_saved)) for group in groups]):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            if limit.expired():
                raise PhaseTimeoutError("write_checkpoint", "actor", self._limit_s) from error
            raise

    def _calls(self, method: Any, location: str, *args: Any) -> list[Coroutine[Any, Any, Any]]:
        calls = [self._groups.actor.group.call(method, below(location, _ACTOR), *args)]
        if self._groups.critic is not None:
            calls.append(self._groups.critic.group.call(method, below(location, _CRITIC), *args))
        return calls

    def _unreadable(self, found: Checkpoint, error: WorkerFailedError) -> CheckpointUnreadableError:
        return CheckpointUnreadableError.of(
            found.location, str(error.__cause__), older=self._store.older_than(found.step)
        )


@contextmanager
def _as_unwritable(step: int) -> Iterator[None]:
    """Raise the storage's refusal of the checkpoint's folder as the ranks raise that of their files."""
    try:
        yield
    except OSError as error:
        raise CheckpointUnwritableError(
            f"the checkpoint of step {step} cannot be written: {error}. Check the storage's free space and "
            "permissions; earlier checkpoints are complete"
        ) from error


def _num_queued(found: Checkpoint) -> int:
    return len(found.state.get("queue", {}).get("versions", ()))


def _queued(location: str, number: int) -> list[str]:
    """Return the files of a checkpoint with the responses of the next steps."""
    return [below(location, f"{_QUEUE}/{index}.safetensors") for index in range(number)]


async def _in_turn(calls: Sequence[Coroutine[Any, Any, Any]]) -> None:
    waiting = list(calls)
    try:
        while waiting:
            await waiting.pop(0)
    finally:
        for call in waiting:
            call.close()
