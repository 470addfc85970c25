"""The clock of a run: limits, timings, and how busy the pools were."""

import asyncio

import pytest

from ppojob_trainer.controller.errors import PhaseTimeoutError
from ppojob_trainer.controller.phases import PhaseRecord, Phases, busy_seconds, window_metrics
from ppojob_trainer.telemetry import CurrentPhase, current_phase


def record(phase: str, pool: str, start: float, end: float) -> PhaseRecord:
    return PhaseRecord(phase, "role", pool, 1, start, end)


async def test_a_phase_that_takes_too_long_is_named_with_its_role() -> None:
    phases = Phases({"rollout": "actor"}, timeout_s=0.01)

    with pytest.raises(PhaseTimeoutError, match=r"phase gen of role rollout did not finish within 0\.01 s"):
        await phases.run("gen", "rollout", 1, asyncio.sleep(10))


async def test_a_phase_that_takes_too_long_says_which_call_it_waited_for() -> None:
    async def call() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            phase = current_phase()
            assert phase is not None
            phase.unanswered.append("rollout.generate on rank 1")
            raise

    phases = Phases({}, timeout_s=0.01)

    with pytest.raises(PhaseTimeoutError, match=r"still waiting for rollout\.generate on rank 1: the log of each"):
        await phases.run("gen", "rollout", 1, call())


async def test_the_work_knows_its_phase_and_its_limit() -> None:
    async def work() -> CurrentPhase | None:
        return await asyncio.create_task(inner())

    async def inner() -> CurrentPhase | None:
        return current_phase()

    found = await Phases({}, timeout_s=5, clock=lambda: 100.0).run("gen", "rollout", 3, work())

    assert found == CurrentPhase("gen", "rollout", 3, deadline=105.0)
    assert current_phase() is None


async def test_a_timeout_inside_the_work_stays_what_it_is() -> None:
    async def raise_timeout() -> None:
        raise TimeoutError("of the work's own")

    phases = Phases({}, timeout_s=10)

    with pytest.raises(TimeoutError, match="of the work's own"):
        await phases.run("gen", "rollout", 1, raise_timeout())


async def test_a_phase_that_still_runs_counts_as_busy() -> None:
    now = [0.0]
    phases = Phases({"critic": "c", "actor": "a"}, timeout_s=10, clock=lambda: now[0])
    release = asyncio.Event()
    running = asyncio.create_task(phases.run("update_critic", "critic", 1, release.wait()))
    await asyncio.sleep(0)
    now[0] = 8.0

    metrics = phases.close_window(0.0, 10.0)

    release.set()
    await running
    assert metrics["pool/c/busy_fraction"] == 1.0
    assert metrics["pool/a/idle_s"] == 10.0


def test_busy_time_is_the_union_of_the_phases() -> None:
    records = [record("gen", "a", 0, 4), record("values", "c", 3, 6), record("ref", "c", 5, 7)]

    metrics = window_metrics(records, ["a", "c"], 0, 10)

    assert metrics == {
        "pool/a/busy_fraction": 0.4,
        "pool/a/idle_s": 6.0,
        "pool/c/busy_fraction": 0.4,
        "pool/c/idle_s": 6.0,
        # 4 + 3 + 2 seconds of phases in 7 seconds.
        "overlap/saved_s": 2.0,
        "overlap/idle_fraction": pytest.approx(0.3),
    }


def test_phases_are_cut_at_the_ends_of_the_window() -> None:
    records = [record("update_critic", "c", -5, 2), record("gen", "a", 9, 20)]

    metrics = window_metrics(records, ["a", "c"], 0, 10)

    assert metrics["pool/c/busy_fraction"] == pytest.approx(0.2)
    assert metrics["pool/a/busy_fraction"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0), ([(0, 1)], 1), ([(0, 2), (1, 3)], 3), ([(0, 5), (1, 2)], 5), ([(4, 5), (0, 1)], 2)],
)
def test_seconds_of_overlapping_spans_count_once(spans: list[tuple[float, float]], seconds: float) -> None:
    assert busy_seconds(spans) == seconds
