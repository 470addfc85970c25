"""Three hours of a cluster with five jobs in two namespaces, in the words of the real exporters.

The operator's registry and the trainers' sinks are ours and real; what they are given is made up. Ray's gauges have the
names that the installed Ray gives them. `prometheus.py` loads the result, `preview.py` draws it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from ppojob_api.v1alpha1.constants import STATUS_METRICS, Phase
from ppojob_operator.plan import JobKey
from ppojob_operator.reconcile import JobState
from ppojob_operator.status_server import OperatorMetrics
from ppojob_trainer.telemetry.sinks.prometheus import PrometheusSink

START = 1_772_366_400.0
"""2026-03-01 12:00 UTC."""
LENGTH = 3 * 3600.0
INTERVAL = 60.0
OPERATOR_LABELS = {"namespace": "system", "service": "ppojob", "pod": "ppojob-1", "job": "ppojob"}
_GB = 1e9
_STEP_S = 40.0

ON_GPUS = ("pool/{pool}/gpu_utilization", "pool/{pool}/memory_peak_gb", "pool/{pool}/memory_total_gb")
"""What `worker_groups/observation.py` adds for each pool with GPUs."""
OF_POOLS = ("pool/{pool}/busy_fraction", "pool/{pool}/idle_s")
OF_ROLES = ("perf/max_memory_allocated_gb/{role}",)
OF_WEIGHTS = ("comm_gb_per_s/update_weights", "comm_receivers/update_weights", "comm_read_back/update_weights")


@dataclass(frozen=True)
class Sample:
    """One value of one series, as Prometheus stores it."""

    name: str
    labels: Mapping[str, str]
    value: float
    time: float

    def line(self) -> str:
        """Return it as a line of OpenMetrics."""
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(self.labels.items()))
        return f"{self.name}{{{labels}}} {self.value} {self.time:.0f}"


@dataclass(frozen=True)
class Job:
    """A job and what becomes of it: its phases from these minutes on."""

    key: JobKey
    course: tuple[tuple[float, str], ...]
    pools: tuple[str, ...]
    is_grpo: bool = False
    total_steps: int = 200
    failure: tuple[str, float] | None = None
    """Reason, and minute."""
    stalls_from: float = math.inf
    """Minute from which its trainer reports nothing new."""

    def phase(self, minute: float) -> str:
        """Return its phase; empty before it is created."""
        return next((phase for begin, phase in reversed(self.course) if begin <= minute), "")

    def since(self, minute: float) -> float:
        """Return the minute in which its phase began."""
        return max(begin for begin, _ in self.course if begin <= minute)

    def step(self, minute: float) -> int:
        """Return how many steps are done."""
        ran = sum(
            max(min(end, minute, self.stalls_from) - begin, 0.0)
            for (begin, phase), (end, _) in zip(self.course, (*self.course[1:], (math.inf, "")), strict=True)
            if phase == Phase.RUNNING
        )
        return min(int(ran * 60 / _STEP_S), self.total_steps)


JOBS = (
    Job(JobKey("team-a", "sums-ppo"), ((5, "Starting"), (9, "Running")), ("actor", "critic"), total_steps=400),
    Job(
        JobKey("team-a", "sums-grpo"), ((20, "Queued"), (60, "Starting"), (64, "Running"), (150, "Failed")), ("all",),
        is_grpo=True, failure=("OutOfMemory", 150),
    ),
    Job(
        JobKey("team-b", "products"),
        ((0, "Starting"), (3, "Running"), (70, "Restarting"), (75, "Running")), ("actor", "critic"),
        total_steps=600, failure=("WorkerLost", 70), stalls_from=120,
    ),
    Job(JobKey("team-b", "patient"), ((90, "Pending"), (92, "Queued")), ("all",)),
    Job(JobKey("team-b", "short"), ((2, "Starting"), (5, "Running"), (72, "Succeeded")), ("all",), total_steps=100),
)  # fmt: skip


def scraped() -> Iterator[Sample]:
    """Yield everything that Prometheus scrapes in the three hours, in the order of time."""
    operator = _Operator()
    with ExitStack() as stack:
        trainers = [_Trainer(job, stack.enter_context(closing(PrometheusSink(0, address="127.0.0.1")))) for job in JOBS]
        for number in range(int(LENGTH / INTERVAL) + 1):
            now = START + number * INTERVAL
            operator.work((now - START) / 60)
            yield Sample("up", OPERATOR_LABELS, 1, now)
            yield from _samples(operator.registry, OPERATOR_LABELS, now)
            yield from (sample for trainer in trainers for sample in trainer.scraped(now))


def step_metrics(job: Job, step: int) -> dict[str, float]:
    """Return the record of a step, as a trainer with GPUs writes it."""
    learned, wave = 1 - math.exp(-step / 80), math.sin(step * 1.3) / 40
    metrics = dict.fromkeys(STATUS_METRICS, 0.0) | {name: 12.0 for name in OF_WEIGHTS}
    metrics |= {
        "critic/score/mean": 0.1 + 0.5 * learned + wave, "actor/ppo_kl": 0.002 + abs(wave) / 10,
        "actor/entropy": 1.2 - 0.6 * learned, "actor/pg_loss": -0.01 + wave / 10, "actor/pg_clipfrac": 0.03 + wave / 4,
        "actor/grad_norm": 0.8 + wave, "critic/grad_norm": 2.0 + 10 * wave,
        "critic/vf_loss": 0.1 * (1 - learned) + 0.02,
        "critic/vf_explained_var": 0.8 * learned, "critic/vf_clipfrac": 0.01,
        "response_length/mean": 180 - 60 * learned + 100 * wave, "response_length/max": 512,
        "response_length/clip_ratio": 0.05 * (1 - learned), "training/rollout_probs_diff_mean": 0.0035 + abs(wave) / 8,
        "perf/throughput": 5200 + 4000 * wave, "perf/mfu/actor": 0.42 + wave, "perf/mfu/critic": 0.38 + wave,
        "overlap/saved_s": 9.0 + 10 * wave, "actor/non_finite_steps": float(step == 90),
    }  # fmt: skip
    metrics |= {f"timing_s/{name}": seconds + 10 * wave for name, seconds in _SECONDS.items()}
    if step % 10 == 0:
        metrics["val-core/score/mean"] = 0.12 + 0.52 * learned
    else:
        metrics.pop("val-core/score/mean")
    kl = ("actor/kl_loss", "actor/reward_kl_penalty") if job.is_grpo else ("actor/reward_kl_penalty", "actor/kl_loss")
    metrics[kl[0]] = 0.3 * learned + abs(wave)
    absent = {kl[1]} | (
        {name for name in metrics if "critic/v" in name or name.endswith("critic")} if job.is_grpo else set()
    )
    for index, pool in enumerate(job.pools):
        values = (0.9 - 0.25 * index + wave, 4.0, 0.7 - 0.2 * index + wave, 62.0 + 9 * index + 40 * wave, 80.0)
        names = (*OF_POOLS, *ON_GPUS)
        metrics |= {name.format(pool=pool): value for name, value in zip(names, values, strict=True)}
    for index, role in enumerate(("actor",) if job.is_grpo else ("actor", "critic", "ref")):
        metrics[OF_ROLES[0].format(role=role)] = 30.0 - 8 * index
    return {name: value for name, value in metrics.items() if name not in absent}


_SECONDS = {
    "step": 40.0, "gen": 17.0, "reward": 1.0, "old_log_prob": 4.0, "ref": 4.0, "values": 3.0, "adv": 0.5,
    "update_actor": 12.0, "update_critic": 8.0, "update_weights": 1.0, "save_checkpoint": 6.0, "testing": 9.0,
}  # fmt: skip


def state_of(job: Job, minute: float) -> JobState:
    """Return what the operator knows of a job in a minute."""
    phase, now = job.phase(minute), START + minute * 60
    is_running, is_over = phase == Phase.RUNNING, phase in (Phase.FAILED, Phase.SUCCEEDED)
    step, has_failed = job.step(minute), job.failure is not None and job.failure[1] <= minute
    waits = phase in (Phase.PENDING, Phase.QUEUED, Phase.STARTING, Phase.RESTARTING)
    first = START + job.course[0][0] * 60
    state = JobState(
        phase,
        ended_at=START + job.since(minute) * 60 if is_over else None,
        progress_ratio=step / job.total_steps if step else None,
        retries={"user": 0, "infrastructure": int(has_failed and not is_over)},
        waiting_since=(START + job.since(minute) * 60 if phase == Phase.RESTARTING else first) if waits else None,
        is_stalled=not is_over and minute - job.stalls_from > 30,
        gpu_seconds={"busy": 2 * 0.7 * step * _STEP_S, "idle": 2 * (0.3 * step * _STEP_S + 120)} if step else {},
        gpus={} if is_over else {"desired": 2.0, "ready": 0.0 if waits else 2.0},
    )
    if job.failure is not None and has_failed:
        state = replace(state, last_failure=(job.failure[0], START + job.failure[1] * 60))
    if not is_running:
        return state
    stalled = START + job.stalls_from * 60
    return replace(
        state,
        seconds_left=(job.total_steps - step) * _STEP_S,
        last_progress=min(now - 5, stalled),
        last_report=now - 5,
        unsaved_since=max(START + job.since(minute) * 60, min(now, stalled) - step % 50 * _STEP_S),
    )


class _Trainer:
    """A job's trainer and its pods, which are scraped while it runs."""

    def __init__(self, job: Job, sink: PrometheusSink) -> None:
        self._job = job
        self._sink = sink
        self._step = 0

    def scraped(self, now: float) -> Iterator[Sample]:
        """Yield what its pods expose."""
        job, minute = self._job, (now - START) / 60
        if job.phase(minute) != Phase.RUNNING:
            return
        step = job.step(minute)
        if step > self._step:
            self._step = step
            self._sink.write(step, now, step_metrics(job, step))
        labels = {"namespace": job.key.namespace, "ppojob": job.key.name}
        yield from _samples(self._sink.registry, {**labels, "pod": f"{job.key.name}-head"}, now)
        yield from _of_ray(job, labels, step, now)


