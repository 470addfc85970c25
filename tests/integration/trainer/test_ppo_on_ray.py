"""Whole runs on this machine's own Ray: FSDP2 on gloo, vLLM on CPU, a real reward, two pools; the model is tiny.

Which phase waits for which, in every schedule, is tested in virtual time (tests/unit/trainer/controller). Here the
real worker groups must not change the numbers: Overlapped and Serial, one rank and two, an engine or two, and a
run that was stopped and resumes in another layout.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator.status_server import OperatorMetrics
from ppojob_trainer.controller.loop import Outcome
from ppojob_trainer.main import groups as groups_module
from ppojob_trainer.main import run_job
from ppojob_trainer.telemetry.sinks.prometheus import series_of
from tests.integration.trainer.lost_engines import LosesPushes
from tests.integration.trainer.runs import (
    ALONE,
    ONE_POOL,
    SAME_MODEL,
    STEPS,
    Run,
    assert_same_steps,
    assert_same_weights,
    finish,
    job_of,
    mixture_spec,
    records_of,
    reward_of_letters,
    spec_of,
)
from tests.monitoring import expressions

pytestmark = pytest.mark.timeout(1800)

PHASES = (
    "data", "gen", "reward", "old_log_prob", "values", "ref", "adv", "update_critic", "update_actor", "update_weights",
)  # fmt: skip


ABSENT_HERE = {
    "ppojob_perf_mfu", "ppojob_perf_max_memory_allocated_gb", "ppojob_pool_gpu_utilization",
    "ppojob_pool_memory_peak_gb", "ppojob_pool_memory_total_gb", "ppojob_rollout_corr_kl",
}  # fmt: skip
"""What only a run on GPUs measures, or one with `algorithm.rolloutCorrection`."""


def test_a_run_is_finished_with_a_record_of_each_step(undisturbed: Run, model: Path) -> None:
    assert resolve(parse_spec(spec_of(model))).schedule.mode == "Overlapped"
    records = undisturbed.records
    assert list(records) == [0, *range(1, STEPS + 1)]
    assert all("val-core/score/mean" in record for record in records.values())
    for step in range(1, STEPS + 1):
        missing = [phase for phase in PHASES if f"timing_s/{phase}" not in records[step]]
        assert missing == []
        assert 0 < records[step]["pool/critic/busy_fraction"] <= 1
        assert records[step]["response_length/max"] <= 16


def test_a_run_measures_what_the_charts_dashboards_and_alerts_ask_for(undisturbed: Run) -> None:
    measured = ["step", "last_step_timestamp_seconds", *undisturbed.records[2]]
    exposed = {series_of(name).name for name in measured}
    by_others = ("up", "ray_", *(family.name for family in OperatorMetrics().registry.collect()))

    asked = {name for query in expressions.all_queries() for name in query.selectors if not name.startswith(by_others)}

    assert asked - exposed == ABSENT_HERE


def test_trainer_and_rollout_compute_the_same_model_after_every_push(undisturbed: Run) -> None:
    difference = {step: undisturbed.records[step]["training/rollout_probs_diff_mean"] for step in range(1, STEPS + 1)}
    assert {step: value for step, value in difference.items() if not value < SAME_MODEL} == {}
    assert undisturbed.records[2]["actor/reward_kl_penalty"] != 0


def test_a_push_that_changes_nothing_exceeds_the_limit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts agree, so only the difference of the probabilities shows it. The rates are those of the other runs."""
    monkeypatch.setattr(groups_module, "RolloutWorker", LosesPushes)
    raw = spec_of(
        model,
        algorithm={"advantageEstimator": "GRPO"},
        rollout={"samplesPerPrompt": 2},
        pools=[{"name": "one", "gpusPerNode": 1}],
        placement={"actor": "one"},
        trainer={"totalSteps": 2, "validateEverySteps": 0},
        checkpoint={"everySteps": 0, "export": "Never"},
    )

    records = finish(tmp_path, raw).records

    found = [records[step]["training/rollout_probs_diff_mean"] for step in (1, 2)]
    assert found[0] < SAME_MODEL < found[1], found


