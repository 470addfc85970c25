"""`kubectl ppo status` and `metrics`: what the tables say."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import Result

from ppojob_trainer.kubectl import app as plugin
from ppojob_trainer.kubectl.status_table import duration
from tests.unit.trainer.kubectl.conftest import FINISHED, MemoryCluster, job

Plugin = Callable[..., Result]
PROGRESS = {"step": 5, "totalSteps": 8, "percentage": 62, "etaSeconds": 600, "reward": "0.31"}


@pytest.fixture(autouse=True)
def _noon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Clock":
            return cls(2026, 1, 31, 12, 30, tzinfo=UTC)

    monkeypatch.setattr(plugin, "datetime", Clock)


def words(result: Result) -> list[list[str]]:
    """Return the output's lines as words."""
    assert result.exit_code == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines() if line.strip()]


def test_all_jobs_stand_in_a_line_each(cluster: MemoryCluster, ppo: Plugin) -> None:
    busy = [{"name": "actor", "busyFraction": "0.91"}, {"name": "critic"}]
    running = job("products", progress=PROGRESS, ready="3/3", pools=busy, retries={"total": 1})
    cluster.objects["ppojobs.ppojob.dev"] = [running, {**job("new"), "status": {}}]

    heading, first, second = words(ppo("status"))

    assert heading == ["NAME", "PHASE", "STEP", "PROGRESS", "LEFT", "REWARD", "READY", "BUSY", "RETRIES", "AGE"]
    assert first == ["products", "Running", "5/8", "62", "%", "10m", "0.31", "3/3", "actor", "91%", "1", "30m"]
    assert second == ["new", "Pending", "-", "-", "-", "-", "-", "-", "0", "30m"]


LONG = "a-name-of-a-job-that-takes-much-room"


def test_a_table_in_a_pipe_is_as_wide_as_it_needs(cluster: MemoryCluster, ppo: Plugin) -> None:
    busy = [{"name": name, "busyFraction": "0.91"} for name in ("actor", "critic", "rollout")]
    cluster.objects["ppojobs.ppojob.dev"] = [job(LONG, progress=PROGRESS, ready="3/3", pools=busy)]

    _, row = words(ppo("status"))

    assert row[:3] == [LONG, "Running", "5/8"]


