"""The state machine of a job: its states, what can happen in them, and where that leads.

    decide: state (from the status) + event (from what is observed) ---> next state, whose plan is executed

`TRANSITIONS` has each event that a state reacts to, and `IMPOSSIBLE` the reason for each that it does not. Events are
observations, not messages: an event is there as long as its cause is, so nothing is lost if a reconcile fails. If
several are there, the first one in the order of `Event` is taken. `tools.site` draws the table, and `status.phase`
is a function of the state. Nothing but the status is remembered. Pure.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import product

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.status import ConditionStatus, PPOJobStatus


class _Described(StrEnum):
    """A word with the sentence that explains it in the documents."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> "_Described":
        """Return a member whose value is the word."""
        member = str.__new__(cls, word)
        member._value_, member.meaning = word, meaning
        return member


class State(_Described):
    """Where a job is. Each state has one function in `decide` that makes its plan."""

    PENDING = "Pending", "the job is not accepted, and nothing exists for it"
    FETCHING = "Fetching", "a Job fetches models and data into the storage"
    QUEUED = "Queued", "the RayCluster waits for its queue's admission"
    RESTARTING = "Restarting", "an attempt has ended, and the next one has not started; it may wait for its back-off"
    WAITING_FOR_PODS = "WaitingForPods", "the RayCluster is created; not all pods are ready"
    SUBMITTING = "Submitting", "all pods are ready; Ray does not accept the trainer yet"
    TRAINER_SUBMITTED = "TrainerSubmitted", "Ray has the trainer, and it has not reported yet"
    RUNNING = "Running", "the trainer reports, or has reported"
    SUSPENDING = "Suspending", "the trainer saves a checkpoint and stops, because the job is suspended"
    REALLOCATING = "Reallocating", "the trainer saves a checkpoint and stops, because the job gets another layout"
    PREEMPTED = "Preempted", "the trainer saves a checkpoint and stops, because the queue evicts the job"
    SUSPENDED = "Suspended", "the job has no pods until it is resumed"
    SUCCEEDED = "Succeeded", "all steps are done; the job runs again only on request"
    FAILED = "Failed", "the job has failed; it runs again only on request"

    def phase(self, attempt: int) -> str:
        """Return `status.phase` of a job in this state."""
        if self in _BEFORE_THE_TRAINER:
            return Phase.RESTARTING if attempt > 0 else Phase.STARTING
        return _PHASES[self]


class Event(_Described):
    """What can happen to a job, the most important first."""

    DELETED = "Deleted", "the PPOJob is being deleted; Kubernetes deletes the objects that it owns"
    RETRY_REQUESTED = "RetryRequested", "`kubectl ppo retry`: the annotation `ppojob.dev/retry-request` has a new value"
    RETRY_REFUSED = "RetryRefused", "the same, but the job cannot be run again; `status.retry.refusal` says why"
    EXPIRED = "Expired", "`runPolicy.ttlSecondsAfterFinished` has passed; the PPOJob is deleted"
    ENDED = "Ended", "the job has ended; its RayCluster is deleted"
    NOT_ACCEPTED = "NotAccepted", "the spec, the claim or the cluster does not allow the job, which has not started"
    REFUSED = "Refused", "this operator cannot run the spec of a job that has started"
    NOT_JUDGED = "NotJudged", "this operator cannot judge a job that has started: it is too old, or KubeRay is missing"
    SUCCEEDED = (
        "TrainerSucceeded",
        "the trainer has completed: Ray says so or, if Ray's answer is lost, the trainer's last report",
    )
    FETCH_FAILED = "FetchFailed", "models or data cannot be fetched"
    DEADLINE_EXCEEDED = (
        "DeadlineExceeded",
        "`startupDeadlineSeconds` or `activeDeadlineSeconds` has passed, or an image can never be pulled",
    )
    RETRIES_EXHAUSTED = "RetriesExhausted", "the attempt has failed, and another one cannot help or is not allowed"
    ATTEMPT_FAILED = "AttemptFailed", "the attempt has failed, and another one is allowed"
    STOPPED_FOR_SUSPENSION = "StoppedForSuspension", "the trainer has stopped, and `runPolicy.suspend` is true"
    STOPPED = "TrainerStopped", "the trainer has stopped, and the job continues with another attempt"
    STOPPING = "TrainerStopping", "the trainer has time left to save a checkpoint and to stop"
    EVICTED = "Evicted", "the queue suspends the RayCluster of a trainer"
    SUSPENSION_REQUESTED = "SuspensionRequested", "`runPolicy.suspend` is true"
    FETCH_DUE = "FetchDue", "models or data are not in the storage yet"
    LAYOUT_CHANGED = "LayoutChanged", "the spec, or `autoBalance`, has another layout than the one in force"
    ENLARGEMENT_FAILED = "EnlargementFailed", "pools that `autoBalance` has enlarged did not get their pods in time"
    PARTIAL_PODS = (
        "PartialPods",
        "some pods of a job that has run have waited for `partialPodsTimeoutSeconds` for others",
    )
    BACKOFF = "BackOff", "the time until the next attempt is not over"
    NOT_ADMITTED = "NotAdmitted", "the queue has not admitted the RayCluster"
    PODS_NOT_READY = "PodsNotReady", "not all pods are ready"
    RAY_NOT_READY = (
        "RayNotReady",
        "the pods are ready, but Ray does not accept the trainer, or still runs an earlier one",
    )
    RAY_READY = "RayReady", "the pods and Ray are ready; the trainer is submitted"
    NOT_REPORTED = "NotReported", "Ray has the trainer, and the first report has not arrived"
    REPORTED = "Reported", "the trainer has reported, or its dashboard or its reports are missing"