def test_phases_of_two_pools_overlap(undisturbed: Run) -> None:
    spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for event in read_trace(undisturbed.root / "trace.json"):
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            spans.setdefault((event["name"], event["args"]["step"]), []).append(span)

    assert overlap(spans["update_actor", 1][0], spans["update_critic", 1][0])
    # Values are computed on parts of the batch, beside the generation of the others and then beside the log-probs.
    beside = [*spans["gen", 1], *spans["old_log_prob", 1]]
    assert any(overlap(part, other) for part in spans["values", 1] for other in beside)
    assert min(start for start, _ in spans["values", 2]) >= spans["update_critic", 1][0][1]


def test_the_exported_model_loads_and_has_learned_something(undisturbed: Run, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, undisturbed.root / "model"))

    assert AutoTokenizer.from_pretrained(undisturbed.root / "model").chat_template
    changed = [name for name, value in after.state_dict().items() if not value.equal(before.state_dict()[name])]
    assert changed


def test_a_mixture_has_its_shares_and_passes_its_sources_more_than_once(undisturbed: Run) -> None:
    records = undisturbed.records

    assert [records[step]["training/epoch"] for step in (1, 2, 3)] == [0, 1, 2]
    assert [round(8 * records[step]["mixture/sums/share"]) for step in (1, 2, 3)] == [2, 3, 3]


def test_every_process_left_its_log(undisturbed: Run) -> None:
    logs = {path.stem for path in (undisturbed.root / "logs" / "attempt-0").iterdir()} - {"driver"}

    assert logs == {"actor-0", "rollout-0", "critic-0", "ref-0", "reward-0", "data-0"}


