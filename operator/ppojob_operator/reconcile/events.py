"""Which of the events of `states.Event` are there? Each is a question about an `Assessment` of the job.

`decide` asks for the events of the job's state, in their order, until one is there. The policies answer; an answer is
computed once, and only if an event of that state needs it. Pure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.plan import Job, Observed
from ppojob_operator.reconcile import (
    acceptance,
    attempts,
    deadlines,
    failure_policy,
    fetching,
    layout,
    objects,
    pods,
    progress,
    queueing,
    retry,
    suspension,
)
from ppojob_operator.reconcile.failure_policy import Verdict
from ppojob_operator.reconcile.fetching import Fetch
from ppojob_operator.reconcile.objects import Step
from ppojob_operator.reconcile.pods import PoolsFinding
from ppojob_operator.reconcile.situation import Failure, Finding, Situation, is_submitted
from ppojob_operator.reconcile.states import Event, State, state_of
from ppojob_operator.reconcile.status import request_failed

_AFTER_THE_FETCH = Finding(
    "False", Reason.WAITING_FOR_PODS, "the pods are created when the models and data are in the storage"
)


@dataclass(frozen=True)
class Assessment:
    """What the policies say about a job and what was observed of it. `situation` needs an accepted job."""

    job: Job
    observed: Observed
    now: datetime

    @cached_property
    def state(self) -> State:
        """The state of the job at the beginning of this reconcile."""
        return state_of(self.job.status, is_submitted=is_submitted(self.job, self.observed))

    @cached_property
    def has_started(self) -> bool:
        """Whether the job has ever had time to run: it was accepted, and not only queued or suspended since."""
        return self.job.status.start_time is not None or is_submitted(self.job, self.observed)

    @cached_property
    def accepted(self) -> Finding:
        """Condition Accepted."""
        return acceptance.KEEPS_LAYOUT if self._keeps_layout else self.judgement

    @property
    def template(self) -> dict[str, Finding]:
        """Condition TemplateResolved, of a job whose spec names a template."""
        finding = acceptance.template_resolved(self.job)
        return {} if finding is None else {Condition.TEMPLATE_RESOLVED: finding}

    @cached_property
    def situation(self) -> Situation:
        """The input of the other policies."""
        if self._keeps_layout:
            return self._situation(self.job.effective, self.judgement.message)
        situation = self._situation(layout.spec_in_force(self.job), "")
        if layout.is_stop_due(situation) or self.observed.dry_run is not None:
            words = self.observed.dry_run
            return replace(situation, desired=None, refusal=words) if words else situation
        if words := layout.kept_refusal(self.job):
            return self._situation(self.job.effective, words)
        return situation

    def _situation(self, spec: PPOJobSpec | None, refusal: str) -> Situation:
        assert spec is not None, "a job without a valid spec is not accepted"
        desired = self.job.spec if isinstance(self.job.spec, PPOJobSpec) and not refusal else None
        return queueing.with_default_queue(Situation(self.job, spec, self.observed, self.now, desired, refusal))

    @property
    def is_trial_due(self) -> bool:
        """Whether the API server must try the layout of the spec, before anything else."""
        # The log is not read yet, so how the trainer has ended is not known.
        is_over = self.failure is not None or suspension.is_stopped(self.situation, self.failure)
        return layout.is_trial_due(self.situation, is_over=is_over)

    @cached_property
    def fetch(self) -> Fetch | None:
        """The fetch of models and data. None: the spec has no address."""
        return fetching.judge(self.situation)

    @property
    def is_fetching(self) -> bool:
        """Whether something is not in the storage yet."""
        return self.fetch is not None and not self.fetch.is_done

    @cached_property
    def found(self) -> PoolsFinding:
        """Condition PoolsReady and the status of the pools."""
        found = pods.pools_ready(self.situation)
        if self.is_fetching:
            return replace(found, finding=_AFTER_THE_FETCH)
        lost = pods.lost(self.situation)
        return replace(found, finding=lost) if lost else found

    @cached_property
    def step(self) -> Step:
        """The objects that the attempt needs now, its submission, and condition Submitted."""
        if self.fetch is not None and self.is_fetching:
            waiting = Finding("False", Reason.NOT_SUBMITTED, _AFTER_THE_FETCH.message)
            return Step(waiting, apply=self.fetch.apply)
        return objects.next_step(self.situation, self.found)

    @cached_property
    def deadline(self) -> Failure | None:
        """The failure of a job that is past one of its deadlines."""
        if suspension.is_paused(self.situation):
            return None
        return deadlines.exceeded(self.situation, self.found.finding, self.step)

    @cached_property
    def delay(self) -> Finding | None:
        """Condition Progressing of a job that has run and whose next attempt is late."""
        if suspension.is_paused(self.situation) or self.is_fetching:
            return None
        return deadlines.delay(self.situation, self.found.finding, self.step)

    @cached_property
    def complete(self) -> Finding | None:
        """Condition Complete. None: the trainer has not succeeded."""
        is_lost = self.failure is not None or queueing.is_evicted(self.situation)
        return progress.complete(self.situation) or (progress.complete_without_ray(self.situation) if is_lost else None)

    @cached_property
    def failure(self) -> Failure | None:
        """Why the attempt has ended without success. An eviction by the queue is no failure."""
        if queueing.is_evicted(self.situation):
            return None
        return attempts.failure_of(self.situation) or progress.stall(self.situation)

    @cached_property
    def verdict(self) -> Verdict | None:
        """Whether there is another attempt. None: the attempt has not failed, or was asked to stop."""
        if self.failure is None or suspension.is_graceful(self.situation, self.failure):
            return None
        is_whole = self.found.is_ready or pods.are_replaced(self.situation)
        return failure_policy.verdict(self.situation, self.failure, is_cluster_whole=is_whole)

    @cached_property
    def retry_refusal(self) -> str:
        """Why a job that has ended cannot be run again. Empty: it can."""
        return retry.refusal(self.job, self.judgement)

    @cached_property
    def findings(self) -> Mapping[str, Finding]:
        """The conditions of a job that is neither stopped nor failed."""
        situation = self.situation
        is_running = situation.submitted_at is not None
        findings: dict[str, Finding | None] = {
            **self.template,
            Condition.ACCEPTED: self.accepted,
            Condition.SOURCES_FETCHED: self.fetch.finding if self.fetch is not None else None,
            Condition.ADMITTED: queueing.admitted(situation),
            Condition.POOLS_READY: self.found.finding,
            Condition.SUBMITTED: self.step.finding,
            Condition.PROGRESSING: self.delay or progress.progressing(situation),
            Condition.STALLED: progress.stalled_while_running(situation) if is_running else None,
            Condition.LAYOUT_APPLIED: layout.layout_applied(situation, self.found.finding),
            Condition.MODEL_UPLOADED: progress.model_uploaded(situation),
            Condition.SUSPENDED: suspension.resumed(situation),
        }
        found = {kind: finding for kind, finding in findings.items() if finding is not None}
        error = self.observed.last_error
        if error and not any(error in finding.message for finding in found.values()):
            found[Condition.PROGRESSING] = request_failed(error)
        return found

    @cached_property
    def judgement(self) -> Finding:
        """Condition Accepted, without regard to the layout in force."""
        return acceptance.accepted(self.job, self.observed)

    @property
    def _keeps_layout(self) -> bool:
        """Whether an edit made the spec of a job invalid, which continues with the layout in force."""
        return self.judgement.reason == Reason.INVALID_SPEC and self.job.effective is not None


def _is_refused(a: Assessment, *, is_started: bool) -> bool:
    return a.accepted.status == "False" and a.has_started == is_started


def _needs_pods(a: Assessment) -> bool:
    return a.situation.cluster is None or not a.found.is_ready


HAS_HAPPENED: Mapping[Event, Callable[[Assessment], bool]] = {
    Event.DELETED: lambda a: a.job.is_deleting,
    Event.RETRY_REQUESTED: lambda a: retry.is_requested(a.job) and not a.retry_refusal,
    Event.RETRY_REFUSED: lambda a: retry.is_requested(a.job),
    Event.EXPIRED: lambda a: (expiry := deadlines.expiry(a.job)) is not None and a.now >= expiry,
    Event.ENDED: lambda a: True,
    Event.NOT_ACCEPTED: lambda a: a.accepted.status != "True" and not a.has_started,
    Event.REFUSED: lambda a: _is_refused(a, is_started=True),
    Event.NOT_JUDGED: lambda a: a.accepted.status == "Unknown" and a.has_started,
    Event.SUCCEEDED: lambda a: a.complete is not None,
    Event.FETCH_FAILED: lambda a: a.fetch is not None and a.fetch.failure is not None,
    Event.DEADLINE_EXCEEDED: lambda a: a.deadline is not None,
    Event.RETRIES_EXHAUSTED: lambda a: a.verdict is not None and a.verdict.is_final,
    Event.ATTEMPT_FAILED: lambda a: a.verdict is not None and not a.verdict.is_final,
    Event.STOPPED_FOR_SUSPENSION: lambda a: (
        a.situation.spec.run_policy.suspend and suspension.is_stopped(a.situation, a.failure)
    ),
    Event.STOPPED: lambda a: suspension.is_stopped(a.situation, a.failure),
    Event.STOPPING: lambda a: True,
    Event.EVICTED: lambda a: queueing.is_evicted(a.situation),
    Event.SUSPENSION_REQUESTED: lambda a: a.situation.spec.run_policy.suspend,
    Event.FETCH_DUE: lambda a: a.is_fetching,
    Event.LAYOUT_CHANGED: lambda a: bool(layout.change(a.situation)),
    Event.ENLARGEMENT_FAILED: lambda a: (
        a.delay is not None and not a.found.is_ready and suspension.can_revert_balance(a.situation)
    ),
    Event.PARTIAL_PODS: lambda a: deadlines.has_partial_pods_too_long(a.situation, a.found),
    Event.BACKOFF: lambda a: a.now < a.situation.due,
    Event.NOT_ADMITTED: lambda a: queueing.is_queued(a.situation),
    Event.PODS_NOT_READY: _needs_pods,
    Event.RAY_NOT_READY: lambda a: a.step.submission is None,
    Event.RAY_READY: lambda a: True,
    Event.NOT_REPORTED: lambda a: a.findings[Condition.PROGRESSING].status == "False",
    Event.REPORTED: lambda a: True,
}
"""Whether an event is there. Those that are always there are the last ones of their states."""