_BEFORE_THE_TRAINER = (State.WAITING_FOR_PODS, State.SUBMITTING)
_STARTED = (State.TRAINER_SUBMITTED, State.RUNNING)
STOPS = {
    Reason.SUSPENDING: State.SUSPENDING,
    Reason.REALLOCATING: State.REALLOCATING,
    Reason.PREEMPTED: State.PREEMPTED,
}
"""States of a graceful stop, by the reason in `status.stop`."""
_STOPPING = tuple(STOPS.values())
WITHOUT_TRAINER = (
    *(State.PENDING, State.FETCHING, State.QUEUED, State.RESTARTING, State.WAITING_FOR_PODS, State.SUBMITTING),
    State.SUSPENDED,
)
WITH_TRAINER = (*_STARTED, *_STOPPING)
FINAL = (State.SUCCEEDED, State.FAILED)
_STARTING = (State.QUEUED, State.RESTARTING, State.WAITING_FOR_PODS, State.SUBMITTING)
_BEFORE_THE_FETCH = (State.PENDING, State.FETCHING, State.SUSPENDED, State.RESTARTING)
"""States in which something may not be in the storage yet. Restarting is one after a fetch that failed."""
_FETCHED = (State.QUEUED, State.WAITING_FOR_PODS, State.SUBMITTING)
_PHASES = {
    State.PENDING: Phase.PENDING,
    State.FETCHING: Phase.FETCHING,
    State.QUEUED: Phase.QUEUED,
    State.RESTARTING: Phase.RESTARTING,
    State.TRAINER_SUBMITTED: Phase.STARTING,
    State.RUNNING: Phase.RUNNING,
    State.SUSPENDING: Phase.SUSPENDING,
    State.REALLOCATING: Phase.RESTARTING,
    State.PREEMPTED: Phase.SUSPENDING,
    State.SUSPENDED: Phase.SUSPENDED,
    State.SUCCEEDED: Phase.SUCCEEDED,
    State.FAILED: Phase.FAILED,
}

_AFTER_THE_END = (Event.RETRY_REQUESTED, Event.RETRY_REFUSED, Event.EXPIRED, Event.ENDED)

