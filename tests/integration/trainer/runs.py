"""Whole runs of a tiny model on this machine's own Ray: the job, how a run is started and ended, what it left.

Shared by the tests of this folder. A run in this process is `run_job(job_of(...))`; `started` is `ppojob run`, a
separate process that can be killed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.controller.loop import Outcome
from ppojob_trainer.main import run_job
from ppojob_trainer.telemetry.records import read_metrics

TASK = {"task": "products", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
MIXTURE = {
    "mixture": [
        {"name": "products", "weight": 2, "reasoningGym": {**TASK, "size": 6, "seed": 1}},
        {"name": "sums", "weight": 1, "reasoningGym": {"task": "chain_sum", "size": 5, "seed": 1}},
    ]
}
"""In three steps of 8 prompts, the first source is passed more than twice, and 3 prompts of each epoch are left out."""
SPLIT = {
    "pools": [{"name": "actor", "gpusPerNode": 1}, {"name": "critic", "gpusPerNode": 1}],
    "placement": {"actor": "actor", "rollout": ["actor"], "critic": "critic", "ref": ["critic"], "reward": ["critic"]},
}
ONE_POOL = {"pools": [{"name": "one", "gpusPerNode": 2}], "placement": {"actor": "one"}}
TIMES = ("timing", "perf/", "pool/", "overlap/", "comm_", "restart/")
OF_LAYOUT = ("rollout/engines", "sampling/surplus_prompts", "sampling/surplus_samples")
"""Another layout may have another number of engines, and may have begun other prompts when a batch was full."""
STEPS = 3
LIMIT_S = 900.0
SAME_MODEL = 1e-4
"""Largest `training/rollout_probs_diff_mean` of a rollout that has the actor's weights.

On the CPU it gets them in float32: the runs here show at most 5e-7. They show 0.04 to 0.06 where no weights are pushed
(`test_a_push_that_changes_nothing_exceeds_the_limit`), and 3e-4 where one of eight experts of the last of two layers
keeps its old weights.
"""
PROGRAM = "from ppojob_trainer.cli import main; main()"
ALONE = {"maxNumSeqs": 1, "enablePrefixCaching": False}
"""Settings of a rollout whose runs are compared: vLLM computes each sequence alone.

