"""A job has one operator: the first that saw it, until it is handed over or that one is gone for good."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_operator import ownership
from ppojob_operator.plan import Job, OtherLease, Ray
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile.status import owned
from tests.unit.operator.reconcile.worlds import World

OURS = OperatorStatus(namespace="ours", lease="ppojob-leader", version="2")
OLDER = OURS.model_copy(update={"version": "1"})
NEIGHBOUR = OURS.model_copy(update={"lease": "other-leader"})
THEIRS = OperatorStatus(namespace="theirs", lease="ppojob-leader", version="3")
PATIENCE = 120.0
ALIVE, DEAD, UNSEEN = OtherLease(0.0, 15.0), OtherLease(120.0, 15.0), None
SLOW = OtherLease(120.0, 61.0)
"""A Lease of so long a duration that it may yet be renewed."""

MINE, CLAIMED, TAKEN, LEFT = "mine", "claimed", "taken over", "left alone"


def job_of(world: World, owner: OperatorStatus | None, requested: str | None = None) -> Job:
    """Return the world's job, which is an operator's."""
    job = read_job(world.raw)
    return replace(job, status=job.status.model_copy(update={"operator": owner}), requested_owner=requested)


def outcome(adoption: ownership.Adoption) -> str:
    """Return the decision as one word, after a check that it is consistent."""
    if not adoption.is_ours:
        assert adoption.status is None
        assert adoption.event is not None
        assert adoption.event.reason == Reason.OTHER_OPERATOR
        return LEFT
    if adoption.status is None:
        return MINE
    assert adoption.status.operator == OURS
    return TAKEN if adoption.event is not None and adoption.event.reason == Reason.TAKEN_OVER else CLAIMED


@pytest.mark.parametrize(
    ("owner", "requested", "other", "expected"),
    [
        (None, None, None, CLAIMED),
        (OURS, None, None, MINE),
        (OLDER, None, None, CLAIMED),
        (THEIRS, None, ALIVE, LEFT),
        (THEIRS, None, UNSEEN, LEFT),
        (THEIRS, None, DEAD, TAKEN),
        (THEIRS, None, SLOW, LEFT),
        (NEIGHBOUR, None, ALIVE, LEFT),
        (NEIGHBOUR, None, DEAD, TAKEN),
        # The annotation decides, whichever operator is alive.
        (None, "ours", None, CLAIMED),
        (OURS, "ours", None, MINE),
        (THEIRS, "ours", ALIVE, TAKEN),
        (THEIRS, "ours", UNSEEN, TAKEN),
        (THEIRS, "ours/ppojob-leader", ALIVE, TAKEN),
        (None, "theirs", None, LEFT),
        (OURS, "theirs", None, LEFT),
        (THEIRS, "theirs", DEAD, LEFT),
        (OURS, "ours/other-leader", None, LEFT),
        # Both have the namespace that it names: it stays where it is.
        (NEIGHBOUR, "ours", ALIVE, LEFT),
        (NEIGHBOUR, "ours", DEAD, TAKEN),
        (NEIGHBOUR, "ours/ppojob-leader", ALIVE, TAKEN),
        # One that names nobody counts for nothing.
        (OURS, "Not a name", None, MINE),
        (THEIRS, "Not a name", ALIVE, LEFT),
    ],
)
def test_whose_a_job_is(
    owner: OperatorStatus | None, requested: str | None, other: OtherLease | None, expected: str
) -> None:
    job = job_of(World(), owner, requested)

    assert outcome(ownership.judge(job, OURS, other, PATIENCE)) == expected


@pytest.mark.parametrize(
    ("owner", "requested", "expected"),
    [
        (None, None, False),
        (OLDER, None, False),
        (THEIRS, None, True),
        (NEIGHBOUR, None, True),
        (THEIRS, "ours", False),
        (OURS, "theirs", True),
    ],
)
def test_who_judges_a_job_before_it_is_stored(
    owner: OperatorStatus | None, requested: str | None, expected: bool
) -> None:
    assert ownership.is_another_operators(job_of(World(), owner, requested), OURS) is expected


@pytest.mark.parametrize(
    ("owner", "requested", "asked"),
    [
        (None, None, None),
        (OURS, None, None),
        (OLDER, None, None),
        (THEIRS, None, THEIRS),
        (THEIRS, "ours", None),
        (THEIRS, "theirs", None),
        (NEIGHBOUR, "ours", NEIGHBOUR),
        (NEIGHBOUR, "ours/ppojob-leader", None),
    ],
)
def test_only_a_lease_upon_which_it_depends_is_asked_for(
    owner: OperatorStatus | None, requested: str | None, asked: OperatorStatus | None
) -> None:
    assert ownership.rival(job_of(World(), owner, requested), OURS) == asked


def told(job: Job, other: OtherLease | None = ALIVE) -> str:
    """Return the message about a job."""
    event = ownership.judge(job, OURS, other, PATIENCE).event
    assert event is not None
    return event.message


def test_the_event_says_who_runs_a_job_and_what_to_do() -> None:
    job = job_of(World(), THEIRS)

    assert told(job) == (
        "the job is run by the operator in namespace theirs (ppojob-leader, version 3); the one in ours "
        "(ppojob-leader, version 2) does not reconcile it: limit one of them by watchNamespaces or "
        "namespaceSelector, uninstall it, or hand the job over (ppojob.dev/operator)"
    )
    assert "does not reconcile it, and may not read the other's Lease: limit" in told(job, UNSEEN)
    assert told(job, DEAD).endswith("version 3): its Lease has not been renewed for 120 s")
    assert "assigns the job to the operator in namespace theirs; the one in ours" in told(
        job_of(World(), OURS, "theirs")
    )


def test_an_annotation_that_names_nobody_is_reported_with_its_value_and_the_remedy() -> None:
    job = job_of(World(), OURS, "Not a name")

    assert told(job).startswith(
        "metadata.annotations[ppojob.dev/operator]: 'Not a name': write the namespace of the operator that should run"
    )


@pytest.mark.parametrize("is_deleting", [True, False])
def test_a_job_that_is_over_or_going_is_not_written_for_its_owners_sake(is_deleting: bool) -> None:
    world = World()
    if not is_deleting:
        world.run().wait(1).trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT).settle()
        assert world.verdict(Condition.FAILED)[0] == "True"
    world.is_deleting = is_deleting

    assert outcome(ownership.judge(job_of(world, None), OURS, None, PATIENCE)) == MINE
    assert outcome(ownership.judge(job_of(world, THEIRS), OURS, ALIVE, PATIENCE)) == LEFT


def take_over(world: World) -> None:
    """Let the job be another operator's, and take it over."""
    adoption = ownership.judge(job_of(world, THEIRS), OURS, DEAD, PATIENCE)
    assert adoption.status is not None
    # What the operator does not own stays.
    world.status = {**world.status, **owned(adoption.status)}
    if adoption.status.ray_cluster is None:
        world.status.pop("rayCluster", None)


