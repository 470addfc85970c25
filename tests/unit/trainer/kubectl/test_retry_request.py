"""`kubectl ppo retry`: what is requested, and what the user learns of the operator's answer."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from ppojob_trainer.kubectl import retry_request
from tests.unit.trainer.kubectl.conftest import FINISHED, MemoryCluster, job

Plugin = Callable[..., Result]

ANNOTATION = "ppojob.dev/retry-request"
FAILED = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "attempt 3 failed"}
RETRIED = {
    **FAILED,
    "status": "False",
    "reason": "Retried",
    "message": "attempt 4 resumes from the checkpoint of step 5",
}


class Operator:
    """The states of the job, one for each read; `%` stands for the requested value."""

    def __init__(self, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, *looks: dict[str, Any]) -> None:
        self._cluster = cluster
        self._looks = [job(**look) for look in looks]
        self._now = 0.0
        monkeypatch.setattr(cluster, "get", self.get)
        monkeypatch.setattr(retry_request.time, "sleep", self._sleep)
        monkeypatch.setattr(retry_request.time, "monotonic", lambda: self._now)

    def get(self, kind: str, *arguments: str) -> Any:
        found = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if patches := [command for command in self._cluster.commands if command[0] == "patch"]:
            value = json.loads(patches[0][5].removeprefix("--patch="))["metadata"]["annotations"][ANNOTATION]
            return json.loads(json.dumps(found).replace('"%"', json.dumps(value)))
        return found

    def _sleep(self, seconds: float) -> None:
        self._now += seconds


def test_the_operators_answer_is_waited_for_and_printed(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = {"conditions": [FAILED], "retry": {"request": "an-older-one"}}
    Operator(cluster, monkeypatch, ended, ended, {"conditions": [RETRIED], "retry": {"request": "%"}})

    result = ppo("retry", "products")

    (patch,) = cluster.commands
    assert patch[:5] == ("patch", "ppojobs.ppojob.dev", "products", "--namespace=team", "--type=merge")
    words = "team/products: attempt 4 resumes from the checkpoint of step 5\n"
    assert (result.exit_code, result.stdout) == (0, words)


def test_a_refusal_is_an_error_with_the_operators_words(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"request": "%", "refusal": "nothing is left to do: 8 of 8 steps are done"}
    Operator(cluster, monkeypatch, {"conditions": [FINISHED]}, {"conditions": [FINISHED], "retry": answer})

    result = ppo("retry", "products")

    words = "error: team/products does not run again: nothing is left to do: 8 of 8 steps are done\n"
    assert (result.exit_code, result.stderr) == (1, words)


def test_a_job_that_has_not_ended_is_not_asked(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    Operator(cluster, monkeypatch, {"conditions": [RETRIED]})

    result = ppo("retry", "products")

    assert (result.exit_code, cluster.commands) == (1, [])
    assert "team/products has not ended: its phase is Running" in result.stderr


def test_an_operator_that_does_not_answer_is_waited_for_so_long_and_no_longer(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    Operator(cluster, monkeypatch, {"conditions": [FAILED], "retry": {"request": "an-older-one"}})

    result = ppo("retry", "products", "--timeout", "3")

    assert result.exit_code == 1
    assert "the operator has not answered within 3 s" in result.stderr
