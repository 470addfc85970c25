"""Policy: are the models and data in the storage that the spec names by address? The RayCluster is created after that.

    no Job --- applied ---> fetching --- complete ---> fetched, for the whole life of the job
                              | `--- a try fails: Kubernetes repeats it
                              `--- refused, or too many tries ---> the PPOJob has failed

The condition SourcesFetched keeps that it is done, so the Job may be deleted later. If it is deleted earlier, it is
created again and finds what is complete. A suspended job fetches nothing. The bytes are the pod's own report.
"""

from dataclasses import dataclass
from datetime import timedelta

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.reported import FetchStatus
from ppojob_api.v1alpha1.sources import has_addresses
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.fetch_job import fetch_job
from ppojob_operator.plan import FetchJob, FetchPod, Job, Manifest
from ppojob_operator.reconcile import images
from ppojob_operator.reconcile.objects import fetch_dependencies
from ppojob_operator.reconcile.situation import Failure, Finding, Situation

_DONE = Finding("True", Reason.FETCHED, "the models and data are in the storage: see status.sources")
_SUSPENDED = Finding(
    "False",
    Reason.SUSPENDED,
    "a suspended job fetches nothing; what is in the storage stays, and the fetch continues when the job is resumed",
)


@dataclass(frozen=True)
class Fetch:
    """The condition SourcesFetched, and what is to be done for it."""

    finding: Finding
    apply: tuple[Manifest, ...] = ()
    is_job_deleted: bool = False
    """The Job must go: the job is suspended, or the Job was created from another spec."""
    failure: Failure | None = None

    @property
    def is_done(self) -> bool:
        """Whether all is in the storage."""
        return self.finding.status == "True"


def needs_fetch(job: Job) -> bool:
    """Return whether the Job that fetches matters to a job: it has addresses, and not all is in the storage."""
    is_done = any(each.type == Condition.SOURCES_FETCHED and each.status == "True" for each in job.status.conditions)
    return isinstance(job.spec, PPOJobSpec) and has_addresses(job.spec) and not is_done


def judge(situation: Situation) -> Fetch | None:
    """Return what is to be said and done; None: the spec has no address."""
    if not has_addresses(situation.spec):
        return None
    known, job = situation.condition(Condition.SOURCES_FETCHED), situation.observed.fetch_job
    if (known is not None and known.status == "True") or situation.submitted_at is not None:
        return Fetch(_DONE)
    if situation.spec.run_policy.suspend:
        return Fetch(_SUSPENDED, is_job_deleted=job is not None and not job.is_deleting)
    if job is not None and job.is_complete:
        return Fetch(_DONE)
    if job is None or not job.is_deleting:
        refused = _failed(situation, job.failure) if job is not None and job.failure is not None else None
        return refused or _late(situation, job) or _on_the_way(situation, job)
    # That of an earlier fetch, which `kubectl ppo retry` repeats.
    return _on_the_way(situation, job)


def _on_the_way(situation: Situation, job: FetchJob | None) -> Fetch:
    wanted = fetch_job(situation.spec, situation.job.key, situation.job.uid)
    error = situation.observed.last_error
    if error:
        finding = Finding("False", Reason.FETCHING, f"the Job that fetches models and data cannot be created: {error}")
    else:
        finding = Finding("False", Reason.FETCHING, _waits_for_kueue(situation, job) or _words(situation))
    if job is None:
        return Fetch(finding, apply=(*fetch_dependencies(situation), wanted))
    is_same = job.created_from == wanted["metadata"]["annotations"][constants.ANNOTATION_MADE_OF]
    return Fetch(finding, is_job_deleted=not is_same and not job.is_deleting)


