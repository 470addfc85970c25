"""The state machine: its table is complete, and a job follows it whatever happens in whatever state.

`World.plan` checks each plan of these and of all other tests of `reconcile` against the table.
"""

import os
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import lists, sampled_from, tuples

from ppojob_api.v1alpha1.constants import Phase, Reason
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_operator.plan import FetchJob
from ppojob_operator.reconcile.events import HAS_HAPPENED
from ppojob_operator.reconcile.states import (
    FINAL,
    IMPOSSIBLE,
    TRANSITIONS,
    WITH_TRAINER,
    Event,
    State,
    phase_of,
    state_of,
)
from tests.unit.operator.reconcile.happenings import (
    FAILURES,
    OTHERS,
    WORLDS,
    copied,
    enlarged,
    enlarged_and_ready,
    explanations,
    fresh,
    running,
    then,
)
from tests.unit.operator.reconcile.worlds import World

ALL = {**FAILURES, **OTHERS}
NUM_STORIES = int(os.environ.get("PPOJOB_FUZZ", "200"))
NOT_FINAL = [state for state in State if state not in FINAL]
TRAINS = (State.TRAINER_SUBMITTED, State.RUNNING)
STARTS = (State.RESTARTING, State.WAITING_FOR_PODS, State.SUBMITTING)
GRACEFUL = (State.SUSPENDING, State.REALLOCATING)
RUNS_OR_STARTS = (*STARTS, *WITH_TRAINER)

EXPLAINED: dict[str, tuple[tuple[State, ...], set[str]]] = {
    "the spec becomes invalid": (tuple(NOT_FINAL), {Reason.INVALID_SPEC}),
    "the layout becomes invalid": (
        tuple(state for state in NOT_FINAL if state is not State.REALLOCATING),
        {Reason.INVALID_SPEC},
    ),
    "the spec is of a newer operator": (tuple(NOT_FINAL), {Reason.OPERATOR_TOO_OLD, Reason.INVALID_SPEC}),
    "KubeRay is missing": (tuple(NOT_FINAL), {Reason.KUBERAY_MISSING}),
    "Kueue is missing": ((), set()),
    "the claim is deleted": ((State.PENDING,), {Reason.STORAGE_MISSING}),
    "the API server refuses": (
        tuple(state for state in NOT_FINAL if state not in (State.PENDING, State.SUSPENDED)),
        {Reason.FETCHING, Reason.NOT_SUBMITTED, Reason.API_REQUEST_FAILED},
    ),
    "the RayCluster is deleted": (RUNS_OR_STARTS, {Reason.CLUSTER_DELETED, Reason.WAITING_FOR_PODS}),
    "the head is deleted": ((*STARTS, *TRAINS, *GRACEFUL), {Reason.HEAD_LOST, Reason.WAITING_FOR_PODS}),
    "a worker is deleted": ((*STARTS, *TRAINS, *GRACEFUL), {Reason.POD_LOST, Reason.WAITING_FOR_PODS}),
    "a worker runs out of memory": ((*STARTS, *TRAINS, *GRACEFUL), {Reason.OUT_OF_MEMORY}),
    "there are no GPUs": ((*STARTS, *TRAINS, *GRACEFUL), {Reason.INSUFFICIENT_GPUS, Reason.POD_LOST}),
    "an image cannot be pulled": ((*STARTS, *TRAINS, *GRACEFUL), {Reason.IMAGE_PULL_FAILED, Reason.POD_LOST}),
    "Ray does not answer": ((State.SUBMITTING, *WITH_TRAINER), {Reason.DASHBOARD_UNREACHABLE, Reason.NOT_SUBMITTED}),
    "the trainer fails for good": ((*TRAINS, *GRACEFUL), {Reason.MODEL_NOT_FOUND}),
    "the trainer fails": ((*TRAINS, *GRACEFUL), {Reason.NON_FINITE}),
    "the trainer is stopped in Ray": (TRAINS, {Reason.INTERRUPTED}),
    "the fetch fails": ((State.FETCHING,), {Reason.FETCH_FAILED}),
    "the startup deadline passes": (
        (State.FETCHING, State.WAITING_FOR_PODS, State.SUBMITTING),
        {Reason.STARTUP_DEADLINE_EXCEEDED},
    ),
    "the active deadline passes": (
        (State.FETCHING, *RUNS_OR_STARTS),
        {Reason.ACTIVE_DEADLINE_EXCEEDED, Reason.STARTUP_DEADLINE_EXCEEDED},
    ),
    "the queue evicts": ((State.PREEMPTED,), {Reason.PREEMPTED}),
    "the status cannot be written": ((), set()),
}
"""For each failure, the states that it concerns, and the reasons that may explain it there."""


def state(world: World) -> State:
    """Return the state that the status says."""
    return state_of(PPOJobStatus.model_validate(world.status, extra="ignore"))


def test_every_state_and_event_has_a_transition_or_a_reason_why_not() -> None:
    declared = {(state, event) for state, row in TRANSITIONS.items() for event in row}

    assert declared | set(IMPOSSIBLE) == set(product(State, Event)), "neither a transition nor a reason"
    assert declared & set(IMPOSSIBLE) == set(), "both"
    assert all(reason for reason in IMPOSSIBLE.values())


