"""Processes outlive an attempt that lost others, and the next attempt in the same Ray cluster continues with them.

Attempts are separate processes, as the operator submits them. The first one is killed itself and the second one is
stopped, so all models continue in the third one. That one loses its rollout, so the fourth one takes over critic,
reference and reward, and starts the actor's pool again. The numbers are those of a run that nobody disturbed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.integration.trainer.attempts import (
    KEPT,
    attempt,
    core_of,
    failure_of,
    is_saved,
    num_resumed,
    processes_of,
    separate_ray,
)
from tests.integration.trainer.runs import (
    LIMIT_S,
    STEPS,
    Run,
    assert_same_steps,
    assert_same_weights,
    checkpointed_spec,
    job_of,
    log_of,
    records_of,
    reward_of_letters,
    wait_until,
)
from tests.processes import left_of

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

OF_ACTORS_POOL = {"actor-0", "rollout-0"}
OF_CRITICS_POOL = {"critic-0", "ref-0"}
SCORE_S = 0.5
"""Of each response. So a step takes seconds, and an attempt is ended before its last one, also if this test waits."""
LEFT_LIMIT_S = 120.0
"""Until a process whose end was ordered has ended."""


@pytest.fixture
def cluster() -> Iterator[None]:
    with separate_ray(job_of(Path("/"), checkpointed_spec(Path("/"))).spec):
        yield


def processes(root: Path) -> dict[str, psutil.Process]:
    """Return the processes of models that run now, by role and rank."""
    found = processes_of(root)
    return {name: found[name] for name in found.keys() & (OF_ACTORS_POOL | OF_CRITICS_POOL)}


def test_the_processes_of_other_pools_go_on_and_no_number_changes(
    cluster: None, undisturbed: Run, model: Path, tmp_path: Path
) -> None:
    job = job_of(tmp_path, {**checkpointed_spec(model), "reward": reward_of_letters(SCORE_S)})
    until: Callable[..., None] = partial(wait_until, root=tmp_path)

    with attempt(0, tmp_path, job) as driver:
        until(lambda: is_saved(tmp_path, 1), driver, "the checkpoint of step 1")
        first = processes(tmp_path)
        assert first.keys() == OF_ACTORS_POOL | OF_CRITICS_POOL
        engine = core_of(first["rollout-0"])
        driver.send_signal(signal.SIGKILL)

    with attempt(1, tmp_path, job) as driver:
        until(lambda: num_resumed(tmp_path) == 1, driver, "the second attempt resumes")
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(LIMIT_S) != 0
    assert failure_of(tmp_path).reason == "Interrupted"

    with attempt(2, tmp_path, job) as driver:
        until(lambda: num_resumed(tmp_path) == 2, driver, "the third attempt resumes")
        assert processes(tmp_path) == first, "all processes continue"
        os.kill(first["rollout-0"].pid, signal.SIGKILL)
        assert driver.wait(LIMIT_S) != 0
    failure = failure_of(tmp_path)
    assert (failure.reason, failure.only_processes) == ("WorkerLost", True), log_of(tmp_path)
    assert failure.message.startswith("rollout rank 0 was lost")
    assert left_of([engine], LEFT_LIMIT_S) == [], "vLLM's core ends with its owner, and releases its memory"

    with attempt(3, tmp_path, job) as driver:
        second: dict[str, psutil.Process] = {}

        def has_new_processes() -> bool:
            second.update(processes(tmp_path))
            return all(second.get(name, first[name]) != first[name] for name in OF_ACTORS_POOL)

        until(has_new_processes, driver, "the new processes of the actor's pool")
        assert driver.wait(LIMIT_S) == 0, log_of(tmp_path)
    assert {name for name, process in second.items() if process == first.get(name)} == OF_CRITICS_POOL
    assert left_of(second.values(), LEFT_LIMIT_S) == [], "the last attempt ends what it took over"

    kept = [record[KEPT] for record in records_of(tmp_path).values() if KEPT in record]
    assert (kept[0], kept[-1]) == (0.0, 3.0), "the second and the third attempt may not have finished a step"
    log = tmp_path / "logs" / "attempt-3" / "critic-0.log"
    assert str(tmp_path / "logs" / "attempt-0" / "critic-0.log") in log.read_text()
    found = Run(tmp_path)
    assert len(found.records) == STEPS + 1
    assert_same_steps(found, undisturbed, rel=1e-4, absolute=1e-6)
    assert_same_weights(found, undisturbed, model)
