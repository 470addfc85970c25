"""What follows a failed attempt: rules, disruptions, and the budget since the last progress."""

from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.runtime import FailureReason
from ppojob_operator.plan import Pod, Ray, RayState, Trouble
from tests.unit.operator.reconcile.worlds import World

DRAINED = Trouble(Reason.PREEMPTED, "EvictionByEvictionAPI: Eviction API: evicting")
SPOT = Trouble(Reason.NODE_LOST, "TerminationByKubelet: Pod was terminated in response to imminent node shutdown.")


def rules(*given: dict[str, Any], **policy: Any) -> World:
    """Return a running job with rules."""
    return World(runPolicy={"failurePolicy": {"rules": list(given)}, **policy}).run()


def saved(step: int) -> dict[str, Any]:
    return {"step": step, "path": f"/data/step-{step}", "time": "2026-03-01T12:00:00Z"}


def disrupt(world: World, trouble: Trouble = DRAINED) -> World:
    """Let a worker be disrupted, and the trainer stop gracefully."""

    def taken(pod: Pod) -> Pod:
        return replace(pod, disruption=trouble, is_deleting=True) if pod.pool == "critic" else pod

    return world.see(pods=tuple(map(taken, world.observed.pods))).trainer_stops_gracefully().settle()


def restart(world: World, step: int | None = None) -> World:
    """Bring the next attempt to a trainer that reports, after its pause; with a step, it has a checkpoint of it."""
    world.wait(360).settle().pods_become(ready=True).see(ray=world.observed.ray or Ray()).settle().wait(20)
    fields: dict[str, Any] = {} if step is None else {"checkpoint": saved(step)}
    return world.trainer_reports(step=step, **fields).settle()


def fail(world: World, reason: str = Reason.NON_FINITE, kind: FailureKind = FailureKind.USER) -> World:
    return world.trainer_fails(reason, kind).settle()


def test_fifty_disruptions_count_nothing_and_the_job_completes() -> None:
    world = World(runPolicy={"backoffLimit": 0}).run()

    for number in range(50):
        disrupt(world, (DRAINED, SPOT)[number % 2])
        assert world.status["phase"] == Phase.RESTARTING
        world.wait(10).settle()
        assert world.condition(Condition.SUBMITTED).reason != Reason.RESTARTING, "with progress, the pause never grows"
        restart(world, step=number + 1)
    world.ray_says(RayState.SUCCEEDED).settle()

    assert world.status["phase"] == Phase.SUCCEEDED
    assert world.totals == (0, 0, 50)
    assert world.status["retries"]["counted"] == 0


def pause(world: World) -> int:
    """Return the seconds until the next attempt is due; its pods are there at once."""
    for seconds in range(1, 1000):
        world.wait(1).settle()
        if world.condition(Condition.SUBMITTED).reason != Reason.RESTARTING:
            world.pods_become(ready=True).see(ray=Ray()).settle().wait(1).trainer_reports().settle()
            return seconds
    raise AssertionError("it never starts")


def test_without_progress_the_pause_grows_between_disruptions_and_with_progress_it_starts_again() -> None:
    world = World(runPolicy={"backoffLimit": 0}).run()

    assert [pause(disrupt(world)) for _ in range(7)] == [10, 20, 40, 80, 160, 320, 360]
    world.trainer_reports(checkpoint=saved(3)).settle()
    assert pause(disrupt(world)) == 10


def test_a_checkpoint_that_was_there_before_is_no_progress() -> None:
    world = World(runPolicy={"backoffLimit": 1}).run()
    world.trainer_reports(step=5, checkpoint=saved(5)).settle()

    restart(fail(world), step=5)
    assert world.status["retries"]["counted"] == 1
    fail(world)

    assert world.verdict(Condition.FAILED) == ("True", Reason.BACKOFF_LIMIT_EXCEEDED)
    assert "from its checkpoint of step 5" in world.condition(Condition.FAILED).message


def test_a_newer_checkpoint_gives_a_fresh_budget_and_the_totals_stay() -> None:
    world = World(runPolicy={"backoffLimit": 1}).run()

    for step in range(1, 6):
        restart(fail(world), step=step)
        assert world.status["retries"]["counted"] == 0
        assert "checkpointStep" not in world.status["retries"]

    assert world.status["phase"] == Phase.RUNNING
    assert world.totals == (5, 0, 0)


def test_the_budget_counts_from_the_first_failure_without_progress() -> None:
    world = World(runPolicy={"backoffLimit": 2}).run()
    world.trainer_reports(step=5, checkpoint=saved(5)).settle()

    restart(fail(world))
    restart(disrupt(world))
    restart(fail(world))

    retries = world.status["retries"]
    assert (retries["counted"], retries["sinceProgress"], retries["checkpointStep"]) == (2, 3, 5)


