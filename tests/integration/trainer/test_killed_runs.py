"""`ppojob run`, killed by SIGKILL again and again, ends with the numbers of a run that nobody disturbed.

Real processes on CPU: Ray, FSDP2, vLLM, two pools in Overlapped, checkpoints in the background; the model is tiny. The
undisturbed run writes its checkpoints in the foreground, so that the two ways of saving are compared too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from tests.integration.trainer.test_ppo_on_ray import comparable, records_of, spec_of
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

STEPS = 4
LIMIT_S = 300.0
PROGRAM = "from ppojob_trainer.cli import main; main()"
POOLS = [{"name": "actor", "gpusPerNode": 1}, {"name": "critic", "gpusPerNode": 1}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    with started(root, model, {"everySteps": 1}) as run:
        assert run.wait(LIMIT_S) == 0, log_of(root)
    return root


def test_a_run_killed_twice_has_the_metrics_of_one_that_was_not(undisturbed: Path, model: Path, tmp_path: Path) -> None:
    moments: list[tuple[str, Callable[[], bool]]] = [
        ("inside the second save", lambda: any((tmp_path / "checkpoints").glob(".step-2.tmp-0/*/*"))),
        ("after the responses of its first step", lambda: num_generations(tmp_path) > generations_before),
    ]
    for name, has_come in moments:
        generations_before = num_generations(tmp_path)
        with started(tmp_path, model, {"everySteps": 1, "async": True}) as run:
            wait_until(has_come, run, name, tmp_path)
            kill(run)
    assert last_step(tmp_path) < STEPS, "the kills came before the end"

    with started(tmp_path, model, {"everySteps": 1, "async": True}) as run:
        assert run.wait(LIMIT_S) == 0, log_of(tmp_path)

    assert "attempt 2" in log_of(tmp_path)
    expected, found = records_of(undisturbed), records_of(tmp_path)
    assert list(found) == list(expected) == [*range(1, STEPS + 1)]
    for step, record in expected.items():
        assert comparable(found[step]) == pytest.approx(comparable(record), rel=1e-4, abs=1e-6), f"step {step}"
    tracker = json.loads((tmp_path / "checkpoints" / "tracker.json").read_text())
    assert tracker["step"] == STEPS
    assert not list((tmp_path / "checkpoints").glob(".step-*")), "what the kills left half done is gone"


def test_a_checkpoint_that_lost_a_file_is_refused_with_the_older_one(
    undisturbed: Path, model: Path, tmp_path: Path
) -> None:
    newest = undisturbed / "checkpoints" / f"step-{STEPS}"
    victim = next((newest / "critic").glob("*.distcp"))
    victim.rename(tmp_path / "kept")
    try:
        with started(undisturbed, model, {"everySteps": 1}) as run:
            assert run.wait(LIMIT_S) == 1
    finally:
        (tmp_path / "kept").rename(victim)

    error = log_of(undisturbed).splitlines()
    named = [line for line in error if line.startswith("error: CheckpointUnreadable: ")]
    assert len(named) == 1, error[-20:]
    assert f"checkpoint {newest} cannot be read: critic/{victim.name} is missing" in named[0]
    older = newest.with_name(f"step-{STEPS - 1}")
    assert f"to go on from step {STEPS - 1}, set checkpoint.resumeFrom to {older}" in named[0]


def test_one_pool_of_two_ranks_goes_on_with_the_numbers_of_two_pools_of_one(
    undisturbed: Path, model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(undisturbed, root)
    wound_back = {"everySteps": 1, "resumeFrom": str(root / "checkpoints" / f"step-{STEPS - 1}")}
    one = {"pools": [{"name": "one", "gpusPerNode": 2}], "placement": {"actor": "one"}}
    with started(root, model, wound_back, **one) as run:
        assert run.wait(LIMIT_S) == 0, log_of(root)

    assert f"going on after step {STEPS - 1}" in log_of(root)
    expected, found = records_of(undisturbed), records_of(root)
    assert list(found) == list(expected)
    assert found[STEPS]["time"] != expected[STEPS]["time"], "the last step was done again"
    assert comparable(found[STEPS]) == pytest.approx(comparable(expected[STEPS]), rel=2e-2, abs=2e-3)


@contextmanager
def started(root: Path, model: Path, checkpoint: dict[str, Any], **layout: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start `ppojob run` on the run's folder; whatever is left of it at the end is ended."""
    spec = spec_of(
        model,
        # So slow that a step lasts longer than a look at it.
        reward={"function": {"path": str(Path(__file__).with_name("count_letters.py")), "kwargs": {"seconds": 0.1}}},
        checkpoint={"keep": 2, "export": "Never", **checkpoint},
        trainer={"totalSteps": STEPS, "validateEverySteps": 0},
        **({"pools": POOLS} | layout),
    )
    raw = {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": {"name": "killed"}, "spec": spec}
    (root / "job.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-c", PROGRAM, "run", str(root / "job.yaml"), "--output", str(root)]
    with (root / "output.txt").open("ab") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield run
    finally:
        kill(run)


def kill(run: subprocess.Popen[bytes]) -> None:
    """Kill the program and every process that it has started, as a machine that goes down does."""
    processes: list[Any] = []
    if run.poll() is None:
        driver = psutil.Process(run.pid)
        # Stopped first: it must not start or tidy anything between the look at its children and their end.
        driver.suspend()
        processes = [driver, *driver.children(recursive=True)]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    run.wait(60)
    psutil.wait_procs(processes[1:], timeout=60)


def wait_until(
    has_come: Callable[[], bool], run: subprocess.Popen[bytes], name: str, root: Path, limit_s: float = LIMIT_S
) -> None:
    deadline = time.monotonic() + limit_s
    while not has_come():
        assert run.poll() is None, f"the run ended before: {name}\n{log_of(root)}"
        assert time.monotonic() < deadline, f"did not come: {name}\n{log_of(root)}"
        time.sleep(0.005)


def num_generations(root: Path) -> int:
    path = root / "trace.json"
    return path.read_text().count('"name": "gen"') if path.exists() else 0


def last_step(root: Path) -> int:
    path = root / "metrics.jsonl"
    return max(records_of(root), default=0) if path.exists() else 0


def log_of(root: Path) -> str:
    return (root / "output.txt").read_text(errors="replace")[-20_000:]