def test_every_event_can_be_asked_for() -> None:
    assert set(HAS_HAPPENED) == set(Event)


def test_the_last_event_of_a_state_is_always_there() -> None:
    assert all(HAS_HAPPENED[list(row)[-1]](None) for row in TRANSITIONS.values())  # type: ignore[arg-type]


def test_every_state_is_reached_from_the_first_and_ends_from_every_state() -> None:
    def reached(start: State) -> set[State]:
        found, rest = {start}, [start]
        while rest:
            rest = [to for to in {*TRANSITIONS[rest[0]].values()} - found] + rest[1:]
            found |= set(rest)
        return found

    assert reached(State.PENDING) == set(State)
    assert all(reached(state) >= set(FINAL) for state in NOT_FINAL)
    assert {event for state in FINAL for event, to in TRANSITIONS[state].items() if to != state} == {
        Event.RETRY_REQUESTED
    }


def test_phases_are_those_of_the_api() -> None:
    known = {value for name, value in vars(Phase).items() if name.isupper()}

    assert {state.phase(attempt) for state, attempt in product(State, (0, 1))} == known
    assert phase_of(PPOJobStatus()) == Phase.PENDING


@pytest.mark.parametrize("wanted", State)
def test_there_is_a_world_in_every_state(wanted: State) -> None:
    assert state(WORLDS[wanted]()) == wanted


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("start", NOT_FINAL)
def test_a_failure_in_any_state_is_explained_by_a_condition(start: State, failure: str) -> None:
    states, reasons = EXPLAINED[failure]
    world = WORLDS[start]()
    before = world.status.get("lastFailure")

    FAILURES[failure](world)
    for _ in range(4):
        world.look()
        world.wait(31)

    if start in states:
        assert explanations(world) & reasons, f"{state(world)}: {explanations(world)}"
    else:
        assert state(world) != State.FAILED
        assert world.status.get("lastFailure") == before


def lost_write(world: World, *happenings: str) -> World:
    """Let these happen after a reconcile whose status could not be written, and look once."""
    FAILURES["the status cannot be written"](world)
    return at_once(world, *happenings)


def at_once(world: World, *happenings: str) -> World:
    """Let these happen before the next reconcile."""
    for name in happenings:
        ALL[name](world)
    world.look()
    return world


def fetch_job_stays(world: World) -> World:
    """Return a suspended world whose Job could not be deleted and has failed."""
    return world.see(fetch_job=FetchJob("other", world.now, failure="Job has reached the specified backoff limit"))


def second_attempt(*happenings: str) -> World:
    """Return a job whose first attempt has lost its head, and whose pods are there again."""
    return then(running(), "the head is deleted", "a moment passes", "the pods are ready", *happenings)


