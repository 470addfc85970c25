"""Policy: the GPU time of a job, for `status.gpuUsage`.

    hours += GPUs held since the last count * time since then          at each change of the status, else every 10 min
    idle hours += the same * (1 - busy share at the last count)

`decide` adds it to the plan. GPUs are counted from the binding of a pod to its node until the pod ends, or until the
job needs no pods any more: suspended or finished.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from ppojob_api.v1alpha1.constants import Phase
from ppojob_api.v1alpha1.progress import Activity
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import GPUUsage, PPOJobStatus
from ppojob_operator.plan import Job, Observed, Plan
from ppojob_operator.reconcile.status import format_time, owned
from ppojob_operator.times import parse_time

INTERVAL = timedelta(minutes=10)
"""Longest time without a count: a write for the count alone costs the API server as much as any other."""
_WITHOUT_GPUS = (Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED)
_COMPUTING = (Activity.TRAINING, Activity.VALIDATING)
_HOUR, _DIGITS = Decimal(3600), Decimal("0.0001")


def counted(plan: Plan, job: Job, observed: Observed, now: datetime) -> Plan:
    """Return the plan with the GPU time until now in its status, if it writes the status or a count is due."""
    before = job.status.gpu_usage
    desired = owned(job.status) if plan.status is None else plan.status
    gpus = 0 if desired.get("phase") in _WITHOUT_GPUS else _held(job, observed)
    busy = _busy(job.status) if gpus else Decimal(0)
    if before is None:
        if not gpus:
            return plan
        before = GPUUsage(gpu_hours="0", idle_gpu_hours="0", gpus=0, busy_fraction="0", time=format_time(now))
    elif plan.status is None and not _is_due(before, gpus, busy, now):
        return plan
    hours = before.gpus * _seconds_since(before.time, now) / _HOUR
    usage = GPUUsage(
        gpu_hours=_sum(before.gpu_hours, hours),
        idle_gpu_hours=_sum(before.idle_gpu_hours, hours * (1 - Decimal(before.busy_fraction))),
        gpus=gpus,
        busy_fraction=str(busy.quantize(_DIGITS)),
        time=format_time(now),
    )
    return replace(plan, status={**desired, "gpuUsage": usage.to_wire()})


def _is_due(before: GPUUsage, gpus: int, busy: Decimal, now: datetime) -> bool:
    has_changed = gpus != before.gpus or (busy > 0) != (Decimal(before.busy_fraction) > 0)
    return has_changed or (gpus > 0 and now - parse_time(before.time) >= INTERVAL)


def _held(job: Job, observed: Observed) -> int:
    """Return the GPUs of the pods that are bound to nodes, also of those that are being deleted."""
    spec = job.effective or job.spec
    if not isinstance(spec, PPOJobSpec):
        return 0
    of_pod = {pool.name: pool.gpus_per_node for pool in spec.pools}
    return sum(of_pod.get(pod.pool or "", 0) for pod in observed.pods if pod.node and not pod.is_over)


def _busy(status: PPOJobStatus) -> Decimal:
    """Return the share of the job's GPUs that compute, as in the last step; 0 outside the steps."""
    progress, gpus = status.progress, sum(pool.gpus or 0 for pool in status.pools)
    if not gpus or progress is None or progress.attempt != status.attempt or progress.activity not in _COMPUTING:
        return Decimal(0)
    busy = sum(((pool.gpus or 0) * Decimal(pool.busy_fraction or 0) for pool in status.pools), Decimal(0))
    return min(busy / gpus, Decimal(1))


def _seconds_since(time: str, now: datetime) -> Decimal:
    """Return the whole seconds, as `time` has them; 0 if another replica's clock was ahead."""
    return Decimal(max(0, (now.replace(microsecond=0) - parse_time(time)) // timedelta(seconds=1)))


def _sum(hours: str, more: Decimal) -> str:
    return str((Decimal(hours) + more).quantize(_DIGITS))
