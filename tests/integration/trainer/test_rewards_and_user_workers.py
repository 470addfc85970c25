"""A reward of function and model together, and users' own workers, on this machine's own Ray."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.workers import WorkerSpec
from ppojob_trainer.main.connection import connected
from ppojob_trainer.main.failures import JobFailedError, failure_record
from ppojob_trainer.protocol import DataProto
from ppojob_trainer.worker_groups.custom import HookCall, UserWorkers
from ppojob_trainer.worker_groups.errors import HookFailedError
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.partition import Share
from ppojob_trainer.worker_groups.placement import PlacedPool, place
from ppojob_trainer.worker_groups.stored_rows import store_rows
from ppojob_trainer.worker_groups.table import Table
from tests.integration.trainer.reward_model import write_reward_model
from tests.integration.trainer.runs import ALONE, Run, assert_same_steps, finish, job_of, records_of, spec_of

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "03-custom-worker" / "length_penalty.py"
START_LIMIT_S = 300.0
"""Of up to eight processes, which import torch at the same time."""
PENALTY = {"target_tokens": 4, "per_token": 0.05}


def both_of(model: Path, reward_model: Path, notes: Path) -> dict[str, Any]:
    """The tiny job with a reward of both kinds and a reference, each in two pools, and three user processes."""
    raw = spec_of(model, rollout=ALONE)
    return {
        **raw,
        "model": {**raw["model"], "reward": {"path": str(reward_model), "maxTokensPerGPU": 512}},
        "reward": {
            "type": "Both",
            "function": {"path": str(HERE / "judge.py"), "numWorkers": 2},
            "weights": {"function": 2.0, "model": 0.5},
        },
        "workers": [
            {
                "name": "length-penalty",
                "path": str(EXAMPLE),
                "className": "LengthPenalty",
                "kwargs": PENALTY,
                "pool": "critic",
                "numWorkers": 2,
                "hooks": [
                    {"after": "Score", "method": "penalize"},
                    {"after": "Step", "method": "count_repetitions"},
                ],
            },
            {
                "name": "recorder",
                "path": str(HERE / "user_workers.py"),
                "className": "Recorder",
                "kwargs": {"folder": str(notes)},
                "pool": "scoring",
                "hooks": [{"after": "Step", "method": "write"}],
            },
        ],
        "pools": [
            {"name": "actor", "gpusPerNode": 1},
            {"name": "critic", "gpusPerNode": 1},
            {"name": "scoring", "gpusPerNode": 2},
        ],
        "placement": {
            "actor": "actor",
            "critic": "critic",
            "reward": ["scoring", "critic"],
            "ref": ["actor", "critic"],
        },
        "checkpoint": {"everySteps": 0, "export": "Never"},
        "trainer": {"totalSteps": 2, "validateEverySteps": 2, "validateBeforeTraining": False},
        "schedule": {"mode": "Serial"},
    }


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture(scope="module")
def root(model: Path, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; the recorder's notes are in `notes`."""
    root = tmp_path_factory.mktemp("both")
    (root / "notes").mkdir()
    assert not (finish(root, both_of(model, reward_model, root / "notes")).root / "model").exists(), "export is Never"
    return root


def notes_of(root: Path) -> list[dict[str, Any]]:
    return [row for step in (1, 2) for row in json.loads((root / "notes" / f"step-{step}.json").read_text())]


