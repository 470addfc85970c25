"""What `kubectl ppo status` and `metrics` show: tables of PPOJobs as the API server has them. Pure, for `app.py`."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ppojob_api.v1alpha1.constants import Condition, Phase
from ppojob_trainer.kubectl.client import Raw

_COLORS = {"Succeeded": "green", "Running": "cyan", "Failed": "red"}
_FOLDED = ("NAMESPACE", "NAME", "BUSY")
_FINISHED = frozenset((Condition.COMPLETE, Condition.FAILED))
_MANY = timedelta(days=2)


def jobs_table(jobs: Sequence[Raw], now: datetime, *, with_namespace: bool = False) -> Table:
    """Return a row for each job: kubectl's columns and some more. On a narrow terminal names and BUSY are folded."""
    headings = ["NAME", "PHASE", "STEP", "PROGRESS", "LEFT", "REWARD", "READY", "BUSY", "RETRIES", "AGE"]
    rows = [list(_cells(job, now)) for job in jobs]
    if with_namespace:
        headings.insert(0, "NAMESPACE")
        rows = [[job["metadata"]["namespace"], *row] for job, row in zip(jobs, rows, strict=True)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, *cells in zip(headings, *rows, strict=True):
        is_folded = heading in _FOLDED
        width = max(map(len, [heading, *cells]))
        table.add_column(heading, no_wrap=not is_folded, overflow="fold", min_width=None if is_folded else width)
    for row in rows:
        table.add_row(*(Text(cell, style=_COLORS.get(cell, "")) for cell in row))
    return table


def job_view(job: Raw, now: datetime) -> RenderableType:
    """Return all that is known of one job."""
    status = job.get("status", {})
    parts: list[RenderableType] = [jobs_table([job], now), "", _conditions(status)]
    if status.get("pools"):
        parts += ["", _pools(status["pools"])]
    failure = status.get("lastFailure")
    if failure:
        words = f"{failure['reason']}: {failure['message']}"
        parts += ["", Text(f"last failure (attempt {failure['attempt']}): {words}", style="red")]
    parts += [Text(line) for line in ("", *_places(status)) if len(_places(status))]
    if problem := missing_operator(job):
        parts += ["", Text(problem, style="red")]
    return Group(*parts)


def line(job: Raw) -> str:
    """Return a job in one line, without what changes by itself."""
    status, progress = job.get("status", {}), job.get("status", {}).get("progress", {})
    key = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
    steps = f"step {progress.get('step', 0)}/{progress.get('totalSteps') or '?'}"
    return f"{key}  {_phase(job)}  {steps}  reward {progress.get('reward', '-')}  ready {status.get('ready', '-')}"


def true_conditions(job: Raw) -> Raw:
    """Return the conditions whose status is True, by type."""
    conditions = job.get("status", {}).get("conditions", [])
    return {each["type"]: each for each in conditions if each["status"] == "True"}


def is_finished(job: Raw) -> bool:
    """Return whether the job is complete or has failed."""
    return not _FINISHED.isdisjoint(true_conditions(job))


def missing_operator(job: Raw) -> str:
    """Return what to check if the job waits and no operator owns it; empty: one does."""
    if "operator" in job.get("status", {}) or _phase(job) not in (Phase.PENDING, Phase.SUSPENDED):
        return ""
    namespace = job["metadata"]["namespace"]
    return (
        f"no operator reconciles the job: check that ppojob-operator runs and serves namespace {namespace}, which may "
        "need a label (the chart's values watchNamespaces and namespaceSelector)"
    )


def metrics_table(job: Raw) -> Table:
    """Return the last step's metrics as the status has them."""
    status = job.get("status", {})
    table = Table("metric", f"step {status.get('progress', {}).get('step', 0)}", box=None, pad_edge=False)
    for metric in status.get("metrics", []):
        table.add_row(escape(metric["name"]), escape(metric["value"]))
    return table


def steps_table(records: Sequence[dict[str, float | None]], names: Sequence[str]) -> Table:
    """Return a line for each step with the metrics that are asked for."""
    table = Table("step", *names, box=None, pad_edge=False)
    for record in records:
        values = (record.get(name) for name in names)
        table.add_row(f"{record['step']:.0f}", *("-" if value is None else f"{value:.4g}" for value in values))
    return table


def duration(span: timedelta) -> str:
    """Return a time as kubectl writes it: 45s, 12m, 5h, 3d."""
    seconds = int(span.total_seconds())
    if seconds < 120:
        return f"{max(0, seconds)}s"
    if seconds < 120 * 60:
        return f"{seconds // 60}m"
    return f"{seconds // 3600}h" if span < _MANY else f"{span.days}d"


def age(since: str | None, now: datetime) -> str:
    """Return how long ago a moment of the API server is; a dash where there is none."""
    return duration(now - datetime.fromisoformat(since)) if since else "-"


def _phase(job: Raw) -> str:
    return str(job.get("status", {}).get("phase", "Pending"))


def _cells(job: Raw, now: datetime) -> Iterable[str]:
    status, progress, phase = job.get("status", {}), job.get("status", {}).get("progress", {}), _phase(job)
    left = progress.get("etaSeconds")
    busy = ", ".join(
        f"{pool['name']} {float(pool['busyFraction']):.0%}"
        for pool in status.get("pools", [])
        if "busyFraction" in pool
    )
    yield str(job["metadata"]["name"])
    yield phase
    yield f"{progress.get('step', 0)}/{progress['totalSteps'] or '?'}" if "totalSteps" in progress else "-"
    yield f"{progress['percentage']} %" if "percentage" in progress else "-"
    yield duration(timedelta(seconds=left)) if left is not None and not is_finished(job) else "-"
    yield str(progress.get("reward", "-"))
    yield str(status.get("ready", "-"))
    yield busy or "-"
    yield str(status.get("retries", {}).get("total", 0))
    yield age(job["metadata"].get("creationTimestamp"), now)


def _conditions(status: Raw) -> Table:
    table = Table("condition", "", "reason", "message", box=None, pad_edge=False, header_style="bold")
    for each in status.get("conditions", []):
        table.add_row(each["type"], each["status"], each["reason"], escape(each["message"]))
    return table


def _pools(pools: Sequence[Raw]) -> Table:
    table = Table(
        "pool", "pods ready", "GPUs", "engines", "busy", "message", box=None, pad_edge=False, header_style="bold"
    )
    for pool in pools:
        ready = f"{pool.get('readyNodes', 0)}/{pool.get('desiredNodes', '?')}"
        busy = f"{float(pool['busyFraction']):.0%}" if "busyFraction" in pool else "-"
        counts = (str(pool.get("gpus", "-")), str(pool.get("engines", "-")))
        table.add_row(escape(pool["name"]), ready, *counts, busy, escape(pool.get("message", "")))
    return table


def _places(status: Raw) -> list[str]:
    """Return what was fetched, the last step's checks, the newest results, GPU time, advice, and the job's operator."""
    checkpoint, model, operator = status.get("checkpoint"), status.get("model"), status.get("operator")
    return [
        *([f"fetch           {_fetch(status['fetch'])}"] if status.get("fetch") else []),
        *(
            f"source          {each['address']}, {_size(each['bytes'])}, in {each['path']}"
            for each in status.get("sources", [])
        ),
        *([f"last step       {_checks(status['checks'])}"] if status.get("checks") else []),
        *([f"checkpoint      step {checkpoint['step']}, {checkpoint['path']}"] if checkpoint else []),
        *([f"model           {model['path']}"] if model else []),
        *([f"uploaded        {model['address']}"] if model and "address" in model else []),
        *(
            f"avoided node    {each['name']}, {each['reason']} in attempt {each['attempt']}, {each['time']}"
            for each in status.get("avoidedNodes", [])
        ),
        *([f"GPU time        {_gpu_time(status['gpuUsage'])}"] if status.get("gpuUsage") else []),
        *([f"recommendation  {status['recommendation']}"] if status.get("recommendation") else []),
        *([f"operator        {operator['namespace']}, version {operator['version']}"] if operator else []),
    ]


def _checks(checks: Raw) -> str:
    """Return what the last step was checked for."""
    compared, difference = checks.get("comparedWeightsStep"), checks.get("rolloutProbsDiffMean")
    words = [
        f"{checks['step']}: weights of step {checks['oldestWeightsStep']} (staleness {checks['maxStaleness']})",
        *([] if compared is None else [f"read back in step {compared}"]),
        *([] if difference is None else [f"rollout_probs_diff_mean {difference}"]),
        f"all pools idle {float(checks['idleFraction']):.0%}",
    ]
    return ", ".join(words)


def _gpu_time(usage: Raw) -> str:
    """Return for how long the job has held GPUs, and for how much of that they were idle."""
    held, idle = float(usage["gpuHours"]), float(usage["idleGPUHours"])
    return f"{held:.2f} GPU-hours" + (f", {idle / held:.0%} idle" if held else "")


def _fetch(fetch: Raw) -> str:
    """Return how far the fetch of models and data is."""
    of = _size(fetch["totalBytes"]) if "totalBytes" in fetch else "?"
    words = f"{_size(fetch.get('bytes', 0))} of {of}"
    return "; ".join(filter(None, (words, fetch.get("address"), fetch.get("message"))))


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB"