@pytest.fixture(scope="module")
def resumed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Stopped after a step of Serial in two pools, resumed with two ranks in one pool."""
    root = tmp_path_factory.mktemp("resumed")
    # Scoring takes a second and a half, so that the stop comes before the updates of step 2.
    slow = {"reward": reward_of_letters(0.2), "schedule": {"mode": "Serial"}}
    stop = threading.Event()
    watcher = threading.Thread(target=set_when, args=(stop, lambda: 1 in records_of(root)))
    watcher.start()

    stopped = run_job(job_of(root, mixture_spec(model, **slow)), attempt=0, stop=stop)
    watcher.join(timeout=60)

    assert stopped == Outcome(1, is_finished=False)
    assert list(records_of(root)) == [0, 1]
    return finish(root, mixture_spec(model, **{**slow, **ONE_POOL}), attempt=1)


@pytest.mark.long
def test_a_run_that_was_stopped_and_resumed_with_two_ranks_has_the_same_numbers(
    undisturbed: Run, resumed: Run, model: Path
) -> None:
    assert_same_steps(resumed, undisturbed, rel=2e-2, absolute=2e-3)
    assert_same_weights(resumed, undisturbed, model)
    logs = {path.stem for path in (resumed.root / "logs" / "attempt-1").iterdir()}
    assert {"actor-0", "actor-1", "critic-1", "ref-1"} <= logs


@pytest.mark.long
def test_two_ranks_send_the_same_model_to_the_rollout(resumed: Run) -> None:
    for step in range(1, STEPS + 1):
        assert resumed.records[step]["training/rollout_probs_diff_mean"] < SAME_MODEL, step


@pytest.mark.long
def test_an_engine_in_the_critics_pool_too_changes_no_number(undisturbed: Run, model: Path, tmp_path: Path) -> None:
    shared = {"placement": {"actor": "actor", "critic": "critic", "rollout": ["actor", "critic"]}}

    found = finish(tmp_path, mixture_spec(model, **shared))

    assert_same_steps(found, undisturbed, rel=2e-2, absolute=2e-3)
    assert_same_weights(found, undisturbed, model)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["Serial", "Overlapped"])
def test_a_reference_in_two_pools_changes_no_number(undisturbed: Run, model: Path, tmp_path: Path, mode: str) -> None:
    both = {"actor": "actor", "critic": "critic", "ref": ["actor", "critic"]}

    found = finish(tmp_path, mixture_spec(model, placement=both, schedule={"mode": mode}))

    assert_same_steps(found, undisturbed, rel=2e-2, absolute=2e-3)
    assert_same_weights(found, undisturbed, model)
    logs = {path.stem for path in (tmp_path / "logs" / "attempt-0").iterdir()}
    assert {"ref-0", "ref_critic-0"} <= logs
    if mode == "Serial":
        parts = [e for e in read_trace(tmp_path / "trace.json") if (e["ph"], e["name"]) == ("X", "ref")]
        roles = {step: {e["cat"] for e in parts if e["args"]["step"] == step} for step in range(1, STEPS + 1)}
        assert roles == {step: {"ref", "ref_critic"} for step in range(1, STEPS + 1)}


@pytest.mark.long
def test_without_a_critic_overlapped_changes_no_number(model: Path, tmp_path: Path) -> None:
    grpo: dict[str, Any] = {
        "algorithm": {"advantageEstimator": "GRPO", "kl": {"inLoss": True}},
        "rollout": {**ALONE, "samplesPerPrompt": 2},
        "trainer": {"totalSteps": 2, "validateEverySteps": 0},
    }
    apart = {
        "pools": [{"name": "trainer", "gpusPerNode": 1}, {"name": "rollout", "gpusPerNode": 1}],
        "placement": {"actor": "trainer", "rollout": ["rollout"]},
    }
    serial = finish(tmp_path / "serial", spec_of(model, **grpo, **apart, schedule={"mode": "Serial"}))

    overlapped = finish(tmp_path / "overlapped", spec_of(model, **grpo, **apart))

    assert_same_steps(overlapped, serial, rel=2e-2, absolute=2e-3)
    for record in serial.records.values():
        assert record["training/rollout_probs_diff_mean"] < SAME_MODEL
    assert_same_weights(overlapped, serial, model)
    spans = [
        {(e["name"], e["ts"], e["ts"] + e["dur"]) for e in read_trace(run.root / "trace.json") if e["ph"] == "X"}
        for run in (overlapped, serial)
    ]
    beside = [
        any(overlap((start, end), (other, until)) for name, start, end in each if name in ("old_log_prob", "ref")
            for phase, other, until in each if phase == "gen")
        for each in spans
    ]  # fmt: skip
    assert beside == [True, False], "log-probs run beside generation, in Overlapped only"


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An epoch of GRPO on adapters, in this process."""
    root = tmp_path_factory.mktemp("adapted")
    lora = {"path": str(model), "lora": {"rank": 8, "targetModules": ["q_proj", "down_proj"]}}
    data = spec_of(model)["data"]
    # Two batches of eight prompts; the others are left out of the epoch.
    data["train"]["reasoningGym"]["size"] = 21
    raw = spec_of(
        model,
        data=data,
        model={"actor": lora},
        algorithm={"advantageEstimator": "GRPO", "kl": {"inReward": True}},
        rollout={"samplesPerPrompt": 2},
        pools=[{"name": "one", "gpusPerNode": 1}],
        actor={"learningRate": 1e-2, "miniBatchSize": 4},
        trainer={"totalEpochs": 1, "validateEverySteps": 0},
    )
    del raw["placement"]
    assert job_of(root, raw).spec.placement.ref == ["one"]
    return finish(root, raw, steps=2)


def test_adapters_without_a_critic_are_their_own_reference_and_reach_the_rollout(adapted: Run) -> None:
    records = adapted.records
    assert [records[step]["training/rollout_probs_diff_mean"] < SAME_MODEL for step in (1, 2)] == [True, True]
    # The policy begins as its reference, and moves away from it.
    assert abs(records[1]["actor/reward_kl_penalty"]) < 1e-6
    assert records[2]["actor/reward_kl_penalty"] != 0
    assert "timing_s/values" not in records[1]
    assert abs(records[1]["critic/advantages/mean"]) < 0.1, "a group's advantages sum to 0"
    assert list(adapted.root.glob("**/adapter/adapter_model.safetensors"))
    # The second push leaves out embedding and norms, which have no adapters.
    assert records[2]["comm_mb/update_weights"] < 0.95 * records[1]["comm_mb/update_weights"]


def test_no_process_is_left(adapted: Run) -> None:
    deadline = time.monotonic() + 120
    while (left := children_of_ray()) and time.monotonic() < deadline:
        time.sleep(0.5)

    assert left == []


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

    found = []
    for child in psutil.Process(os.getpid()).children(recursive=True):
        # One that ends now, or has ended, is not left.
        with suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "ray" in child.name() or "ray::" in command:
                found.append(command[:100])
    return found
