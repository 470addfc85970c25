"""Processes on GPUs outlive an attempt, and the next attempt continues with them: their models, and vLLM's engines.

Two pools of one GPU, each with an engine. The seconds from the loss to the end of the next step are printed: run it
with -s or -rA.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ppojob_api.v1alpha1.resolve import JobFile
from tests.gpu.whole_runs import NUM_STEPS, lossy_spec, seconds_to_next_step, write_inputs
from tests.integration.trainer.attempts import (
    KEPT,
    RESUMED,
    attempt,
    core_of,
    failure_of,
    is_saved,
    processes_of,
    separate_ray,
)
from tests.integration.trainer.runs import Run, job_of, log_of, records_of, wait_until
from tests.processes import left_of

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(240),
]

LIMIT_S = 150.0
"""For one attempt."""
END_S = 30.0
PLACEMENT = {
    "actor": "actor",
    "critic": "critic",
    "ref": ["critic"],
    "reward": ["critic"],
    "rollout": ["actor", "critic"],
}
ENGINES = {"actor": "rollout-0", "critic": "rollout_critic-0"}
POOLS = {
    "actor": {"data-0", "actor-0", "rollout-0"},
    "critic": {"critic-0", "ref-0", "reward-0", "rollout_critic-0"},
}
"""The processes of each pool."""
ALL = POOLS["actor"] | POOLS["critic"]
# In the foreground: step 2 is not finished before the checkpoint of step 1 is saved.
CHECKPOINT = {"everySteps": 1, "keep": 2, "async": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def job(model: Path, tmp_path: Path) -> JobFile:
    return job_of(tmp_path, lossy_spec(model, dict.fromkeys(POOLS, 1), PLACEMENT, checkpoint=CHECKPOINT))


def test_all_processes_continue_after_the_loss_of_the_driver(job: JobFile) -> None:
    check_loss_of_the_driver(job)
    assert_compared(Path(job.root))


def test_the_processes_of_the_other_pool_continue_after_the_loss_of_the_critic(job: JobFile) -> None:
    check_loss_of_the_critic(job)
    assert_compared(Path(job.root))


def check_loss_of_the_driver(job: JobFile, limit_s: float = LIMIT_S) -> None:
    """Run two attempts; the driver of the first one is killed."""
    root = Path(job.root)
    with separate_ray(job.spec):
        first, cores, lost_at = lost_after_a_checkpoint(job, None, limit_s)
        with attempt(1, root, job) as driver:
            wait_until(lambda: RESUMED in log_of(root), driver, "the second attempt resumes", root, limit_s)
            assert workers_of(root) == first, "all processes continue"
            assert {pool: core_of(first[name]) for pool, name in ENGINES.items()} == cores
            assert driver.wait(limit_s) == 0, log_of(root)
        check_end(root, [*first.values(), *cores.values()], kept=len(ALL), lost_at=lost_at)


def check_loss_of_the_critic(job: JobFile, limit_s: float = LIMIT_S) -> None:
    """Run two attempts; the first one loses the critic's process."""
    root = Path(job.root)
    with separate_ray(job.spec):
        first, cores, lost_at = lost_after_a_checkpoint(job, "critic-0", limit_s)
        failure = failure_of(root)
        assert (failure.reason, failure.only_processes) == ("WorkerLost", True), log_of(root)
        assert failure.message.startswith("critic rank 0 was lost")
        with attempt(1, root, job) as driver:
            wait_until(lambda: RESUMED in log_of(root), driver, "the second attempt resumes", root, limit_s)
            second = workers_of(root)
            assert second.keys() == first.keys()
            assert {name for name, process in second.items() if process == first[name]} == POOLS["actor"]
            assert core_of(second[ENGINES["actor"]]) == cores["actor"]
            assert left_of([cores["critic"]], END_S) == [], "the core of an engine ends with its owner"
            assert driver.wait(limit_s) == 0, log_of(root)
        check_end(root, [*first.values(), *second.values(), *cores.values()], kept=len(POOLS["actor"]), lost_at=lost_at)


def workers_of(root: Path) -> dict[str, psutil.Process]:
    """Return the processes of all pools that run now."""
    return {name: process for name, process in processes_of(root).items() if name in ALL}


def lost_after_a_checkpoint(
    job: JobFile, role: str | None, limit_s: float
) -> tuple[dict[str, psutil.Process], dict[str, psutil.Process], float]:
    """Run the first attempt until it has a checkpoint, and kill one of its processes; None: its driver.

    Returns:
        The processes of the attempt, the processes of vLLM of each pool, and the time of the loss.
    """
    root = Path(job.root)
    with attempt(0, root, job) as driver:
        wait_until(
            lambda: is_saved(root, 1) and 1 in records_of(root), driver, "the checkpoint of step 1", root, limit_s
        )
        found = workers_of(root)
        assert found.keys() == ALL
        cores = {pool: core_of(found[name]) for pool, name in ENGINES.items()}
        lost_at = time.time()
        os.kill(driver.pid if role is None else found[role].pid, signal.SIGKILL)
        assert driver.wait(limit_s) != 0
    return found, cores, lost_at


def check_end(root: Path, found: list[psutil.Process], *, kept: int, lost_at: float) -> None:
    """Check what the second attempt has left: the metrics of all steps, and no process."""
    records = Run(root).records
    differences = [record["training/rollout_probs_diff_mean"] for record in records.values()]
    print(f"{seconds_to_next_step(root, lost_at):.1f} s from the loss to the end of the next step")
    print(f"mean differences of probabilities {differences}")
    assert list(records) == list(range(1, NUM_STEPS + 1))
    assert [record[KEPT] for record in records.values() if KEPT in record] == [0.0, float(kept)]
    assert left_of(found, END_S) == []


def assert_compared(root: Path) -> None:
    """Check that the second attempt has compared the parameters of all engines with the weights."""
    assert Run(root).records[NUM_STEPS]["training/compared_weights_version"] >= 1