def test_the_first_rule_that_matches_decides() -> None:
    reasons = [Reason.NON_FINITE]
    world = rules({"reasons": reasons, "action": "Fail"}, {"reasons": reasons, "action": "Ignore"})

    fail(world)

    assert world.verdict(Condition.FAILED) == ("True", Reason.FAILURE_POLICY)
    message = world.condition(Condition.FAILED).message
    assert "spec.runPolicy.failurePolicy.rules[0] has the action Fail" in message
    assert "`kubectl ppo retry arithmetic`" in message
    assert world.status["lastFailure"]["reason"] == Reason.NON_FINITE


def test_a_rule_without_criteria_matches_everything() -> None:
    assert fail(rules({"action": "Ignore"})).totals == (0, 0, 1)


@pytest.mark.parametrize(
    ("rule", "is_match"),
    [
        ({"exitCodes": [7]}, True),
        ({"exitCodes": [1, 8]}, False),
        ({"reasons": ["NonFinite"], "exitCodes": [7]}, True),
        ({"reasons": ["NonFinite"], "exitCodes": [8]}, False),
        ({"reasons": ["HookFailed"], "exitCodes": [7]}, False),
        ({"reasons": ["HookFailed", "NonFinite"]}, True),
    ],
)
def test_all_criteria_of_a_rule_must_match(rule: dict[str, Any], is_match: bool) -> None:
    world = rules({**rule, "action": "Ignore"})

    world.trainer_fails(Reason.NON_FINITE, FailureKind.USER, exit_code=7).settle()

    assert world.totals == ((0, 0, 1) if is_match else (1, 0, 0))
    assert ("because of spec.runPolicy.failurePolicy.rules[0]" in " ".join(world.words)) == is_match


JUDGE = {"name": "judge", "module": "m", "className": "C", "pool": "critic"}
WORKERS = [{**JUDGE, "hooks": [{"after": "Step", "method": "judge"}]}]


@pytest.mark.parametrize(
    ("roles", "role", "is_match"),
    [
        (["rollout"], "rollout", True),
        (["actor", "rollout"], "rollout", True),
        (["actor"], "rollout", False),
        (["rollout"], None, False),
        (["workers"], "judge", True),
        (["workers"], "rollout", False),
        (["workers"], "of-a-newer-trainer", False),
    ],
)
@pytest.mark.parametrize("kind", [FailureKind.USER, FailureKind.INFRASTRUCTURE])
def test_a_rule_may_name_roles(roles: list[str], role: str | None, is_match: bool, kind: FailureKind) -> None:
    policy = {"failurePolicy": {"rules": [{"roles": roles, "action": "Ignore"}]}}
    world = World(runPolicy=policy, workers=WORKERS).run()

    world.trainer_fails(Reason.WORKER_LOST, kind, role=role).settle()

    assert world.totals[2] == is_match
    assert world.status["lastFailure"].get("role") == role


def test_a_role_is_known_when_its_pod_was_taken() -> None:
    world = rules({"roles": ["critic"], "action": "Fail"})
    taken = tuple(
        replace(pod, disruption=DRAINED, is_deleting=True) if pod.pool == "critic" else pod
        for pod in world.observed.pods
    )

    world.see(pods=taken).trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE, role="critic").settle()

    assert world.status["lastFailure"]["reason"] == Reason.PREEMPTED
    assert world.verdict(Condition.FAILED) == ("True", Reason.FAILURE_POLICY)


def test_a_rule_counts_disruptions_against_the_limit() -> None:
    world = rules({"reasons": ["Preempted", "NodeLost"], "action": "Retry"}, backoffLimit=1)

    restart(disrupt(world))
    assert world.totals == (0, 1, 0)
    disrupt(world)

    assert world.verdict(Condition.FAILED) == ("True", Reason.BACKOFF_LIMIT_EXCEEDED)


def test_a_rule_retries_what_is_permanent_otherwise() -> None:
    world = rules({"reasons": ["DataUnreadable"], "action": "Retry"})

    fail(world, Reason.DATA_UNREADABLE, FailureKind.PERMANENT)

    assert world.status["phase"] == Phase.RESTARTING
    assert world.totals == (1, 0, 0)


def test_a_rule_decides_about_the_second_attempt_without_memory_too() -> None:
    world = rules({"reasons": ["OutOfMemory"], "action": "Retry"})

    for _ in range(3):
        restart(fail(world, Reason.OUT_OF_MEMORY))

    assert world.status["phase"] == Phase.RUNNING
    assert world.totals == (3, 0, 0)


def test_a_rule_may_be_added_while_the_job_runs() -> None:
    world = World().run()
    world.edit(runPolicy={"failurePolicy": {"rules": [{"action": "Fail"}]}}).settle()

    assert world.status["attempt"] == 0
    assert fail(world).verdict(Condition.FAILED) == ("True", Reason.FAILURE_POLICY)


def test_every_reason_of_a_rule_is_a_reason_of_the_api() -> None:
    assert {each.value for each in FailureReason} <= {value for name, value in vars(Reason).items() if name.isupper()}
