"""Whole runs on this machine's own Ray: FSDP2 on gloo, vLLM on CPU, a real reward, two pools; the model is tiny."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.controller.loop import Outcome
from ppojob_trainer.main import JobFailedError, run_job
from tests import chart_metrics
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(1800)

TASK = {"task": "products", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
SPLIT = {
    "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
    "placement": {"actor": "actor", "rollout": "actor", "critic": "critic", "ref": "critic", "reward": "critic"},
}
TIMES = ("timing", "perf/", "pool/", "overlap/", "comm_")
PHASES = (
    "data", "gen", "reward", "old_log_prob", "values", "ref", "adv", "update_critic", "update_actor", "update_weights",
)  # fmt: skip


def spec_of(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "image": "i",
        "device": "cpu",
        "model": {"actor": {"path": str(model), "gradientCheckpointing": False}},
        "data": {
            "train": {"type": "ReasoningGym", "reasoningGym": {**TASK, "size": 32, "seed": 1}},
            "validation": {"type": "ReasoningGym", "reasoningGym": {**TASK, "size": 8, "seed": 2}},
            "trainBatchSize": 8,
            "maxPromptLength": 256,
            "maxResponseLength": 16,
        },
        # Random weights never write a right answer, but now and then a positive word's letters: any reward will do.
        "reward": {"function": {"path": str(Path(__file__).with_name("count_letters.py"))}},
        "algorithm": {"kl": {"inReward": True, "inLoss": True, "controller": {"type": "Adaptive"}}},
        "actor": {"learningRate": 1e-3, "miniBatchSize": 4},
        "critic": {"learningRate": 1e-3, "miniBatchSize": 4},
        "storage": {"persistentVolumeClaim": "c"},
        "trainer": {"totalSteps": 2, "validateEverySteps": 1},
        **SPLIT,
        **changes,
    }


def job_of(root: Path, raw: dict[str, Any]) -> JobFile:
    return JobFile(namespace="test", name="tiny", uid="uid-of-test", root=str(root), spec=resolve(parse_spec(raw)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def records_of(root: Path) -> dict[int, dict[str, float]]:
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


@dataclass
class Run:
    root: Path
    outcome: Outcome

    @property
    def records(self) -> dict[int, dict[str, float]]:
        return records_of(self.root)


@pytest.fixture(scope="module")
def overlapped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps in two pools, in the mode that Auto chooses there."""
    root = tmp_path_factory.mktemp("overlapped")
    job = job_of(root, spec_of(model))
    assert job.spec.schedule.mode == "Overlapped"
    return Run(root, run_job(job, attempt=0, stop=threading.Event()))


def test_a_run_is_finished_with_a_record_of_each_step(overlapped: Run) -> None:
    assert overlapped.outcome == Outcome(2, is_finished=True)
    records = overlapped.records
    assert list(records) == [0, 1, 2]
    assert all("val-core/score/mean" in record for record in records.values())
    for step in (1, 2):
        missing = [phase for phase in PHASES if f"timing_s/{phase}" not in records[step]]
        assert missing == []
        assert 0 < records[step]["pool/critic/busy_fraction"] <= 1
        assert records[step]["response_length/max"] <= 16


def test_a_run_measures_what_the_charts_dashboards_and_alerts_ask_for(overlapped: Run) -> None:
    measured = {**overlapped.records[2], "last_step_timestamp_seconds": 0.0}

    exposed = {f"ppojob_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}" for name in measured}

    assert chart_metrics.by_the_training().missing_from(exposed) == []


def test_trainer_and_rollout_compute_the_same_model_after_every_push(overlapped: Run) -> None:
    # The learning rate is such that the policy moves visibly: stale weights would be seen in the second step.
    assert [record["training/rollout_probs_diff_mean"] < 0.005 for record in list(overlapped.records.values())[1:]] == [
        True,
        True,
    ]
    assert overlapped.records[2]["actor/reward_kl_penalty"] != 0


def test_adapters_are_their_own_reference_and_reach_the_rollout(model: Path, tmp_path: Path) -> None:
    lora = {"path": str(model), "lora": {"rank": 8, "targetModules": ["q_proj", "down_proj"]}}
    changes = {
        "model": {"actor": lora, "critic": {"lora": {"rank": 4}}},
        "placement": {"actor": "actor", "critic": "critic"},
        "actor": {"learningRate": 1e-2, "miniBatchSize": 4},
    }
    job = job_of(tmp_path, {**spec_of(model), **changes})
    assert job.spec.placement.ref == "actor"

    outcome = run_job(job, attempt=0, stop=threading.Event())

    records = records_of(tmp_path)
    assert outcome == Outcome(2, is_finished=True)
    assert [records[step]["training/rollout_probs_diff_mean"] < 0.005 for step in (1, 2)] == [True, True]
    # The policy begins as its reference, and moves away from it.
    assert abs(records[1]["actor/reward_kl_penalty"]) < 1e-6
    assert records[2]["actor/reward_kl_penalty"] != 0
    assert list(tmp_path.glob("**/adapter/adapter_model.safetensors"))


def test_phases_of_two_pools_overlap(overlapped: Run) -> None:
    spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for event in read_trace(overlapped.root / "trace.json"):
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            spans.setdefault((event["name"], event["args"]["step"]), []).append(span)

    assert overlap(spans["update_actor", 1][0], spans["update_critic", 1][0])
    # Values are computed on parts of the batch, beside the generation of the others and then beside the log-probs.
    beside = [*spans["gen", 1], *spans["old_log_prob", 1]]
    assert any(overlap(part, other) for part in spans["values", 1] for other in beside)
    assert min(start for start, _ in spans["values", 2]) >= spans["update_critic", 1][0][1]


