"""Attempts of a job as separate processes in a Ray that outlives them, as the operator submits them.

Used by the tests of processes that continue in the next attempt, on the CPU and on GPUs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ppojob_api.v1alpha1.progress import FailureRecord
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.main.connection import local_resources
from tests.integration.trainer.ray_clusters import new_cluster
from tests.integration.trainer.runs import log_of

RESUMED = ": resuming after step "
KEPT = "restart/kept_processes"


@contextmanager
def separate_ray(spec: PPOJobSpec) -> Iterator[None]:
    """Start a Ray with the pools of a spec, to which attempts connect; end it, with all of its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # As `connected` sets it: processes without a share of a GPU see the GPUs.
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        started = new_cluster(
            num_cpus=2,
            num_gpus=sum(pool.gpus for pool in spec.pools) if spec.device is Device.CUDA else 0,
            resources=local_resources(spec),
            object_store_memory=2**30,
        )
        patch.setenv("RAY_ADDRESS", started.address)
        try:
            yield
        finally:
            started.shutdown()


@contextmanager
def attempt(number: int, root: Path, job: JobFile) -> Iterator[subprocess.Popen[bytes]]:
    """Start an attempt with the command that the operator submits."""
    text = job.encode()
    (root / "job.json").write_text(text)
    command = [sys.executable, "-m", "ppojob_trainer.main", "--job", str(root / "job.json")]
    about = ["--hash", JobFile.digest(text), "--generation", "1", "--attempt", str(number)]
    with (root / "output.txt").open("ab") as output:
        driver = subprocess.Popen([*command, *about], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait(60)


def processes_of(root: Path) -> dict[str, psutil.Process]:
    """Return the processes of a run, by role and rank: each has a child that copies its output."""
    found = {}
    for copier in psutil.process_iter(["cmdline", "ppid"]):
        match copier.info["cmdline"]:
            case ["tee", "-a", path] if Path(path).is_relative_to(root) and (of := _worker(copier.info["ppid"])):
                found[Path(path).stem] = of
    return found


def _worker(number: int) -> psutil.Process | None:
    """Return a process of Ray; None: it has ended. What copies its output ends later, and has another parent then."""
    try:
        process = psutil.Process(number)
        return process if "ray::" in " ".join(process.cmdline()) else None
    except psutil.NoSuchProcess:
        return None


def num_resumed(root: Path) -> int:
    """Return how many attempts have logged that they resume."""
    return (root / "output.txt").read_text(errors="replace").count(RESUMED)


def core_of(rollout: psutil.Process) -> psutil.Process:
    """Return the process in which the vLLM of a replica computes."""
    return next(child for child in rollout.children() if child.name().startswith("VLLM"))


def is_saved(root: Path, step: int) -> bool:
    return (root / "checkpoints" / f"step-{step}").is_dir()


def failure_of(root: Path) -> FailureRecord:
    """Return why the last attempt failed."""
    record = FailureRecord.from_log(log_of(root))
    assert record is not None, log_of(root)
    return record