def test_the_models_scores_are_those_of_transformers_in_its_own_vocabulary(
    root: Path, model: Path, reward_model: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    policy, own = (AutoTokenizer.from_pretrained(path) for path in (model, reward_model))
    classifier = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    rows = notes_of(root)
    assert len(rows) == 16
    for row in rows:
        text = policy.decode(row["response"], skip_special_tokens=True)
        chat = [*row["prompt"], {"role": "assistant", "content": text}]
        ids = own(own.apply_chat_template(chat, tokenize=False), add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            expected = float(classifier(ids["input_ids"]).logits[0, 0])
        assert row["model"] == pytest.approx(expected, abs=0.05), text


def test_the_score_is_the_weighted_sum_less_what_the_users_worker_takes(root: Path) -> None:
    for row in notes_of(root):
        penalty = PENALTY["per_token"] * max(0, len(row["response"]) - PENALTY["target_tokens"])
        assert row["total"] == pytest.approx(2.0 * row["function"] + 0.5 * row["model"] - penalty, abs=1e-4)


def test_each_way_of_scoring_and_each_hook_has_its_metrics(root: Path) -> None:
    rows, record = notes_of(root)[:8], records_of(root)[1]
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("function", "model", "total")}

    assert record["reward/function/mean"] == pytest.approx(means["function"], abs=1e-4)
    assert record["reward/model/mean"] == pytest.approx(means["model"], abs=1e-4)
    assert record["critic/score/mean"] == pytest.approx(means["total"], abs=1e-4)
    assert record["reward/small/mean"] >= 0
    assert record["reward/is_right/mean"] == 0
    assert record["reward/clip_ratio"] == 0
    assert record["length_penalty/mean"] > 0
    assert record["responses/distinct"] > 0
    assert record["recorder/rows"] == 8
    phases = ("reward", "reward_model", "hook_length-penalty", "hook_recorder")
    assert [phase for phase in phases if f"timing_s/{phase}" not in record] == []
    assert 0 < record["pool/scoring/busy_fraction"] <= 1


def test_validation_shows_the_reward_itself(root: Path) -> None:
    record = records_of(root)[2]

    (source,) = [name for name in record if name.endswith("/score/mean@1")]
    assert "products" in source
    assert record["val-core/score/mean"] == pytest.approx(record[source])
    assert -5 < record["val-core/score/mean"] < 5


def test_every_process_left_its_log(root: Path) -> None:
    logs = {path.stem for path in (root / "logs" / "attempt-0").iterdir()} - {"driver"}

    assert logs == {
        "actor-0", "rollout-0", "critic-0", "ref-0", "ref_critic-0", "data-0", "reward-0", "reward-1", "reward_model-0",
        "reward_model_scoring-0", "reward_model_scoring-1", "length-penalty-0", "length-penalty-1", "recorder-0",
    }  # fmt: skip


def test_reward_and_reference_in_two_pools_divide_each_batch(root: Path) -> None:
    """Both models have a copy in each of two pools, and each pool has one of the function's two workers."""
    trace = (root / "trace.json").read_text().rstrip().rstrip(",").rstrip("]")
    parts = {(e["name"], e["args"]["step"], e["cat"]) for e in json.loads(trace + "]") if e["ph"] == "X"}
    rewards, refs = {"reward_model", "reward_model_scoring"}, {"ref", "ref_critic"}
    for phase, step, roles in (
        ("reward_model", 1, rewards),
        ("reward_model", 2, rewards),
        ("testing", 2, rewards),
        ("ref", 1, refs),
        ("ref", 2, refs),
    ):
        assert {role for name, at, role in parts if (name, at) == (phase, step)} >= roles, (phase, step)


@pytest.mark.long
def test_reward_and_reference_in_one_pool_and_another_schedule_give_the_same_numbers(
    root: Path, model: Path, reward_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    raw = both_of(model, reward_model, tmp_path / "notes")
    placement = {**raw["placement"], "reward": ["scoring"], "ref": ["critic"]}

    schedule = {"mode": "Overlapped", "disabledOverlaps": ["Values", "Streaming"]}
    found = finish(tmp_path, {**raw, "placement": placement, "schedule": schedule})

    assert_same_steps(found, Run(root), rel=2e-2, absolute=2e-3)


# A function that does not score every response.


def unreliable(model: Path, **function: Any) -> dict[str, Any]:
    """A job whose reward scores responses early, part by part, in two reward workers."""
    return spec_of(
        model,
        reward={"function": {"path": str(HERE / "unreliable.py"), "numWorkers": 2, **function}},
        checkpoint={"everySteps": 0, "export": "Never"},
        trainer={"totalSteps": 2, "validateEverySteps": 2, "validateBeforeTraining": False},
        schedule={"mode": "Overlapped"},
    )


@pytest.mark.long
def test_responses_without_a_score_are_dropped_and_the_others_train(model: Path, tmp_path: Path) -> None:
    raw = unreliable(model, onError="Drop", kwargs={"hangs": True}, timeoutSeconds=1, concurrency=4)

    records = finish(tmp_path, raw).records

    for step in (1, 2):
        record = records[step]
        assert record["reward/errors"] == 0
        assert record["reward/dropped"] == record["reward/timeouts"]
        assert all(math.isfinite(value) for value in record.values())
        assert record["critic/score/min"] > 0, "a dropped response has the score 0"
    assert sum(records[step]["reward/dropped"] for step in (1, 2)) > 0
    assert records[2]["val-aux/reward/dropped"] >= 0
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    failed = {sample["index"]: sample["extras"]["error"] for sample in samples if "error" in sample["extras"]}
    assert failed
    for index, error in failed.items():
        assert f"exceeded timeoutSeconds (1 s) for prompt {index} of" in error


@pytest.mark.long
def test_with_fail_the_job_ends_at_once_and_is_not_retried(model: Path, tmp_path: Path) -> None:
    with pytest.raises(JobFailedError) as raised:
        finish(tmp_path, unreliable(model))

    record = failure_record(raised.value)
    assert (record.reason, record.kind) == (Reason.REWARD_FAILED, FailureKind.PERMANENT)
    assert re.search(
        r"reward rank \d: the reward function raised KeyError: 'every third length' "
        r"\(unreliable.py, line \d+\) for prompt \d+ of 'reasoning_gym/products'",
        record.message,
    )


@pytest.mark.long
def test_a_data_set_without_a_function_is_refused_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "2 + 2", "data_source": "codecontests"}) + "\n")
    raw = unreliable(model)
    files = {"files": {"paths": [str(data)]}}
    raw["data"] = {**raw["data"], "train": files, "trainBatchSize": 1}
    raw["reward"] = {"function": {"module": "ppojob_trainer.rewards.by_data_source"}}
    raw["actor"] = raw["critic"] = {"miniBatchSize": 1}

    with pytest.raises(JobFailedError, match="no reward function for the data source 'codecontests'"):
        finish(tmp_path, raw)


