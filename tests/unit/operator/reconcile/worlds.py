"""A job and all that can be observed of it, as a small world that the tests move and let time pass in.

Each `look` decides and then does what the plan says to this world alone: the status is carried on, RayClusters come
and go, Ray gets submissions. So a test reads as a story, and what the operator must remember is in the status only.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.notification import NotificationType
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord, ProgressReport
from ppojob_api.v1alpha1.status import ConditionStatus, PPOJobStatus
from ppojob_operator.manifests import naming
from ppojob_operator.plan import (
    Claim,
    Cluster,
    FetchJob,
    JobKey,
    Observed,
    Plan,
    Pod,
    Ray,
    RayJob,
    RayState,
    Surroundings,
    Trouble,
)
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile import dashboard_target, decide
from ppojob_operator.reconcile.outbox import with_notifications
from ppojob_operator.reconcile.states import TRANSITIONS, Event, State, state_of
from ppojob_operator.report_times import ReportTimes
from ppojob_operator.status_server.fields import progress_status

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
KEY = JobKey("rl-team", "arithmetic")
UID = "7c4a8d09-ca37-4b2e-9d1f-1b2c3d4e5f60"
SURROUNDINGS = Surroundings("https://operator/progress", "PEM", b"k" * 32)


def spec(**changes: Any) -> dict[str, Any]:
    """Return a good spec with two pools, with sections replaced."""
    task = {"reasoningGym": {"task": "products"}}
    return {
        "image": "trainer:1",
        "model": {"actor": {"path": "/data/model"}},
        "data": {"train": task, "trainBatchSize": 16},
        "reward": {"function": {"module": "rewards"}},
        "actor": {"miniBatchSize": 8},
        "critic": {"miniBatchSize": 8},
        "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
        "placement": {"actor": "actor", "critic": "critic"},
        "storage": {"claimName": "data"},
        **changes,
    }


class World:
    """A PPOJob with its surroundings, at a moment that the test moves."""

    def __init__(self, **changes: Any) -> None:
        self.spec = spec(**changes)
        self.labels: dict[str, str] = {}
        self.annotations: dict[str, str] = {}
        self.generation = 1
        self.template: dict[str, Any] | None = None
        """The template that the spec names. None: there is none."""
        self.status: dict[str, Any] = {}
        self.now = START
        self.observed = Observed(SURROUNDINGS, claim=Claim("data", "Bound"))
        self.report_times = ReportTimes()
        self.num_reports = 0
        self.skew = timedelta(0)
        """By how much the clock of the replica that takes the reports is ahead of the leader's."""
        self.log: str = ""
        self.refusal = ""
        """Why the API server refuses a RayCluster in a dry run; empty: it accepts it."""
        self.is_silent = False
        """It does not answer dry runs; `refusal` says how."""
        self.tried = 0
        """Dry runs so far."""
        self.default_queue: str | None = None
        """Queue that Kueue gives to RayClusters without one. Empty: it suspends them without. None: it does neither."""
        self.is_deleting = False
        self.is_deleted = False
        self.hangs = False
        """Ray does not end what it is asked to end."""
        self.stopped: list[str] = []
        self.said: list[str] = []
        self.words: list[str] = []
        self.made: list[dict[str, Any]] = []
        self.secrets: set[str] = set()
        """Names of the Secrets that exist."""
        self.transitions: list[tuple[State, Event, State]] = []
        self.types: frozenset[str] = frozenset(NotificationType)
        """Types of notifications that the receiver wants. Empty: there is no receiver."""
        self.settled: set[int] = set()
        """Numbers of the notifications that it has accepted."""

    # What the test moves.

    def wait(self, seconds: float) -> "World":
        """Let time pass."""
        self.now += timedelta(seconds=seconds)
        return self

    def see(self, **changes: Any) -> "World":
        """Change what is observed."""
        self.observed = replace(self.observed, **changes)
        return self

    def pods_become(self, *, ready: bool, pool: str = "", trouble: Trouble | None = None, suffix: str = "") -> "World":
        """Give the current RayCluster its pods, or change them: all, or those of one pool ("head" is the head's)."""
        name = self.cluster_name
        kept = [pod for pod in self.observed.pods if pool and (pod.pool or "head") != pool]
        for group in ("head", *(each["name"] for each in self.spec["pools"])):
            if pool in ("", group):
                is_head = group == "head"
                pod = Pod(f"{name}-{group}{suffix}", name, None if is_head else group, ready, trouble=trouble)
                is_starved = trouble is not None and trouble.reason == Reason.OUT_OF_MEMORY
                kept.append(replace(pod, out_of_memory=trouble if is_starved else None))
        return self.see(pods=tuple(kept))

    def pods_are_bound(self) -> "World":
        """Bind all pods to nodes."""
        return self.see(pods=tuple(replace(pod, node=f"node-of-{pod.name}") for pod in self.observed.pods))

    def pod_is_gone(self, pool: str) -> "World":
        """Take a pool's pods away ("head" is the head's)."""
        return self.see(pods=tuple(pod for pod in self.observed.pods if (pod.pool or "head") != pool))

    def pod_leaves(self, pool: str) -> "World":
        """Let a pool's pods be deleted ("head" is the head's): their hook holds them."""
        return self.see(
            pods=tuple(
                replace(pod, is_deleting=True) if (pod.pool or "head") == pool else pod for pod in self.observed.pods
            )
        )

    def ray_says(self, state: RayState, **fields: Any) -> "World":
        """Let Ray say something else of the attempt that was sent last."""
        assert self.observed.ray is not None
        *others, last = self.observed.ray.jobs
        return self.see(ray=Ray((*others, replace(last, state=state, **fields))))

    def trainer_fails(
        self,
        reason: str,
        kind: FailureKind,
        message: str = "it broke",
        exit_code: int = 1,
        *,
        only_processes: bool = False,
        role: str | None = None,
    ) -> "World":
        """Let the trainer end with a named failure. only_processes: it lost some, and its pods are fine."""
        record = FailureRecord(
            reason=reason, message=message, kind=kind, exit_code=exit_code, only_processes=only_processes, role=role
        )
        self.log = f"step 3\n{record.to_log_line()}\n"
        return self.ray_says(RayState.FAILED, error_type="JOB_ENTRYPOINT_COMMAND_ERROR", exit_code=exit_code)

    def trainer_stops_gracefully(self) -> "World":
        """Let the trainer end as it does when it was asked to stop, or got a signal."""
        kind = FailureKind.INFRASTRUCTURE
        return self.trainer_fails(Reason.INTERRUPTED, kind, "stopped gracefully after step 3", exit_code=130)

    def ask_for_a_retry(self, value: str = "first") -> "World":
        """Annotate the job, as `kubectl ppo retry` does."""
        self.annotations[constants.ANNOTATION_RETRY] = value
        return self

    def suspend(self, is_requested: bool = True) -> "World":
        """Change `spec.runPolicy.suspend`."""
        self.spec["runPolicy"] = {**self.spec.get("runPolicy", {}), "suspend": is_requested}
        self.generation += 1
        return self

    def edit(self, **changes: Any) -> "World":
        """Replace sections of the spec."""
        self.spec = {**self.spec, **changes}
        self.generation += 1
        return self

    def trainer_reports(self, activity: str = "Training", step: int | None = None, **fields: Any) -> "World":
        """Let the status server write a report; without a step, of one step more than before."""
        step = self.status.get("progress", {}).get("step", 0) + 1 if step is None else step
        self.num_reports += 1
        known = {"uid": UID, "attempt": self.status["attempt"], "number": self.num_reports, "totalSteps": 8}
        report = ProgressReport.model_validate({**known, "activity": activity, "step": step, **fields})
        written = progress_status(report, self.raw, self.now + self.skew) or {}
        self.status |= {**written, "pools": _merged(self.status.get("pools", []), written.get("pools", []))}
        return self

    def trainer_repeats(self, **fields: Any) -> "World":
        """Let the status server write the last report again, with more in it."""
        last = self.status["progress"]
        return self.trainer_reports(last["activity"], last["step"], **fields)

    # What the operator does.

    def plan(self) -> Plan:
        """Decide, without doing anything."""
        job = read_job(self.raw, self.template)
        observed = replace(self.observed, reported_at=self.report_times.seen(job, self.now))
        if observed.ray is not None and dashboard_target(job, observed) is None:
            observed = replace(observed, ray=None)
        plan = decide(job, observed, self.now)
        if plan.dry_run is not None:
            self.tried += 1
            observed = replace(observed, dry_run=self.refusal, is_dry_run_unanswered=self.is_silent)
            plan = decide(job, observed, self.now)
        assert plan.dry_run is None, "what was tried is to be tried again"
        if plan.read_log_of:
            plan = decide(job, replace(observed, log_tail=self.log), self.now)
        assert not plan.read_log_of, "a log that was read is wanted again"
        self._follow(plan, observed)
        return with_notifications(plan, job, self.types, self.settled, self.now)

    def look(self) -> Plan:
        """Decide, and do what the plan says."""
        plan = self.plan()
        for manifest in plan.apply:
            self._apply(manifest)
        self.stopped += plan.stop_submissions
        if self.observed.ray is not None and not self.hangs:
            jobs, asked = self.observed.ray.jobs, plan.stop_submissions
            ended = (replace(job, state=RayState.STOPPED) if job.submission_id in asked else job for job in jobs)
            self.see(ray=replace(self.observed.ray, jobs=tuple(ended)))
        if plan.submission is not None:
            sent = RayJob(plan.submission.submission_id, RayState.RUNNING, metadata=plan.submission.metadata)
            self.see(ray=Ray((*(self.observed.ray.jobs if self.observed.ray else ()), sent)))
        if plan.status is not None:
            theirs = {
                name: self.status[name]
                for name in ("progress", "recommendation", "layoutAdvice", "checkpoint", "model", "fetch", "sources")
                if name in self.status
            }
            pools = _merged(plan.status.get("pools", []), self.status.get("pools", []))
            self.status = {**plan.status, **theirs, "pools": pools}
        self.secrets -= set(plan.delete_secrets)
        for name in plan.delete_clusters:
            self._release(name)
        if plan.delete_fetch_job:
            self.see(fetch_job=None, fetch_pods=())
        self.is_deleted = self.is_deleted or plan.delete_job
        self.said += [event.reason for event in plan.events]
        self.words += [event.message for event in plan.events]
        return plan

    def _follow(self, plan: Plan, observed: Observed) -> None:
        """Check the plan against the table: its transition is declared, and its status has the next state."""
        state, event, after = State(plan.state), Event(plan.event), State(plan.next_state)
        assert TRANSITIONS[state].get(event) == after, f"{state} --{event}--> {after} is not in the table"
        written = PPOJobStatus.model_validate(self.status if plan.status is None else plan.status, extra="ignore")
        if event != Event.DELETED:
            # Ray may have a trainer of which no status could be written.
            in_ray = [each.submission_id for each in observed.ray.jobs] if observed.ray else []
            is_known = naming.submission_id(UID, written.attempt or 0) in in_ray
            found = state_of(written, is_submitted=plan.submission is not None or is_known)
            assert found == after, f"{state} --{event}--> {after}, but the status says {found}"
            assert written.phase == after.phase(written.attempt or 0)
        self.transitions.append((state, event, after))

    def settle(self, limit: int = 10) -> "World":
        """Look until nothing changes any more at this moment."""
        for _ in range(limit):
            plan = self.look()
            is_at_rest = not (plan.apply or plan.submission or plan.delete_clusters or plan.delete_fetch_job)
            if plan.status is None and is_at_rest:
                return self
        raise AssertionError(f"no rest after {limit} looks: {plan}")

    def run(self) -> "World":
        """Bring the job to a trainer that reports."""
        self.settle()
        self.pods_become(ready=True).see(ray=Ray()).settle()
        self.wait(20).trainer_reports()
        return self.settle()

    def _apply(self, manifest: Mapping[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "RayCluster" and name not in [cluster.name for cluster in self.observed.clusters]:
            # Kueue suspends what comes into one of its queues.
            queue = manifest["metadata"]["labels"].get(constants.LABEL_QUEUE, self.default_queue)
            fresh = Cluster(
                name,
                is_suspended=queue is not None,
                created=self.now,
                head_service=f"{name}-head-svc",
                uid=f"uid of {name}",
                created_from=manifest["metadata"]["annotations"][constants.ANNOTATION_MADE_OF],
                queue=queue or None,
            )
            self.see(clusters=(*self.observed.clusters, fresh), ray=None)
            self.made.append(dict(manifest))
        if manifest["kind"] == "Secret":
            self.secrets.add(name)
        if manifest["kind"] == "Job":
            fresh_job = FetchJob(manifest["metadata"]["annotations"][constants.ANNOTATION_MADE_OF], self.now)
            self.see(fetch_job=fresh_job)
            self.made.append(dict(manifest))
        if manifest["kind"] == "ConfigMap":
            self.see(config=manifest["data"])

    def _release(self, name: str) -> None:
        self.see(
            clusters=tuple(cluster for cluster in self.observed.clusters if cluster.name != name),
            pods=tuple(pod for pod in self.observed.pods if pod.cluster != name),
        )

    # What the tests ask.

    @property
    def raw(self) -> dict[str, Any]:
        """The PPOJob as the API server has it."""
        metadata: dict[str, Any] = {
            "namespace": KEY.namespace,
            "name": KEY.name,
            "uid": UID,
            "generation": self.generation,
            "labels": self.labels,
            "annotations": self.annotations,
        }
        if self.is_deleting:
            metadata["deletionTimestamp"] = "2026-03-01T12:00:00Z"
        return {"metadata": metadata, "spec": self.spec, "status": self.status}

    @property
    def cluster_name(self) -> str:
        """The RayCluster that the status names."""
        name: str = self.status["rayCluster"]["name"]
        return name

    @property
    def totals(self) -> tuple[int, int, int]:
        """Retries in total: after failures of the user's program, of the cluster, and after ignored ones."""
        retries = self.status["retries"]
        assert retries["total"] == retries["user"] + retries["infrastructure"] + retries["ignored"]
        return retries["user"], retries["infrastructure"], retries["ignored"]

    def condition(self, kind: str) -> ConditionStatus:
        """Return a condition of the status."""
        parsed = PPOJobStatus.model_validate(self.status)
        return next(condition for condition in parsed.conditions if condition.type == kind)

    @property
    def pending(self) -> list[dict[str, Any]]:
        """The notifications that wait for the receiver."""
        found: list[dict[str, Any]] = self.status.get("notifications", {}).get("pending", [])
        return found

    def verdict(self, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition."""
        condition = self.condition(kind)
        return condition.status, condition.reason


def _merged(of_operator: list[dict[str, Any]], of_reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pools of the status, with busyFraction from the reports and all other fields from the operator."""
    busy = {pool["name"]: {"busyFraction": pool["busyFraction"]} for pool in of_reports if "busyFraction" in pool}
    ours = ({name: value for name, value in pool.items() if name != "busyFraction"} for pool in of_operator)
    return [{**pool, **busy.get(pool["name"], {})} for pool in ours]


def first_cluster() -> str:
    """Return the name of the first attempt's RayCluster."""
    return naming.cluster_name(KEY.name, UID, 0, SURROUNDINGS.dashboard_key)