def test_a_narrow_terminal_folds_names_and_cuts_no_number(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cluster.objects["ppojobs.ppojob.dev"] = [job(LONG, progress=PROGRESS, ready="3/3")]

    heading, row, *more = words(ppo("status"))

    assert heading == ["NAME", "PHASE", "STEP", "PROGRESS", "LEFT", "REWARD", "READY", "BUSY", "RETRIES", "AGE"]
    assert row[1:3] == ["Running", "5/8"]
    assert "".join([row[0], *(line[0] for line in more)]) == LONG


def test_with_all_namespaces_each_line_begins_with_its_own(cluster: MemoryCluster, ppo: Plugin) -> None:
    cluster.objects["ppojobs.ppojob.dev"] = [job()]

    heading, line = words(ppo("status", "-A"))

    assert (heading[0], line[0]) == ("NAMESPACE", "team")


def test_without_jobs_it_says_so(cluster: MemoryCluster, ppo: Plugin) -> None:
    assert ppo("status").stdout == "no PPOJobs found\n"


DIFFERENCE = "rollout_probs_diff_mean 0.0004"


def test_one_job_is_shown_in_full(cluster: MemoryCluster, ppo: Plugin) -> None:
    cluster.objects["ppojobs.ppojob.dev"] = [
        job(
            phase="Failed",
            conditions=[{"type": "Failed", "status": "True", "reason": "OutOfMemory", "message": "critic, rank 1"}],
            pools=[
                {"name": "critic", "desiredNodes": 2, "readyNodes": 1, "gpus": 4, "message": "0/2 nodes [gpu]"},
                {"name": "spot", "desiredNodes": 8, "readyNodes": 5, "gpus": 8, "engines": 4, "busyFraction": "0.5"},
            ],
            lastFailure={"attempt": 2, "reason": "OutOfMemory", "message": "critic, rank 1"},
            checkpoint={"step": 4, "path": "/data/c/4"},
            model={"path": "/data/model", "address": "hf://team/products"},
            fetch={"bytes": 1_500_000_000, "totalBytes": 3_000_000_000, "address": "hf://a/b", "message": "waits"},
            sources=[{"address": "s3://c/d", "path": "/data/sources/s3/c/d-1", "bytes": 2_000_000_000}],
            avoidedNodes=[{"name": "node-7", "reason": "GPUFault", "attempt": 1, "time": "2026-01-31T13:00:00Z"}],
            checks={
                "step": 5,
                "oldestWeightsStep": 4,
                "maxStaleness": 0,
                "rolloutProbsDiffMean": "0.0004",
                "idleFraction": "0.021",
            },
            recommendation="1 GPU would do",
            operator={"namespace": "ppojob-system", "lease": "ppojob-leader", "version": "0.1.0"},
        )
    ]

    shown = words(ppo("status", "products"))

    for line in (
        ["Failed", "True", "OutOfMemory", "critic,", "rank", "1"],
        ["uploaded", "hf://team/products"],
        ["critic", "1/2", "4", "-", "-", "0/2", "nodes", "[gpu]"],
        ["spot", "5/8", "8", "4", "50%"],
        ["last", "failure", "(attempt", "2):", "OutOfMemory:", "critic,", "rank", "1"],
        ["fetch", "1.50", "GB", "of", "3.00", "GB;", "hf://a/b;", "waits"],
        ["source", "s3://c/d,", "2.00", "GB,", "in", "/data/sources/s3/c/d-1"],
        ["checkpoint", "step", "4,", "/data/c/4"],
        ["model", "/data/model"],
        ["avoided", "node", "node-7,", "GPUFault", "in", "attempt", "1,", "2026-01-31T13:00:00Z"],
        f"last step 5: weights of step 4 (staleness 0), {DIFFERENCE}, all pools idle 2%".split(),
        ["recommendation", "1", "GPU", "would", "do"],
        ["operator", "ppojob-system,", "version", "0.1.0"],
    ):
        assert line in shown


def test_a_job_that_is_not_there_is_an_error_in_kubectls_words(cluster: MemoryCluster, ppo: Plugin) -> None:
    result = ppo("status", "nothing")

    assert (result.exit_code, result.stderr) == (1, 'error: ppojobs.ppojob.dev "nothing" not found\n')


def test_watching_without_a_terminal_prints_changes_until_all_are_finished(
    cluster: MemoryCluster, ppo: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([1, 1, 2])
    jobs = [job(progress={**PROGRESS, "step": 0})]
    cluster.objects["ppojobs.ppojob.dev"] = jobs

    def pass_time(seconds: float) -> None:
        step = next(steps)
        jobs[0] = job(progress={**PROGRESS, "step": step}, conditions=[FINISHED] if step == 2 else [])

    monkeypatch.setattr("ppojob_trainer.kubectl.app.time.sleep", pass_time)

    result = ppo("status", "--watch")

    told = [line for line in result.stdout.splitlines() if line]
    assert [line.split()[3] for line in told] == ["0/8", "1/8", "2/8"]
    assert result.exit_code == 0


def test_the_last_steps_metrics_come_from_the_status(cluster: MemoryCluster, ppo: Plugin) -> None:
    metrics = [{"name": "critic/score/mean", "value": "0.31"}, {"name": "actor/ppo_kl", "value": "0.002"}]
    cluster.objects["ppojobs.ppojob.dev"] = [job(progress=PROGRESS, metrics=metrics)]

    assert words(ppo("metrics", "products")) == [
        ["metric", "step", "5"],
        ["critic/score/mean", "0.31"],
        ["actor/ppo_kl", "0.002"],
    ]
    assert cluster.commands == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172800, "2d")]
)
def test_times_are_written_as_kubectl_writes_them(seconds: int, text: str) -> None:
    assert duration(timedelta(seconds=seconds)) == text


OPERATOR = {"namespace": "ppojob-system", "lease": "ppojob-leader", "version": "1"}


@pytest.mark.parametrize(
    ("status", "is_said"),
    [
        ({}, True),
        ({"phase": "Suspended"}, True),
        ({"phase": "Pending", "operator": OPERATOR}, False),
        ({"phase": "Running"}, False),
        ({"phase": "Succeeded", "conditions": [FINISHED]}, False),
    ],
)
def test_a_job_that_waits_without_an_operator_is_explained(
    cluster: MemoryCluster, ppo: Plugin, status: dict[str, object], is_said: bool
) -> None:
    cluster.objects["ppojobs.ppojob.dev"] = [{**job("new"), "status": status}]

    said = " ".join(ppo("status", "new").stdout.split())

    assert (
        "no operator reconciles the job: check that ppojob-operator runs and serves namespace team" in said
    ) is is_said