# Hooks alone, without models.


@pytest.fixture(scope="module")
def pool(model: Path) -> Iterator[PlacedPool]:
    # Room for the processes of all tests.
    workers = [worker_of("mark", numWorkers=20)]
    spec = job_of(Path("unused"), {**spec_of(model), "workers": workers}).spec
    with connected(spec):
        placed = asyncio.run(place(spec, START_LIMIT_S))
        yield placed["actor"]
        for one in placed.values():
            one.release()


def worker_of(*methods: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": "marker",
        "path": str(HERE / "user_workers.py"),
        "className": "Marker",
        "pool": "actor",
        "numWorkers": 3,
        "hooks": [{"after": "Score", "method": method} for method in methods],
        **fields,
    }


def hooks_of(pool: PlacedPool, logs: Path, *methods: str, **fields: Any) -> list[HookCall]:
    """Start three processes of `Marker`, or what `fields` says; return the calls of these methods."""
    raw = worker_of(*methods, **fields)
    user = UserWorkers.of(WorkerSpec.model_validate(raw), 0)
    group = user.start(Launcher(logs, START_LIMIT_S), pool, {})
    asyncio.run(wait_until_up([group]))
    return user.hooks(group)


def table_of(values: list[float]) -> Table:
    return Table.of_stored(store_rows(DataProto.from_dict({"numbers": torch.tensor(values)})))


async def call(hook: HookCall, table: Table) -> tuple[DataProto, dict[str, float]]:
    found, metrics = await hook.call(table, 7)
    return found.rows(Share(tuple(range(len(found))))).pull(START_LIMIT_S).batch, metrics


def test_each_dispatch_mode_gives_a_hook_its_rows(pool: PlacedPool, tmp_path: Path) -> None:
    mark, count, everybody, first = hooks_of(pool, tmp_path, "mark", "count", "everybody", "first")
    table = table_of([1.0, 2.0, 3.0, 4.0, 5.0])

    marked, metrics = asyncio.run(call(mark, table))
    assert marked.tensor("numbers").tolist() == [2, 4, 6, 8, 10], "the worker's column takes the place of ours"
    assert marked.tensor("rank").tolist() == [0, 1, 1, 2, 2]
    assert metrics == {"a": pytest.approx(5 / 3)}

    kept, metrics = asyncio.run(call(count, table))
    assert kept.tensor("numbers").tolist() == [1, 2, 3, 4, 5]
    assert metrics == {"rows/max": 2, "sum/min": 1}
    assert asyncio.run(call(everybody, table))[1] == {"rows": 5, "step": 7}
    assert asyncio.run(call(first, table))[1] == {"rank": 0, "sum": 15}


def test_a_hook_that_raises_or_loses_rows_is_named(pool: PlacedPool, tmp_path: Path) -> None:
    mark, drop = hooks_of(pool, tmp_path, "mark", "drop", kwargs={"fail": True})
    table = table_of([1.0, 2.0, 3.0, 4.0, 5.0])

    with pytest.raises(HookFailedError) as raised:
        asyncio.run(call(mark, table))
    record = failure_record(raised.value)
    assert (record.reason, record.kind) == (Reason.HOOK_FAILED, FailureKind.USER)
    where = "workers[0] (marker), hook after Score, method mark: marker rank 1 failed in mark: "
    assert record.message == where + "ZeroDivisionError: of the user's own"
    with pytest.raises(HookFailedError, match=r"method drop: .*returned \d rows, wanted a DataProto with a row"):
        asyncio.run(call(drop, table))


DIVIDED = {"className": "Divided", "numWorkers": 8, "tensorParallelSize": 2, "pipelineParallelSize": 2}


def test_processes_that_compute_together_get_the_same_rows(pool: PlacedPool, tmp_path: Path) -> None:
    """Eight ranks in two stages: ranks 0, 1, 4 and 5 compute a row together, and 2, 3, 6 and 7."""
    add, count = hooks_of(pool, tmp_path, "add", "count", **DIVIDED)
    asyncio.run(add.join())
    table = table_of([0.0, 100.0, 200.0])

    found, _ = asyncio.run(call(add, table))

    # Two ranks of a layer and ten, in two stages.
    assert found.tensor("numbers").tolist() == [24, 124, 224]
    assert found.tensor("rank").tolist() == [0, 2, 2]
    assert asyncio.run(call(count, table))[1] == {"rows": 1.5, "rank/max": 2}, "the first of each shard answers"
    assert asyncio.run(call(add, table_of([1.0])))[0].tensor("numbers").tolist() == [25], "some have no rows"


def test_a_worker_that_cannot_join_is_named(pool: PlacedPool, tmp_path: Path) -> None:
    (add,) = hooks_of(pool, tmp_path, "add", **{**DIVIDED, "numWorkers": 4, "kwargs": {"failing": 3}})

    with pytest.raises(
        HookFailedError, match=r"workers\[0\] \(marker\): the processes could not join: .*no such model"
    ):
        asyncio.run(add.join())