class _Operator:
    """The operator's registry, and what it counts minute by minute."""

    def __init__(self) -> None:
        self.minute = 0.0
        self._metrics = OperatorMetrics(clock=lambda: START + self.minute * 60)
        self._metrics.ask(
            job_states=lambda: {job.key: state_of(job, self.minute) for job in JOBS if job.phase(self.minute)},
            queue_depth=lambda: 2,
            left_alone=lambda: 0,
            leads=lambda: True,
        )
        self.registry = self._metrics.registry

    def work(self, minute: float) -> None:
        """Count what the operator does in a minute."""
        before, self.minute = self.minute, minute
        for job in JOBS:
            for begin, phase in job.course:
                if before < begin <= minute and phase == Phase.RUNNING:
                    self._metrics.count_submission()
                if before < begin <= minute and phase == Phase.RESTARTING:
                    self._metrics.count_retries("infrastructure", 1)
        for number in range(30):
            self._metrics.observe_reconcile(0.01 + number / 2000, "error" if number == 29 else "ok")
            self._metrics.status_write_lag.observe(0.2 + number / 10)
            self._metrics.reports.labels(outcome="Accepted").inc()
            self._metrics.status_writes.labels(outcome="written").inc()
        self._metrics.reports.labels(outcome="StaleAttempt").inc()
        self._metrics.count_review("Allowed" if int(minute) % 7 else "Refused")
        self._metrics.count_api_request("GET", "ppojobs", "200")
        self._metrics.count_api_request("PATCH", "rayclusters", "422")
        self._metrics.count_notification("failed", "sent" if int(minute) % 5 else "retried")
        if int(minute) % 11 == 0:
            self._metrics.count_watch_failure()
            self._metrics.count_closed_connection("TooSlow")


def _of_ray(job: Job, labels: Mapping[str, str], step: int, now: float) -> Iterator[Sample]:
    for index, group in enumerate(("head", *job.pools)):
        pod = {**labels, "pod": f"{job.key.name}-{group}", "IsHeadNode": str(group == "head").lower()}
        used = 6 + 20 * index + 3 * math.sin(step / 9)
        yield Sample("ray_node_mem_used", pod, used * _GB, now)
        yield Sample("ray_node_mem_total", pod, 64 * _GB, now)


def _samples(registry: CollectorRegistry, target: Mapping[str, str], now: float) -> Iterator[Sample]:
    """Yield a registry's samples with the labels of the target; a sample's labels have precedence."""
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield Sample(sample.name, {**target, **sample.labels}, sample.value, now)


def labels_of(samples: Iterable[Sample]) -> dict[str, frozenset[str]]:
    """Return the labels of each metric, by its name."""
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return {name: frozenset(labels) for name, labels in found.items()}
