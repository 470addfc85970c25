"""Conditions follow metav1's rules, Events report each change once, and only the operator's own fields are written."""

from datetime import timedelta

from ppojob_api.v1alpha1.constants import MAX_LOG_LINE_LENGTH, Condition, Phase, Reason
from ppojob_api.v1alpha1.status import ConditionStatus, PPOJobStatus
from ppojob_operator.reconcile.attempts import shorten_log
from ppojob_operator.reconcile.situation import Finding
from ppojob_operator.reconcile.states import phase_of
from ppojob_operator.reconcile.status import merge_conditions, owned
from tests.unit.operator.reconcile.worlds import START, World

LATER = START + timedelta(minutes=5)


def merged(finding: Finding, old: list[ConditionStatus] | None = None) -> ConditionStatus:
    """Return the condition Accepted with a finding, five minutes after the old one."""
    return merge_conditions(old or [], {Condition.ACCEPTED: finding}, 3, LATER)[0]


def test_a_new_condition_has_the_time_of_now() -> None:
    assert merged(Finding("True", "Valid", "good")).last_transition_time == "2026-03-01T12:05:00Z"


def test_the_time_moves_with_the_status_and_not_with_reason_or_message() -> None:
    old = merge_conditions([], {Condition.ACCEPTED: Finding("False", "A", "a")}, 1, START)

    same = merged(Finding("False", "B", "b"), old)
    other = merged(Finding("True", "B", "b"), old)

    assert (same.reason, same.message, same.observed_generation) == ("B", "b", 3)
    assert same.last_transition_time == "2026-03-01T12:00:00Z"
    assert other.last_transition_time == "2026-03-01T12:05:00Z"


def test_the_order_of_the_conditions_is_fixed() -> None:
    findings = {kind: Finding("True", "R", "") for kind in (Condition.FAILED, Condition.SUBMITTED, Condition.ACCEPTED)}

    order = [condition.type for condition in merge_conditions([], findings, 1, START)]

    assert order == [Condition.ACCEPTED, Condition.SUBMITTED, Condition.FAILED]


def test_a_message_beyond_all_measure_is_cut() -> None:
    assert len(merged(Finding("True", "R", "x" * 100_000)).message) == 4000


def test_a_change_is_reported_once() -> None:
    world = World()

    world.settle().settle()

    assert world.said == [Reason.VALID]


def test_the_story_of_a_good_job_in_events() -> None:
    world = World().run()
    assert world.said == [Reason.VALID, Reason.PODS_READY, Reason.TRAINER_SUBMITTED]


def test_nothing_is_written_when_nothing_changed() -> None:
    world = World().run()

    assert all(world.wait(1).look().status is None for _ in range(9))


def test_the_trainers_fields_are_never_written_by_the_operator() -> None:
    wire = {
        "phase": "Running",
        "progress": {"step": 3},
        "metrics": [{"name": "a", "value": "1"}],
        "model": {"path": "/data"},
        "checkpoint": {"step": 1, "path": "/c", "time": "t"},
        "recommendation": "less",
        "pools": [{"name": "actor", "readyNodes": 1, "busyFraction": "0.9"}],
        "conditions": [],
    }

    part = owned(PPOJobStatus.model_validate(wire))

    assert part == {"phase": "Running", "conditions": [], "pools": [{"name": "actor", "readyNodes": 1}]}


def test_the_phases_of_a_job_in_order() -> None:
    world, phases = World().see(claim=None), []

    def note() -> None:
        world.settle()
        phases.append(world.status["phase"])

    note()
    world.see(claim=World().observed.claim)
    note()
    world.run()
    note()
    world.pod_is_gone("head")
    note()

    assert phases == [Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING]


def test_the_phase_is_pending_without_conditions() -> None:
    assert phase_of(PPOJobStatus()) == Phase.PENDING


def test_a_log_tail_fits_into_a_status() -> None:
    log = "\n".join([*(f"old {i}" for i in range(500)), *("x" * 5000 for _ in range(60)), "last"])

    tail = shorten_log(log)

    assert tail is not None
    assert len(tail) <= 32_000
    assert max(map(len, tail.splitlines())) == MAX_LOG_LINE_LENGTH
    assert tail.endswith("\nlast")


def test_a_short_log_is_kept_whole_and_an_empty_one_is_none() -> None:
    assert shorten_log("a\nb\n") == "a\nb"
    assert shorten_log("") is None
    assert shorten_log(None) is None


def test_a_condition_that_only_a_newer_operator_knows_stays() -> None:
    world = World().run()
    newer = {**world.status["conditions"][0], "type": "Blessed", "reason": "New"}
    world.status["conditions"].insert(0, newer)

    world.wait(1).pod_is_gone("head").look()

    assert world.status["conditions"][-1] == newer
