"""`kubectl ppo checkpoint`: the request, its answer, and the message for a job without a trainer."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from ppojob_trainer.kubectl import checkpoint_request
from tests.unit.trainer.kubectl.conftest import FINISHED, MemoryCluster, job

Plugin = Callable[..., Result]

ANNOTATION = "ppojob.dev/checkpoint-request"
SUBMITTED = {"type": "Submitted", "status": "True", "reason": "TrainerSubmitted", "message": "attempt 0"}
SUSPENDED = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": "no pods"}
DONE = {"step": 31}
OLD = {"step": 30, "path": "/data/step-30", "time": "2026-01-31T12:00:00Z", "request": "an-older-one"}
NEW = {"step": 32, "path": "/data/step-32", "time": "2026-01-31T12:10:00Z"}


class Trainer:
    """The job's answers, one for each read; `%` stands for the requested value."""

    def __init__(self, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, *looks: dict[str, Any]) -> None:
        self._cluster = cluster
        self._looks = [job(**look) for look in looks]
        self._now = 0.0
        monkeypatch.setattr(cluster, "get", self.get)
        monkeypatch.setattr(checkpoint_request.time, "sleep", self._sleep)
        monkeypatch.setattr(checkpoint_request.time, "monotonic", lambda: self._now)

    def get(self, kind: str, *arguments: str) -> Any:
        found = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if patches := [command for command in self._cluster.commands if command[0] == "patch"]:
            value = json.loads(patches[0][5].removeprefix("--patch="))["metadata"]["annotations"][ANNOTATION]
            annotations = found["metadata"].setdefault("annotations", {})
            annotations.setdefault(ANNOTATION, value)
            return json.loads(json.dumps(found).replace('"%"', json.dumps(value)))
        return found

    def _sleep(self, seconds: float) -> None:
        self._now += seconds


def running(checkpoint: dict[str, Any] | None = OLD, *conditions: dict[str, str]) -> dict[str, Any]:
    status = {"conditions": [SUBMITTED, *conditions], "progress": DONE}
    return status if checkpoint is None else {**status, "checkpoint": checkpoint}


def test_the_answer_is_waited_for_and_its_step_printed(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(cluster, monkeypatch, running(), running(), running({**NEW, "request": "%"}))

    result = ppo("checkpoint", "products")

    (patch,) = cluster.commands
    assert patch[:5] == ("patch", "ppojobs.ppojob.dev", "products", "--namespace=team", "--type=merge")
    assert (result.exit_code, result.stdout) == (
        0,
        "team/products: requested a checkpoint; step 31 is done\nteam/products: checkpoint of step 32: /data/step-32\n",
    )


def test_every_request_has_a_different_value(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(cluster, monkeypatch, running())

    for _ in range(2):
        assert ppo("checkpoint", "products", "--timeout", "0").exit_code == 0

    first, second = (command[5] for command in cluster.commands)
    assert first != second


def test_a_checkpoint_that_answers_nobody_is_no_answer(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(cluster, monkeypatch, running({**NEW, "request": "an-older-one"}))

    result = ppo("checkpoint", "products", "--timeout", "3")

    assert (result.exit_code, result.stderr) == (
        1,
        "error: team/products has saved no checkpoint within 3 s: the request stays active, and the trainer saves one "
        "after the current step; see kubectl ppo status products\n",
    )


def test_a_restart_meanwhile_is_waited_out(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarting = {"conditions": [{**SUBMITTED, "status": "False"}], "progress": DONE, "checkpoint": OLD}
    Trainer(cluster, monkeypatch, running(), restarting, running({**NEW, "request": "%"}))

    assert "checkpoint of step 32" in ppo("checkpoint", "products").stdout


def test_the_answer_to_somebody_elses_later_request_will_do(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(cluster, monkeypatch, running(), running({**NEW, "request": "later"}))
    trainer._looks[1]["metadata"]["annotations"] = {ANNOTATION: "later"}

    assert "checkpoint of step 32" in ppo("checkpoint", "products").stdout


@pytest.mark.parametrize("end", [FINISHED, SUSPENDED])
def test_the_last_checkpoint_of_a_job_that_ends_meanwhile_answers_it(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch, end: dict[str, str]
) -> None:
    Trainer(cluster, monkeypatch, running(), running(NEW, end))

    assert "checkpoint of step 32: /data/step-32" in ppo("checkpoint", "products").stdout


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (running(OLD, FINISHED), "has ended (Complete: TrainerSucceeded) and saved none; its newest checkpoint is of"),
        (running(None, SUSPENDED), "is suspended and saved none; it has no checkpoint"),
    ],
)
def test_a_job_that_ends_without_an_answer_is_an_error(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch, look: dict[str, Any], words: str
) -> None:
    Trainer(cluster, monkeypatch, running(), look)

    result = ppo("checkpoint", "products")

    assert result.exit_code == 1
    assert words in result.stderr


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (running(OLD, FINISHED), "has ended (Complete: TrainerSucceeded), so there is nothing to save; its newest"),
        (running(OLD, SUSPENDED), "is suspended, so there is nothing to save; its newest checkpoint is of step 30: /d"),
        ({}, "has no trainer (see kubectl ppo explain-pending), so there is nothing to save; it has no checkpoint"),
    ],
)
def test_a_job_without_a_trainer_is_not_asked(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch, look: dict[str, Any], words: str
) -> None:
    Trainer(cluster, monkeypatch, look)

    result = ppo("checkpoint", "products")

    assert (result.exit_code, cluster.commands) == (1, [])
    assert words in result.stderr


def test_a_job_that_is_not_there_has_kubectls_words(cluster: MemoryCluster, ppo: Plugin) -> None:
    result = ppo("checkpoint", "products")

    assert (result.exit_code, result.stderr) == (1, 'error: ppojobs.ppojob.dev "products" not found\n')


def test_another_job_of_the_same_name_is_not_taken_for_it(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(cluster, monkeypatch, running(), running(NEW))
    trainer._looks[1]["metadata"]["uid"] = "another"

    result = ppo("checkpoint", "products")

    assert result.exit_code == 1
    assert "was deleted; another job has its name now" in result.stderr
