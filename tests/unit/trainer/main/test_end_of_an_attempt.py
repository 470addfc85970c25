"""Which processes an attempt terminates at its end, and which it leaves to the next one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppojob_trainer.checkpoints import FencedOutError, open_store
from ppojob_trainer.controller.loop import Outcome
from ppojob_trainer.main import run as run_module
from ppojob_trainer.main.monitor import JobDeletedError
from ppojob_trainer.main.run import _Attempt
from ppojob_trainer.worker_groups.errors import WorkerFailedError, WorkerLostError
from ppojob_trainer.worker_groups.survivors import NO_SURVIVORS, Names, Survivors

ROLES = {"a": frozenset({"actor", "rollout"}), "c": frozenset({"critic"})}
ALL = ["actor", "rollout", "critic", "judge", "elastic rollout", "a", "c", "own engine"]
OTHERS = ["judge", "elastic rollout", "own engine"]
DONE, STOPPED = Outcome(4, is_finished=True), Outcome(2, is_finished=False)


@dataclass
class Story:
    """Stands for groups, pools and monitor; notes what is terminated or released, and whether the end is said."""

    ended: list[str] = field(default_factory=list)
    is_end_said: bool = False

    def part(self, name: str) -> Any:
        def end() -> None:
            self.ended.append(name)

        return SimpleNamespace(role=name, name=name, kill=end, release=end)

    def start(self, step: int | None) -> None:
        assert step is None

    async def watch(self) -> None:
        await asyncio.Event().wait()

    wait_for_stop = watch

    def note_end(self) -> None:
        self.is_end_said = True

    def close(self) -> None:
        assert self.ended, "the processes end first"


def run(root: Path, result: Outcome | Exception, *, has_successor: bool = True) -> Story:
    """Let attempt 3 end with this result of the training."""
    story = Story()
    attempt = object.__new__(_Attempt)
    attempt._job = cast("Any", SimpleNamespace(checkpoints=str(root)))
    attempt._attempt, attempt._has_successor, attempt._are_left, attempt._found = 3, has_successor, False, None
    attempt._monitor = cast("Any", story)
    attempt._survivors = Survivors(Names("key", 3), ROLES) if has_successor else NO_SURVIVORS
    groups = [story.part(name) for name in ("actor", "rollout", "critic", "judge")]
    elastic = [story.part("elastic rollout")]
    attempt._groups = cast("Any", SimpleNamespace(all=lambda: groups, elastic=elastic, lost=[]))
    attempt._pools = {name: story.part(name) for name in ("a", "c", "own engine")}
    attempt._trace = cast("Any", SimpleNamespace(close=lambda: None))

    async def start() -> None:
        """All is there."""

    async def train() -> Outcome:
        if isinstance(result, Exception):
            raise result
        return result

    vars(attempt).update(_start=start, _train=train)
    if isinstance(result, Exception):
        with pytest.raises(type(result)):
            asyncio.run(attempt.run())
    else:
        assert asyncio.run(attempt.run()) == result
    return story


@pytest.fixture(autouse=True)
def are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pods are."""
    monkeypatch.setattr(run_module, "are_connected", lambda pools: True)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Claimed by this attempt."""
    open_store(str(tmp_path), uid="uid", attempt=3).claim()
    return tmp_path


@pytest.mark.parametrize("result", [DONE, WorkerFailedError("actor rank 0 failed"), ValueError("a defect")])
def test_all_end_with_an_attempt_that_is_finished_or_failed(storage: Path, result: Outcome | Exception) -> None:
    story = run(storage, result)

    assert (story.ended, story.is_end_said) == (ALL, True)


def test_after_a_loss_those_that_may_continue_are_left_and_the_operator_learns_that_the_pods_are_fine(
    storage: Path,
) -> None:
    lost = WorkerLostError("critic rank 0 was lost")

    story = run(storage, lost)

    assert (story.ended, story.is_end_said, lost.only_processes) == (OTHERS, True, True)


def test_after_a_stop_those_that_may_continue_are_left(storage: Path) -> None:
    story = run(storage, STOPPED)

    assert (story.ended, story.is_end_said) == (OTHERS, True)


@pytest.mark.parametrize("result", [WorkerFailedError("actor rank 0 failed"), STOPPED])
def test_what_a_newer_attempt_may_use_is_left(storage: Path, result: Outcome | Exception) -> None:
    open_store(str(storage), uid="uid", attempt=4).claim()

    story = run(storage, result)

    assert (story.ended, story.is_end_said) == (OTHERS, False), "its pods are in use"


def test_an_attempt_that_is_fenced_out_leaves_them_before_the_newer_one_has_claimed_the_storage(storage: Path) -> None:
    story = run(storage, FencedOutError(str(storage), attempt=3, newer=4))

    assert (story.ended, story.is_end_said) == (OTHERS, False)


def test_a_deleted_job_leaves_nothing_though_another_attempt_seems_to_follow(storage: Path) -> None:
    open_store(str(storage), uid="uid", attempt=4).claim()

    story = run(storage, JobDeletedError("the PPOJob was deleted"))

    assert (story.ended, story.is_end_said) == (ALL, True)


def test_storage_that_cannot_be_read_keeps_nothing(tmp_path: Path) -> None:
    assert run(tmp_path / "missing", ValueError("a defect")).ended == ALL


@pytest.mark.parametrize("result", [STOPPED, WorkerLostError("critic rank 0 was lost")])
def test_without_a_successor_nothing_is_left(storage: Path, result: Outcome | Exception) -> None:
    assert run(storage, result, has_successor=False).ended == ALL