PODS_AND_RAY = ("the pods are ready", "Ray answers")
PODS_WITHOUT_RAY = ("the pods are ready", "Ray does not answer")
RARE: tuple[Callable[[], World], ...] = (
    lambda: lost_write(fresh(), *PODS_AND_RAY),
    lambda: lost_write(fresh(), *PODS_WITHOUT_RAY),
    lambda: at_once(then(fresh(is_fetched=True, is_queued=True).settle(), "the spec becomes invalid"),
                    "the spec is corrected", "the fetch fails"),
    lambda: at_once(then(fresh(is_queued=True).settle(), "the spec becomes invalid"), "the spec is corrected",
                    "another layout"),
    lambda: at_once(fresh(is_fetched=True).settle(), "the fetch pod starts", "the active deadline passes"),
    lambda: at_once(fresh(is_fetched=True).settle(), "the fetch completes", "another layout"),
    lambda: at_once(fresh(is_fetched=True).settle(), "the fetch completes", "another leader's clock is behind"),
    lambda: lost_write(then(fresh(is_fetched=True).settle()).see(fetch_job=FetchJob(is_complete=True)), *PODS_AND_RAY),
    lambda: lost_write(fresh(is_fetched=True).settle().see(fetch_job=FetchJob(is_complete=True)), *PODS_WITHOUT_RAY),
    lambda: at_once(fresh(is_queued=True).settle(), "the queue admits", *PODS_AND_RAY),
    lambda: at_once(fresh(is_queued=True).settle(), "the queue admits", *PODS_WITHOUT_RAY),
    lambda: at_once(then(running(is_queued=True), "the queue evicts", "the pods are deleted"),
                    "the spec becomes invalid"),
    lambda: at_once(then(running(is_queued=True), "the queue evicts", "the pods are deleted"),
                    "a lower deadline", "the queue admits"),
    lambda: at_once(then(fresh(is_queued=True).settle(), "the queue admits"), "the queue evicts"),
    lambda: at_once(then(fresh(is_queued=True).settle(), "the queue admits", *PODS_WITHOUT_RAY), "the queue evicts"),
    lambda: at_once(enlarged(), "the startup deadline passes"),
    lambda: at_once(enlarged_and_ready(), "there are no GPUs", "the startup deadline passes"),
    lambda: at_once(at_once(then(enlarged_and_ready(), "Ray answers"), "the trainer fails"), "there are no GPUs",
                    "the startup deadline passes"),
    lambda: at_once(then(fresh(is_queued=True).settle(), "another layout", "the spec becomes invalid"),
                    "the spec is corrected", "another leader's clock is behind"),
    lambda: at_once(then(running(is_queued=True), "the queue evicts", "the pods are deleted"), "KubeRay is missing"),
    lambda: at_once(then(running(is_queued=True), "the queue evicts", "the pods are deleted"),
                    "another leader's clock is behind"),
    lambda: at_once(at_once(fresh(is_queued=True).settle(), "another layout"), "the spec becomes invalid"),
    lambda: at_once(then(fresh(is_queued=True).settle(), "the queue admits", *PODS_AND_RAY), "the queue evicts"),
    lambda: at_once(then(fresh().settle(), *PODS_AND_RAY, "Ray does not answer"), "Ray answers"),
    lambda: at_once(fresh(suspend=True).settle(), "the spec becomes invalid"),
    lambda: at_once(fresh(suspend=True, is_fetched=True).settle(), "resumed"),
    lambda: at_once(fresh(suspend=True, is_queued=True).settle(), "resumed"),
    lambda: at_once(at_once(WORLDS[State.RESTARTING](), "suspended"), "resumed"),
    lambda: at_once(second_attempt("there are no GPUs"), "the startup deadline passes"),
    lambda: at_once(second_attempt("Ray does not answer"), "there are no GPUs", "the startup deadline passes"),
    lambda: at_once(WORLDS[State.RESTARTING](), "there are no GPUs", "the startup deadline passes"),
    lambda: at_once(then(running(), "suspended"), "resumed", "the trainer stops gracefully"),
    lambda: at_once(then(running(), "another layout"), "suspended", "the trainer stops gracefully"),
    lambda: at_once(then(running(is_queued=True), "the queue evicts"), "suspended", "the pods are deleted"),
    lambda: at_once(then(running(is_queued=True, failurePolicy={"rules": [{"action": "Fail"}]}), "the queue evicts"),
                    "the RayCluster is deleted"),
    lambda: at_once(then(running(), "suspended", "the trainer stops gracefully"), "a lower deadline", "resumed"),
    lambda: at_once(fetch_job_stays(then(fresh(is_fetched=True).settle(), "suspended")), "resumed"),
    lambda: lost_write(then(fresh().settle(), "suspended").edit(runPolicy={}), *PODS_AND_RAY),
    lambda: lost_write(then(fresh().settle(), "suspended").edit(runPolicy={}), *PODS_WITHOUT_RAY),
    lambda: at_once(then(running(), "the trainer fails for good", "the spec becomes invalid"), "a retry is requested"),
    lambda: at_once(then(running(), "the trainer saves a checkpoint", "the trainer completes"), "a retry is requested"),
    lambda: at_once(at_once(then(fresh(is_fetched=True).settle(), "the fetch fails"), "a retry is requested"),
                    "a moment passes"),
    lambda: at_once(at_once(then(fresh(is_fetched=True).settle(), "the fetch fails"), "a retry is requested").see(
                    fetch_job=FetchJob(failure="Job has reached the specified backoff limit")), "a moment passes"),
)  # fmt: skip
"""Transitions that one event alone does not cause: several happen at once, or a write fails."""


@pytest.fixture(scope="module")
def taken() -> set[tuple[State, Event]]:
    """Play everything in every state, and return the transitions that were taken."""
    found: set[tuple[State, Event]] = set()
    queued = [then(running(is_queued=True)), fresh(is_queued=True), fresh(is_queued=True, is_fetched=True).settle()]
    for start in [*(make() for make in WORLDS.values()), fresh(), fresh(is_fetched=True), *queued]:
        for happen in ALL.values():
            world = copied(start)
            happen(world)
            for _ in range(3):
                world.look()
            found |= {(before, event) for before, event, _ in world.transitions}
    for make in RARE:
        found |= {(before, event) for before, event, _ in make().transitions}
    return found


@pytest.mark.parametrize("start", State)
def test_every_transition_of_the_table_is_taken(start: State, taken: set[tuple[State, Event]]) -> None:
    assert [event for event in TRANSITIONS[start] if (start, event) not in taken] == []


@settings(
    max_examples=NUM_STORIES,
    deadline=None,
    # `make test` tries the same stories each time.
    derandomize="PPOJOB_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
@given(
    start=sampled_from(NOT_FINAL),
    story=lists(tuples(lists(sampled_from(sorted(ALL)), min_size=1, max_size=3), sampled_from((1, 4))), max_size=8),
)
def test_a_job_follows_the_table_whatever_happens(start: State, story: list[tuple[list[str], int]]) -> None:
    world = WORLDS[start]()
    for names, num_reconciles in story:
        for name in names:
            ALL[name](world)
        for _ in range(num_reconciles):
            world.look()