_ROWS: tuple[tuple[tuple[State, ...], Event, State | None], ...] = (
    # None: the job stays in its state.
    (tuple(State), Event.DELETED, None),
    (FINAL, Event.RETRY_REQUESTED, State.RESTARTING),
    (FINAL, Event.RETRY_REFUSED, None),
    (FINAL, Event.EXPIRED, None),
    (FINAL, Event.ENDED, None),
    ((State.PENDING, State.FETCHING, State.QUEUED, State.RESTARTING, State.SUSPENDED), Event.NOT_ACCEPTED,
     State.PENDING),
    ((State.FETCHING, *_STARTING, State.SUSPENDED, *WITH_TRAINER), Event.REFUSED, State.FAILED),
    ((State.FETCHING, *_STARTING, State.SUSPENDED, *WITH_TRAINER), Event.NOT_JUDGED, None),
    (WITH_TRAINER, Event.SUCCEEDED, State.SUCCEEDED),
    (_BEFORE_THE_FETCH, Event.FETCH_FAILED, State.FAILED),
    ((State.FETCHING, *_STARTING, State.SUSPENDED, *WITH_TRAINER), Event.DEADLINE_EXCEEDED, State.FAILED),
    (WITH_TRAINER, Event.RETRIES_EXHAUSTED, State.FAILED),
    (WITH_TRAINER, Event.ATTEMPT_FAILED, State.RESTARTING),
    (_STOPPING, Event.STOPPED_FOR_SUSPENSION, State.SUSPENDED),
    (_STOPPING, Event.STOPPED, State.RESTARTING),
    (_STOPPING, Event.STOPPING, None),
    (_STARTED, Event.EVICTED, State.PREEMPTED),
    (WITHOUT_TRAINER, Event.SUSPENSION_REQUESTED, State.SUSPENDED),
    (_STARTED, Event.SUSPENSION_REQUESTED, State.SUSPENDING),
    (_BEFORE_THE_FETCH, Event.FETCH_DUE, State.FETCHING),
    ((State.PENDING, State.FETCHING, *_STARTING), Event.LAYOUT_CHANGED, State.RESTARTING),
    (_STARTED, Event.LAYOUT_CHANGED, State.REALLOCATING),
    ((State.RESTARTING, State.WAITING_FOR_PODS, State.SUBMITTING), Event.ENLARGEMENT_FAILED, State.RESTARTING),
    ((State.RESTARTING, State.WAITING_FOR_PODS, State.SUBMITTING), Event.PARTIAL_PODS, State.RESTARTING),
    # Before the first attempt too, if the clock of the leader is behind that of the one before.
    (WITHOUT_TRAINER, Event.BACKOFF, State.RESTARTING),
    (WITHOUT_TRAINER, Event.NOT_ADMITTED, State.QUEUED),
    (WITHOUT_TRAINER, Event.PODS_NOT_READY, State.WAITING_FOR_PODS),
    (WITHOUT_TRAINER, Event.RAY_NOT_READY, State.SUBMITTING),
    (WITHOUT_TRAINER, Event.RAY_READY, State.TRAINER_SUBMITTED),
    (_STARTED, Event.NOT_REPORTED, State.TRAINER_SUBMITTED),
    (_STARTED, Event.REPORTED, State.RUNNING),
)  # fmt: skip
_NEVER: tuple[tuple[tuple[State, ...], tuple[Event, ...], str], ...] = (
    (FINAL, tuple(event for event in Event if event is not Event.DELETED and event not in _AFTER_THE_END),
     "a job that has ended starts again on request only, and its spec is not read until then"),
    ((*WITHOUT_TRAINER, *WITH_TRAINER), _AFTER_THE_END, "the job has not ended"),
    ((State.PENDING,), (Event.REFUSED, Event.NOT_JUDGED), "the job has not started: this is NotAccepted"),
    ((*_BEFORE_THE_TRAINER, *WITH_TRAINER), (Event.NOT_ACCEPTED,), "the job has started: this is Refused or NotJudged"),
    (WITHOUT_TRAINER, (Event.SUCCEEDED, Event.RETRIES_EXHAUSTED, Event.ATTEMPT_FAILED, Event.STOPPED, Event.STOPPING,
                       Event.STOPPED_FOR_SUSPENSION, Event.EVICTED, Event.NOT_REPORTED, Event.REPORTED),
     "there is no trainer"),
    (WITH_TRAINER, (Event.FETCH_FAILED, Event.FETCH_DUE), "a trainer starts only when all is fetched"),
    (_FETCHED, (Event.FETCH_FAILED, Event.FETCH_DUE), "all is fetched, and what a job names by address cannot change"),
    ((State.PENDING,), (Event.DEADLINE_EXCEEDED,), "no time runs before a job is accepted"),
    ((State.PENDING, State.FETCHING), (Event.ENLARGEMENT_FAILED, Event.PARTIAL_PODS), "no trainer has run"),
    ((State.QUEUED, State.SUSPENDED), (Event.ENLARGEMENT_FAILED, Event.PARTIAL_PODS), "its end starts the time again"),
    ((State.SUSPENDED,), (Event.LAYOUT_CHANGED,), "no layout is in force: the next RayCluster gets that of the spec"),
    (WITH_TRAINER, (Event.ENLARGEMENT_FAILED, Event.PARTIAL_PODS, Event.BACKOFF, Event.NOT_ADMITTED,
                    Event.PODS_NOT_READY, Event.RAY_NOT_READY, Event.RAY_READY), "the trainer is submitted already"),
    (_STARTED, (Event.STOPPED_FOR_SUSPENSION, Event.STOPPED, Event.STOPPING), "no stop was requested"),
    (_STOPPING, (Event.EVICTED, Event.SUSPENSION_REQUESTED, Event.LAYOUT_CHANGED),
     "one stop serves all requests, and what follows is decided at its end"),
    (_STOPPING, (Event.NOT_REPORTED, Event.REPORTED), "the stop ends by a limit, whatever is reported"),
)  # fmt: skip