It rounds otherwise where it computes several together, and which those are depends on when the requests arrive."""


@dataclass(frozen=True)
class Run:
    """A finished run: its folder."""

    root: Path

    @property
    def records(self) -> dict[int, dict[str, float]]:
        """The metrics of each step; 0 is the validation before training."""
        return records_of(self.root)


def reward_of_letters(seconds: float = 0.0) -> dict[str, Any]:
    """Return a reward that random weights can earn; each score takes that long."""
    return {"function": {"path": str(Path(__file__).with_name("count_letters.py")), "kwargs": {"seconds": seconds}}}


def reward_until(root: Path, num_records: int) -> dict[str, Any]:
    """Return the same reward; it gives no scores once the run in `root` has so many records, until `kill_unfinished`.

    Steps that begin afterwards cannot end, so a run cannot end before a test kills it, however slow the machine is.
    """
    reward = reward_of_letters()
    function = {
        **reward["function"],
        "kwargs": {"root": str(root), "num_records": num_records},
        "timeoutSeconds": int(LIMIT_S),
    }
    return {"function": function}


def kill_unfinished(run: subprocess.Popen[bytes], root: Path) -> None:
    """Kill a run with the reward of `reward_until`; the next one with this spec gets scores."""
    kill(run)
    (root / "is-killed").touch()


def spec_of(model: Path, /, **changes: Any) -> dict[str, Any]:
    """Return a spec of three steps in two pools, with these sections in place of the usual ones."""
    return {
        "image": "i",
        "device": "CPU",
        "model": {"actor": {"path": str(model), "gradientCheckpointing": False}},
        "data": {
            "train": {"reasoningGym": {**TASK, "size": 32, "seed": 1}},
            "validation": {"reasoningGym": {**TASK, "size": 8, "seed": 2}},
            "trainBatchSize": 8,
            "maxPromptLength": 256,
            "maxResponseLength": 16,
        },
        "reward": reward_of_letters(),
        "algorithm": {"kl": {"inReward": True, "inLoss": True, "controller": {"type": "Adaptive"}}},
        "actor": {"learningRate": 1e-3, "miniBatchSize": 4},
        "critic": {"learningRate": 1e-3, "miniBatchSize": 4},
        "storage": {"claimName": "c"},
        "trainer": {"totalSteps": STEPS, "validateEverySteps": 1},
        **SPLIT,
        **changes,
    }


def mixture_spec(model: Path, /, **changes: Any) -> dict[str, Any]:
    """Return the same with a mixture, on which the undisturbed run trains."""
    spec = spec_of(model, **{"rollout": ALONE, **changes})
    return {**spec, "data": {**spec["data"], "train": MIXTURE}}


def checkpointed_spec(model: Path, **checkpoint: Any) -> dict[str, Any]:
    """Return the same with a checkpoint after each step; steps are so slow that a test can see one."""
    checkpoint = {"everySteps": 1, "keep": 2, **checkpoint}
    return mixture_spec(model, reward=reward_of_letters(0.1), checkpoint=checkpoint)


def job_of(root: Path, raw: dict[str, Any]) -> JobFile:
    """Return the job file of a spec."""
    return JobFile(namespace="test", name="tiny", uid="uid-of-test", root=str(root), spec=resolve(parse_spec(raw)))


def finish(root: Path, raw: dict[str, Any], attempt: int = 0, steps: int | None = None) -> Run:
    """Run a job in this process to its end; `steps` is the end of a job with totalEpochs."""
    job = job_of(root, raw)
    last = steps or job.spec.trainer.total_steps
    assert last is not None
    assert run_job(job, attempt=attempt, stop=threading.Event()) == Outcome(last, True)
    return Run(root)


@contextmanager
def started(root: Path, spec: dict[str, Any], program: str = PROGRAM) -> Iterator[subprocess.Popen[bytes]]:
    """Start `ppojob run` on the run's folder; whatever is left of it at the end is ended.

    `program` is Python code that does the same in another way.
    """
    raw = {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": {"name": "tiny"}, "spec": spec}
    (root / "job.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-c", program, "run", str(root / "job.yaml"), "--output", str(root)]
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
    """Wait for something that a run does before it ends."""
    deadline = time.monotonic() + limit_s
    while not has_come():
        assert run.poll() is None, f"the run ended before: {name}\n{log_of(root)}"
        assert time.monotonic() < deadline, f"did not come: {name}\n{log_of(root)}"
        time.sleep(0.005)


def log_of(root: Path) -> str:
    """Return the end of what `ppojob run` printed."""
    return (root / "output.txt").read_text(errors="replace")[-20_000:]


def records_of(root: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step that a run has recorded so far; it may still write."""
    return {int(record["step"] or 0): record for record in read_metrics(root / "metrics.jsonl")}


def comparable(record: dict[str, float]) -> dict[str, float]:
    """Return what neither the schedule, another layout, nor an interruption may change."""
    left_out = ("time", *OF_LAYOUT)
    return {name: value for name, value in record.items() if name not in left_out and not name.startswith(TIMES)}


def assert_same_steps(found: Run, expected: Run, *, rel: float, absolute: float) -> None:
    """Compare the metrics of all steps."""
    assert list(found.records) == list(expected.records)
    for step, record in expected.records.items():
        of_step, expected_of_step = comparable(found.records[step]), comparable(record)
        assert not of_step.keys() ^ expected_of_step.keys(), f"step {step}"
        others = {
            name: (of_step[name], value)
            for name, value in expected_of_step.items()
            if of_step[name] != pytest.approx(value, rel=rel, abs=absolute, nan_ok=True)
        }
        assert others == {}, f"step {step}: {others}"


def assert_same_weights(found: Run, expected: Run, before: Path, largest: float = 0.01) -> None:
    """Two runs exported the same policy: what differs is at most the share `largest` of what they learned."""
    one, two, old = (weights_of(folder) for folder in (found.root / "model", expected.root / "model", before))
    assert one.keys() == two.keys() >= old.keys()
    apart = {name: float((one[name] - two[name]).norm() / (two[name] - old[name]).norm()) for name in old}
    assert {name: share for name, share in apart.items() if not share < largest} == {}


def weights_of(folder: Path) -> dict[str, Any]:
    """Return the tensors of a model's folder."""
    from safetensors.torch import load_file

    return {name: weight.float() for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}
