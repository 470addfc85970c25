"""What a report carries, over a run and after a restart."""

import math
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.progress import MAX_REPORT_BYTES, Activity
from ppojob_api.v1alpha1.reported import LayoutAdvice, PoolSize, StepChecks, UploadFailure
from ppojob_trainer.telemetry import RunProgress
from ppojob_trainer.telemetry.records import Record
from tools.release.version import project_version

START = 1_700_000_000.0


class _Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def progress(clock: _Clock) -> RunProgress:
    return RunProgress(uid="u", attempt=2, total_steps=8, clock=clock)


def test_a_run_that_loads_has_done_no_step(progress: RunProgress) -> None:
    report = progress.report()

    assert (report.uid, report.attempt, report.activity, report.step, report.total_steps) == ("u", 2, "Loading", 0, 8)
    assert (report.eta_seconds, report.reward, report.first_step_time) == (None, None, None)


def test_every_report_has_the_version_of_the_trainer(progress: RunProgress) -> None:
    """The operator refuses other versions by it, and shows it beside its own."""
    assert progress.report().trainer_version == project_version(Path("pyproject.toml").read_text())


def test_a_step_gives_reward_metrics_pools_and_time_left(progress: RunProgress, clock: _Clock) -> None:
    progress.set_activity(Activity.TRAINING)
    for step in (1, 2):
        clock.now = START + 30 * step
        progress.record(step, {"critic/score/mean": 0.1 * step, "pool/actor/busy_fraction": 0.9, "other/metric": 1.0})

    report = progress.report()
    assert (report.step, report.reward, report.eta_seconds) == (2, 0.2, 180.0)
    assert report.metrics == {"critic/score/mean": 0.2}
    assert [(pool.name, pool.busy_fraction) for pool in report.pools] == [("actor", 0.9)]
    assert report.first_step_time == "2023-11-14T22:13:50Z"


STEP = {"staleness/oldest_version": 1.0, "staleness/max": 2.0, "overlap/idle_fraction": 0.12345}


def test_the_checks_of_the_last_step(progress: RunProgress) -> None:
    progress.record(3, {**STEP, "training/compared_weights_version": 3.0})
    progress.record(4, {**STEP, "training/rollout_probs_diff_mean": 0.00012345})

    checks = progress.report().checks

    assert checks == StepChecks(
        step=4,
        oldest_weights_step=1,
        max_staleness=2,
        compared_weights_step=3,
        rollout_probs_diff_mean="0.0001234",
        idle_fraction="0.1235",
    )


def test_the_compared_weights_are_those_of_earlier_attempts_and_never_older(progress: RunProgress) -> None:
    record: Record = {"step": 3, "time": START, **STEP, "training/compared_weights_version": 3.0}
    progress.restore([record], step=3)
    progress.record(4, STEP)
    progress.record(5, {**STEP, "training/compared_weights_version": 2.0})

    checks = progress.report().checks

    assert checks is not None
    assert (checks.compared_weights_step, checks.rollout_probs_diff_mean) == (3, None)


def test_no_weights_are_called_compared_before_any_were(progress: RunProgress) -> None:
    progress.record(1, STEP)

    checks = progress.report().checks

    assert checks is not None
    assert checks.compared_weights_step is None


def test_a_validation_has_no_checks(progress: RunProgress) -> None:
    progress.record(0, {"val-core/score/mean": 0.2})

    assert progress.report().checks is None


def test_a_long_step_is_seen_to_get_on(progress: RunProgress) -> None:
    for _ in range(2):
        progress.phase_is_done()
    assert (progress.report().step, progress.report().phases) == (0, 2)


def test_the_first_and_the_last_validation_stay(progress: RunProgress) -> None:
    progress.record(0, {"val-core/score/mean": 0.2})
    assert progress.report().first_step_time is None
    progress.record(1, {"critic/score/mean": 0.3})
    progress.record(2, {"val-core/score/mean": 0.4})
    progress.record(3, {"critic/score/mean": 0.5})

    report = progress.report()
    assert (report.first_validation_reward, report.validation_reward) == (0.2, 0.4)
    assert report.metrics["val-core/score/mean"] == 0.4