def _waits_for_kueue(situation: Situation, job: FetchJob | None) -> str:
    """Return what the Job waits for if Kueue has suspended it; empty: it is not suspended.

    Kueue suspends it in a namespace with a default queue, and where it manages Jobs without a queue.
    """
    if job is None or not job.is_suspended:
        return ""
    if job.queue is not None:
        return f"the Job that fetches models and data waits in Kueue's queue {job.queue}"
    name = naming.fetch_job_name(situation.job.key.name)
    return (
        "Kueue has suspended the Job that fetches models and data, because it manages Jobs without a queue "
        f"(manageJobsWithoutQueueName): name a queue with `kubectl label job {name} {constants.LABEL_QUEUE}=QUEUE`"
    )


def _words(situation: Situation) -> str:
    """Return what the newest pod does, waits for, or has failed with."""
    pod, report = _newest(situation), situation.status.fetch
    if pod is None:
        return "the pod that fetches models and data is being created"
    if pod.failure:
        return f"a try has failed and will be repeated: {pod.failure}"
    if not pod.has_started:
        return f"pod {pod.name} has not started{f': {pod.trouble}' if pod.trouble else ' yet'}"
    if report is None or report.pod != pod.name:
        return f"pod {pod.name} fetches models and data"
    return _progress(report)


def _progress(report: FetchStatus) -> str:
    size = "?" if report.total_bytes is None else f"{report.total_bytes / 1e9:.2f}"
    words = f"{report.bytes / 1e9:.2f} of {size} GB are in the storage"
    return "; ".join(filter(None, (words, report.address and f"fetches {report.address}", report.message)))


def _newest(situation: Situation) -> FetchPod | None:
    pods = situation.observed.fetch_pods
    return max(pods, key=lambda pod: (pod.created or situation.now, pod.name), default=None)


def _failed(situation: Situation, words: str) -> Fetch:
    """Return the end of the job: the pod's own words, from its end or from its last report, else Kubernetes'."""
    pod, report = _newest(situation), situation.status.fetch
    said = (pod.failure if pod else "") or (report.message if report and report.message else "") or words
    failure = Failure(FailureKind.PERMANENT, Reason.FETCH_FAILED, f"models or data could not be fetched: {said}")
    return Fetch(Finding("False", Reason.FETCH_FAILED, failure.message), failure=failure)


def _image_refused(situation: Situation, pod: FetchPod) -> Failure | None:
    """Return the failure of a job whose image can never be pulled."""
    patience = images.patience(pod.trouble) if pod.has_image_trouble else None
    if patience is None or pod.created is None or situation.now < pod.created + patience:
        return None
    return Failure(FailureKind.PERMANENT, Reason.IMAGE_PULL_FAILED, images.explained(f"pod {pod.name}: {pod.trouble}"))


def _late(situation: Situation, job: FetchJob | None) -> Fetch | None:
    """Return the end of a job whose pod could not be started in time. How long a fetch may take has no limit.

    No time runs while Kueue has suspended the Job.
    """
    if job is not None and job.is_suspended:
        return None
    limit = timedelta(seconds=situation.spec.run_policy.startup_deadline_seconds)
    # In a queue, `due` does not pass before the RayCluster is let in.
    moments = (job.created if job else situation.due, situation.observed.leading_since)
    pod = _newest(situation)
    is_started = pod is not None and pod.has_started
    if pod is not None and not is_started and (failure := _image_refused(situation, pod)):
        return Fetch(Finding("False", Reason.FETCH_FAILED, failure.message), failure=failure)
    if is_started or situation.now < max(moment for moment in moments if moment is not None) + limit:
        return None
    trouble = situation.observed.last_error or (pod.trouble if pod else "") or "there is no pod"
    message = (
        f"the pod that fetches models and data could not be started within {limit.total_seconds():.0f} s "
        f"(spec.runPolicy.startupDeadlineSeconds): {trouble}"
    )
    failure = Failure(FailureKind.PERMANENT, Reason.STARTUP_DEADLINE_EXCEEDED, message)
    return Fetch(Finding("False", Reason.FETCH_FAILED, message), failure=failure)
