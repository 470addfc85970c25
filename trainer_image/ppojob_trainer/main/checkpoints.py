"""Checkpoints and the export: the ranks write shards, the store decides what counts.

Implements `controller.ports.CheckpointPort` for `run`. The exported folder appears whole, by a rename.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.training import CheckpointSpec
from ppojob_trainer.checkpoints import Checkpoint, CheckpointStore, CheckpointUnreadableError
from ppojob_trainer.engines.errors import CheckpointUnreadableError as EngineCheckpointError
from ppojob_trainer.main.groups import Groups
from ppojob_trainer.telemetry import RunFiles
from ppojob_trainer.worker_groups.errors import WorkerFailedError
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.critic import CriticWorker

__all__ = ["JobCheckpoints"]

_ACTOR, _CRITIC = "actor", "critic"


class JobCheckpoints:
    """See the module's docstring."""

    def __init__(
        self, store: CheckpointStore, groups: Groups, files: RunFiles, settings: CheckpointSpec, attempt: int
    ) -> None:
        self._store = store
        self._groups = groups
        self._files = files
        self._settings = settings
        self._attempt = attempt

    async def restore(self) -> tuple[int, Mapping[str, Any]] | None:
        """See `CheckpointPort`.

        Raises:
            CheckpointUnreadableError: there is one, and it cannot be read.
        """
        found = await asyncio.to_thread(self._store.resume_point, self._settings.resume, self._settings.resume_from)
        if found is None:
            return None
        try:
            await self._each(ActorWorker.restore, CriticWorker.restore, found.path)
        except WorkerFailedError as error:
            if isinstance(error.__cause__, EngineCheckpointError):
                raise self._unreadable(found, error) from error
            raise
        return found.step, found.state

    async def save(self, step: int, state: Mapping[str, Any], keep: int) -> Path:
        """See `CheckpointPort`.

        Raises:
            FencedOutError: a newer attempt owns the folder.
        """
        folder = await asyncio.to_thread(self._store.begin, step)
        try:
            await self._each(ActorWorker.save, CriticWorker.save, folder)
        except BaseException:
            # The folder belongs to nobody now, whatever the reason; the reason goes on.
            self._store.abandon(step)
            raise
        done = await asyncio.to_thread(self._store.commit, step, state=state, keep=keep)
        return done.path

    async def export(self) -> Path:
        """See `CheckpointPort`."""
        target = self._files.model
        aside = target.with_name(f".{target.name}.tmp-{self._attempt}")
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
        await self._groups.actor.group.call(ActorWorker.export, aside)
        await asyncio.to_thread(_replace, aside, target)
        return target

    async def _each(self, of_actor: Any, of_critic: Any, folder: Path) -> None:
        calls: list[Any] = [self._groups.actor.group.call(of_actor, folder / _ACTOR)]
        if self._groups.critic is not None:
            calls.append(self._groups.critic.group.call(of_critic, folder / _CRITIC))
        await asyncio.gather(*calls)

    def _unreadable(self, found: Checkpoint, error: WorkerFailedError) -> CheckpointUnreadableError:
        return CheckpointUnreadableError.of(found, str(error.__cause__), older=self._store.older_than(found.step))


def _replace(source: Path, target: Path) -> None:
    """Put a folder in another's place; a rename cannot replace a folder that has something in it."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)