def test_what_is_not_finite_is_left_out(progress: RunProgress) -> None:
    progress.record(1, {"critic/score/mean": math.nan, "actor/grad_norm": math.inf, "actor/lr": 1.0})

    report = progress.report()
    assert report.reward is None
    assert report.metrics == {"actor/lr": 1.0}


def test_a_busy_fraction_stays_within_its_bounds(progress: RunProgress) -> None:
    progress.record(1, {"pool/a/busy_fraction": 1.0000001, "pool/b/busy_fraction": -1e-9})

    assert [pool.busy_fraction for pool in progress.report().pools] == [1.0, 0.0]


def test_the_engines_of_an_elastic_pool_are_reported(progress: RunProgress) -> None:
    progress.record(1, {"pool/a/busy_fraction": 0.5, "pool/spot/busy_fraction": 0.5, "pool/spot/engines": 3.0})

    assert [(pool.name, pool.engines) for pool in progress.report().pools] == [("a", None), ("spot", 3)]


def test_checkpoint_model_and_recommendation_are_carried(progress: RunProgress) -> None:
    progress.set_checkpoint(4, "/data/x/step-4")
    progress.set_model("/data/x/model")
    progress.set_recommendation("1 GPU would do")

    report = progress.report()
    assert report.checkpoint is not None
    assert (report.checkpoint.step, report.checkpoint.time) == (4, "2023-11-14T22:13:20Z")
    assert (report.model_path, report.recommendation) == ("/data/x/model", "1 GPU would do")


def test_a_failed_upload_leaves_the_address_of_the_one_before(progress: RunProgress) -> None:
    failure = UploadFailure(reason="UploadFailed", message="the store is away")
    progress.set_upload("s3://bucket/step-4", None)
    progress.set_upload(None, failure)

    assert (progress.report().model_address, progress.report().upload_failure) == ("s3://bucket/step-4", failure)

    progress.set_upload("s3://bucket/step-8", None)
    assert (progress.report().model_address, progress.report().upload_failure) == ("s3://bucket/step-8", None)


def test_the_length_may_change(progress: RunProgress, clock: _Clock) -> None:
    for step in (1, 2):
        clock.now = START + step
        progress.record(step, {})
    progress.total_steps = 3

    assert (progress.report().total_steps, progress.report().eta_seconds) == (3, 1.0)


def test_a_restart_takes_over_what_was_done_up_to_its_step(progress: RunProgress, clock: _Clock) -> None:
    records: list[Record] = [
        {"step": 0, "time": START - 100, "val-core/score/mean": 0.2},
        {"step": 1, "time": START - 90, "critic/score/mean": 0.25, "actor/grad_norm": None},
        {"step": 2, "time": START - 80, "critic/score/mean": 0.3, "val-core/score/mean": 0.4},
        {"step": 3, "time": START - 70, "critic/score/mean": 0.9, "val-core/score/mean": 0.9},
    ]

    progress.restore(records, step=2)

    report = progress.report()
    assert (report.step, report.reward) == (2, 0.3)
    assert (report.first_validation_reward, report.validation_reward) == (0.2, 0.4)
    assert report.first_step_time == "2023-11-14T22:11:50Z"
    assert report.eta_seconds is None


def test_a_full_report_is_small_enough() -> None:
    from ppojob_api.v1alpha1.constants import STATUS_METRICS

    progress = RunProgress(uid="u" * 36, attempt=9, total_steps=10**6)
    progress.record(1, dict.fromkeys(STATUS_METRICS, -1.2345678901234567e-100))
    sizes = [PoolSize(name="p" * 40, nodes=4096, gpus_per_node=64)] * 7
    progress.set_recommendation("x" * 4096, [LayoutAdvice(pools=sizes, gpus=10**6, step_time_percent=-50)] * 3)

    assert len(progress.report().model_dump_json(by_alias=True)) < MAX_REPORT_BYTES