def test_the_exported_model_loads_and_has_learned_something(overlapped: Run, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, overlapped.root / "model"))

    assert AutoTokenizer.from_pretrained(overlapped.root / "model").chat_template
    changed = [name for name, value in after.state_dict().items() if not value.equal(before.state_dict()[name])]
    assert changed


def test_every_process_left_its_log(overlapped: Run) -> None:
    logs = {path.stem for path in (overlapped.root / "logs" / "attempt-0").iterdir()}

    assert logs == {"actor-0", "actor-1", "rollout-0", "critic-0", "ref-0", "reward-0", "data-0"}


def test_no_process_is_left(overlapped: Run) -> None:
    deadline = time.monotonic() + 30
    while (left := children_of_ray()) and time.monotonic() < deadline:
        time.sleep(0.5)

    assert left == []


def test_a_run_that_was_stopped_and_resumed_in_serial_has_the_same_numbers(
    overlapped: Run, model: Path, tmp_path: Path
) -> None:
    # Scoring takes a second and a half, so that the stop comes before the updates of step 2.
    function = {"path": str(Path(__file__).with_name("count_letters.py")), "kwargs": {"seconds": 0.2}}
    job = job_of(tmp_path, spec_of(model, schedule={"mode": "Serial"}, reward={"function": function}))
    stop = threading.Event()
    watcher = threading.Thread(target=set_when, args=(stop, lambda: has_record(tmp_path, 1)))
    watcher.start()

    first = run_job(job, attempt=0, stop=stop)
    watcher.join(timeout=60)
    second = run_job(job, attempt=1, stop=threading.Event())

    assert first == Outcome(1, is_finished=False)
    assert second == Outcome(2, is_finished=True)
    records = records_of(tmp_path)
    assert list(records) == [0, 1, 2]
    for step, record in overlapped.records.items():
        assert comparable(records[step]) == pytest.approx(comparable(record), rel=2e-2, abs=2e-3), f"step {step}"
    assert_same_weights(tmp_path, overlapped.root, model)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"schedule": {"mode": "Serial"}}, id="Serial"),
        pytest.param({"schedule": {"mode": "ParallelUpdate"}}, id="ParallelUpdate"),
        pytest.param({"schedule": {"mode": "Overlapped", "without": ["Values", "Streaming"]}}, id="without"),
        pytest.param({"placement": {"actor": "actor", "critic": "critic", "lentToRollout": ["critic"]}}, id="lent"),
    ],
)
def test_every_schedule_trains_the_same_weights(
    overlapped: Run, model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    outcome = run_job(job_of(tmp_path, spec_of(model, **changes)), attempt=0, stop=threading.Event())

    assert outcome == overlapped.outcome
    records = records_of(tmp_path)
    for step, record in overlapped.records.items():
        assert comparable(records[step]) == pytest.approx(comparable(record), rel=2e-2, abs=2e-3), f"step {step}"
    assert_same_weights(tmp_path, overlapped.root, model)


def test_without_a_critic_one_worker_does_everything(model: Path, tmp_path: Path) -> None:
    raw = spec_of(
        model,
        algorithm={"advantageEstimator": "grpo"},
        rollout={"samplesPerPrompt": 2},
        pools=[{"name": "one", "gpusPerNode": 1}],
        placement={"actor": "one"},
        trainer={"totalSteps": 1, "validateEverySteps": 0},
        checkpoint={"export": "Never"},
    )

    outcome = run_job(job_of(tmp_path, raw), attempt=0, stop=threading.Event())

    assert outcome.is_finished
    record = records_of(tmp_path)[1]
    assert "timing_s/values" not in record
    assert abs(record["critic/advantages/mean"]) < 0.1, "a group's advantages sum to 0"
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_not_there_fails_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_job(job_of(tmp_path, spec_of(tmp_path / "nothing")), attempt=0, stop=threading.Event())

    record = raised.value.record
    assert (record.reason, record.kind) == (Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT)
    assert str(tmp_path / "nothing") in record.message


def comparable(record: dict[str, float]) -> dict[str, float]:
    """What the schedule must not change."""
    return {name: value for name, value in record.items() if name != "time" and not name.startswith(TIMES)}


def assert_same_weights(root: Path, other: Path, before: Path) -> None:
    """Two runs exported the same policy: what differs is little beside what they learned."""
    one, two, old = (weights_of(folder) for folder in (root / "model", other / "model", before))
    assert one.keys() == two.keys() >= old.keys()
    apart = {name: float((one[name] - two[name]).norm() / (two[name] - old[name]).norm()) for name in old}
    assert {name: share for name, share in apart.items() if not share < 0.01} == {}


def weights_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: weight.float() for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


def has_record(root: Path, step: int) -> bool:
    path = root / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def set_when(event: threading.Event, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 900
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    event.set()


def read_trace(path: Path) -> list[dict[str, Any]]:
    text = path.read_text().rstrip().rstrip(",").rstrip("]")
    found: list[dict[str, Any]] = json.loads(text + "]")
    return found


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def children_of_ray() -> list[str]:
    """Return the command lines of this process's descendants that belong to Ray."""
    import psutil  # type: ignore[import-untyped]

    return [
        " ".join(child.cmdline())[:100]
        for child in psutil.Process(os.getpid()).children(recursive=True)
        if "ray" in child.name() or "ray::" in " ".join(child.cmdline())
    ]