def _transitions(rows: Iterable[tuple[tuple[State, ...], Event, State | None]]) -> dict[State, dict[Event, State]]:
    """Return the table; an event of a state may have one row only."""
    table: dict[State, dict[Event, State]] = {state: {} for state in State}
    for states, event, to in rows:
        for state in states:
            assert event not in table[state], f"two rows for {state}, {event}"
            table[state][event] = state if to is None else to
    # In the order of the events, in which `decide` tries them.
    return {state: {event: row[event] for event in Event if event in row} for state, row in table.items()}


TRANSITIONS: Mapping[State, Mapping[Event, State]] = _transitions(_ROWS)
"""The next state, by state and event. `decide` tries the events of a state in this order."""
IMPOSSIBLE: Mapping[tuple[State, Event], str] = {
    pair: reason for states, events, reason in _NEVER for pair in product(states, events)
}
"""Why a state does not react to an event."""


def state_of(status: PPOJobStatus, *, is_submitted: bool = False) -> State:
    """Return the state that a status says.

    is_submitted: Ray has the trainer of the current attempt, even if the status could not be written since.
    """
    known = {condition.type: condition for condition in status.conditions}
    for kind, final in ((Condition.FAILED, State.FAILED), (Condition.COMPLETE, State.SUCCEEDED)):
        if _is_true(known.get(kind)):
            return final
    if is_submitted or _is_true(known.get(Condition.SUBMITTED)):
        return _with_trainer(status, known.get(Condition.PROGRESSING))
    if not _is_true(known.get(Condition.ACCEPTED)) and status.start_time is None:
        return State.PENDING
    if _is_true(known.get(Condition.SUSPENDED)):
        return State.SUSPENDED
    return _on_the_way(known)


def is_finished(status: PPOJobStatus) -> bool:
    """Return whether the job is Complete or Failed. Such a job starts again on request only."""
    return state_of(status) in FINAL


def phase_of(status: PPOJobStatus) -> str:
    """Return `status.phase`, which follows from the rest of the status."""
    return state_of(status).phase(status.attempt or 0)


def _with_trainer(status: PPOJobStatus, progressing: ConditionStatus | None) -> State:
    stop = status.stop
    if stop is not None and stop.attempt == (status.attempt or 0) and stop.completion_time is None:
        # A reason that only a newer operator knows ends like another layout: with the next attempt.
        return STOPS.get(stop.reason, State.REALLOCATING)
    is_reported = progressing is not None and progressing.status in ("True", "Unknown")
    return State.RUNNING if is_reported else State.TRAINER_SUBMITTED


def _on_the_way(known: Mapping[str, ConditionStatus]) -> State:
    """Return the state of an accepted job without a trainer."""
    reasons = {kind: condition.reason for kind, condition in known.items()}
    if reasons.get(Condition.SOURCES_FETCHED) == Reason.FETCHING:
        return State.FETCHING
    if reasons.get(Condition.SUBMITTED) == Reason.RESTARTING:
        return State.RESTARTING
    if reasons.get(Condition.ADMITTED) == Reason.QUEUED:
        return State.QUEUED
    return State.SUBMITTING if _is_true(known.get(Condition.POOLS_READY)) else State.WAITING_FOR_PODS


def _is_true(condition: ConditionStatus | None) -> bool:
    return condition is not None and condition.status == "True"