def test_pods_that_wait_for_a_trainer_are_replaced_since_only_their_operator_can_send_one() -> None:
    world = World()
    world.settle()
    before = world.cluster_name

    take_over(world)
    plan = world.look()

    assert world.cluster_name != before
    assert plan.delete_clusters == (before,)
    assert [made["kind"] for made in plan.apply] == ["ServiceAccount", "Secret", "ConfigMap", "RayCluster"]
    assert (world.status["attempt"], world.status["retries"]["total"]) == (1, 0)
    assert world.status["operator"] == OURS.to_wire()


def test_a_trainer_that_runs_continues_and_nothing_is_re_created() -> None:
    world = World().run()
    before = world.cluster_name

    take_over(world)
    plan = world.wait(1).look()

    assert (world.cluster_name, world.status["attempt"]) == (before, 0)
    assert (plan.apply, plan.delete_clusters) == ((), ())


def test_a_trainer_that_cannot_be_asked_and_reports_no_more_is_restarted_elsewhere() -> None:
    world = World().run()
    before = world.cluster_name
    take_over(world)
    world.see(ray=Ray(problem="403 the token is of another operator"))

    for _ in range(20):
        world.wait(10).look()

    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST
    assert world.totals == (0, 1, 0)
    assert world.cluster_name != before


def test_the_operator_stays_in_the_status_whatever_is_written() -> None:
    world = World()
    world.status = {"operator": OURS.to_wire()}

    world.run()

    assert world.status["operator"] == OURS.to_wire()
    assert world.wait(1).look().status is None


def waiting(world: World) -> None:
    world.see(claim=None).look()


def accepted(world: World) -> None:
    world.look()


def running(world: World) -> None:
    world.run()


def suspended(world: World) -> None:
    world.suspend().settle()
    assert world.verdict(Condition.SUSPENDED)[0] == "True"


def failed(world: World) -> None:
    world.run().wait(1).trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT).settle()


def failed_and_to_be_retried(world: World) -> None:
    failed(world)
    world.ask_for_a_retry()


@pytest.mark.parametrize(
    ("happens", "is_left"),
    [(waiting, True), (suspended, True), (failed_and_to_be_retried, True), (accepted, False), (running, False),
     (failed, False)],
)  # fmt: skip
def test_which_jobs_of_a_namespace_that_is_not_served_are_left(happens: Callable[[World], None], is_left: bool) -> None:
    happens(world := World())

    assert ownership.may_leave(job_of(world, OURS), OURS) is is_left
    assert ownership.may_leave(job_of(world, OLDER), OURS) is is_left
    for other in (None, THEIRS, NEIGHBOUR):
        assert ownership.may_leave(job_of(world, other), OURS)


def test_a_job_that_is_being_deleted_is_not_released() -> None:
    world = World()
    world.is_deleting = True

    assert not ownership.may_leave(job_of(world, OURS), OURS)


def test_a_released_job_keeps_its_status_but_for_the_operator_and_says_what_to_do() -> None:
    suspended(world := World())
    job = job_of(world, OURS)

    adoption = ownership.release(job, OURS, "namespaceSelector (a=b)")

    assert adoption.status == job.status.model_copy(update={"operator": None})
    assert adoption.event is not None
    assert adoption.event.message == (
        f"namespace {job.key.namespace} does not match namespaceSelector (a=b) of the operator in namespace ours "
        "(ppojob-leader, version 2), which does not reconcile the job: label the namespace so that it matches, or "
        "create the job in a namespace that does"
    )
    assert ownership.release(job_of(world, THEIRS), OURS, "namespaceSelector (a=b)").status is None
