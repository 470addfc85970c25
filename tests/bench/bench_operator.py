"""Measures the operator with many PPOJobs: real API server and KubeRay, nodes that exist only in the API server (KWOK).

    python -m tests.bench.bench_operator --output DIR [--jobs 1000] [--pods 3]

One server stands in for the Ray dashboards of the fake heads: the only thing that is not real. In one run: KubeRay
alone with the RayClusters of these jobs; a burst of jobs, and KubeRay beside the operator; rest, progress reports, and
a restart. Everything that is created is deleted at the end. All processes share this machine, so the table shows its
load and each one's processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ppojob_api.v1alpha1 import constants
from ppojob_operator.manifests import naming
from tests.bench.operator_scale import dashboards
from tests.bench.operator_scale.alone import ready_per_second
from tests.bench.operator_scale.connection import Connection, connect
from tests.bench.operator_scale.figures import Meter, Usage, percentile, resident_mib
from tests.bench.operator_scale.fleet import Fleet
from tests.bench.operator_scale.reports import Reporters, reporting
from tests.bench.operator_scale.surroundings import OperatorProcess, place
from tests.ports import server_port
from tools.cluster.cluster import is_healthy
from tools.cluster.kuberay import PROCESS as KUBERAY
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes

TURNS_PER_SECOND = 20.0
REPORT_INTERVAL_S = 10.0
SILENCE_IS_TOLD_S = 195.0
FLOOD_PER_SECOND = 200.0
LOOK_S = 0.1


@dataclass
class Row:
    """One line of the table."""

    what: str
    target: str
    measured: str
    load: float = field(default_factory=lambda: os.getloadavg()[0])


@dataclass
class Bench:
    """One run. Each measurement adds its rows."""

    connection: Connection
    fleet: Fleet
    operator: OperatorProcess
    layout: Layout
    count: int
    rest_s: float
    limit_s: float
    alone_per_s: float
    """RayClusters that KubeRay alone makes ready in a second."""
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, target: str, measured: str) -> None:
        """Add a row and print it, so that a run that is cut short has said what it found."""
        self.rows.append(Row(what, target, measured))
        print(f"{what}: {measured} (target: {target or 'none'}; load {self.rows[-1].load:.1f})", flush=True)

    def meter(self) -> Meter:
        """Begin to measure processor time."""
        processes = Processes(self.layout)
        records = {name: processes.record(name) for name in ("kube-apiserver", KUBERAY)}
        pids = {name: record.pid for name, record in records.items() if record is not None}
        return Meter({"operator": self.operator.pid, **pids})

    async def run_all(self, *, is_burst_alone: bool) -> None:
        """Do one measurement after the other, as far as there are running trainers."""
        await self.burst()
        if is_burst_alone:
            return
        if not self.fleet.times.running:
            self.add("rest, reports and restart", "", f"no trainer ran after {self.limit_s:g} s (--limit)")
            return
        # Three minutes after a trainer was sent, its status says once that it is silent; nothing changes after that.
        await asyncio.sleep(SILENCE_IS_TOLD_S)
        await self.rest("at rest", "none")
        await self.reports()
        await self.restart()

    async def burst(self) -> None:
        """Create all jobs at once and wait until they run."""
        times, meter, began = self.fleet.times, self.meter(), time.monotonic()
        await self.fleet.create(self.count)
        created = time.monotonic() - began
        num_applied = await self.fleet.until(times.applied, self.count, self.limit_s)
        used = meter.read()
        names = sorted(times.applied, key=lambda name: times.created[name])
        late = [
            max(0.0, times.applied[name] - max(times.created[name], began + number / TURNS_PER_SECOND))
            for number, name in enumerate(names)
        ]
        seconds = max(times.applied.values()) - began
        waited = [times.applied[name] - times.created[name] for name in names]
        self.add(f"jobs created, {self.count} wanted", "", f"{len(times.created)} in {created:.1f} s")
        self.add("apply to RayCluster applied, p50 / p99", "", _p50_p99(waited))
        self.add("the same after its turn at 20 jobs/s, p50 / p99", "1 s / 5 s", _p50_p99(late))
        self.add("RayClusters applied by us", "12 /s", f"{num_applied}, {num_applied / seconds:.1f} /s")
        self.add("processor time until then", "", _cores(used))
        num_running = await self.fleet.until(times.running, self.count, self.limit_s)
        used = meter.read()
        made = [times.pods[name] - times.applied[name] for name in times.pods]
        ready_s = max(times.ready.values(), default=began) - min(times.applied.values())
        ready_per_s = len(times.ready) / max(ready_s, 0.1)
        self.add("KubeRay: RayCluster applied to its first pod, p50 / p99", "", _p50_p99(made))
        self.add("KubeRay: RayClusters ready", "", f"{ready_per_s:.2f} /s; alone {self.alone_per_s:.2f} /s")
        self.add("KubeRay beside us : alone", "0.8", f"{ready_per_s / self.alone_per_s:.2f}")
        behind = [times.running[name] - times.ready[name] for name in times.running if name in times.ready]
        self.add("KubeRay says ready to our trainer sent, p50 / p99", "", _p50_p99(behind))
        self.add("jobs with a running trainer", f"{self.count}", f"{num_running} with {len(self.fleet.pod_names)} pods")
        self.add(
            "processor time until then", "", f"{_cores(used)}; {used.processor['operator'] / self.count:.3f} s a job"
        )
        self.memory("operator memory with them")

    def memory(self, what: str) -> None:
        """Add the operator's memory."""
        now, highest = (resident_mib(self.operator.pid, name) for name in ("VmRSS", "VmHWM"))
        self.add(what, "256 MiB", f"{now:.0f} MiB (highest so far {highest:.0f})")

    async def rest(self, what: str, target: str, reports: Reporters | None = None) -> None:
        """Count what the operator asks of the API server while nothing changes, or while all trainers report."""
        before, looks, meter = await self._requests(), await self._looks(), self.meter()
        if reports is None:
            await asyncio.sleep(self.rest_s)
        else:
            await reports.send(self.count / REPORT_INTERVAL_S, self.rest_s)
        used, after = meter.read(), await self._requests()
        per_job = {kind: (after[kind] - before[kind]) / used.seconds / self.count for kind in after}
        num_looks = (await self._looks() - looks) / used.seconds / self.count
        self.add(f"API writes per running job {what}", target, f"{per_job['write']:.4f} /s")
        self.add(f"API reads and looks per running job {what}", "", f"{per_job['read']:.3f} /s, {num_looks:.3f} /s")
        self.add(f"processor time {what}", "", _cores(used))

    async def reports(self) -> None:
        """Let all trainers report: once, then as often as they do, then far too often."""
        name = next(iter(self.fleet.times.running))
        path = f"/api/v1/namespaces/{self.fleet.namespace}/configmaps/{naming.config_map_name(name)}"
        ca_bundle = (await self.connection.call("GET", path))["data"][constants.CA_FILE]
        times = self.fleet.times
        async with reporting(self.fleet, self.operator.url, ca_bundle, naming.service_account_name) as reporters:
            await reporters.send(TURNS_PER_SECOND, self.count / TURNS_PER_SECOND)
            await self.fleet.until(times.reported, len(reporters.accepted), self.limit_s)
            seen = [max(0.0, times.reported[name] - reporters.accepted[name]) for name in times.reported]
            self.add("report accepted to visible in status, p50 / p99", "10 s", f"{_p50_p99(seen)} of {len(seen)}")
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self.rest("with a report each 10 s", "0.2 /s", reporters)
            await self._flood(reporters)

    async def restart(self) -> None:
        """Stop the operator, start it again, and wait until it has observed all jobs."""
        await self.operator.stop()
        began = time.monotonic()
        await self.operator.start()
        ready, meter = time.monotonic() - began, self.meter()
        while await self._num_observed() < self.count and time.monotonic() - began < self.limit_s:
            await asyncio.sleep(LOOK_S)
        seconds, seen = time.monotonic() - began, await self._num_observed()
        measured = f"{seconds:.1f} s for {seen} (ready after {ready:.1f} s)"
        self.add("restart of the operator to all jobs observed", "30 s", measured)
        self.add("processor time of the restart", "", _cores(meter.read()))
        self.memory("operator memory after the restart")

    async def _flood(self, reporters: Reporters) -> None:
        began = resident_mib(self.operator.pid)
        await reporters.send(FLOOD_PER_SECOND, self.rest_s)
        before = resident_mib(self.operator.pid)
        reporters.answers.clear()
        reporters.seconds.clear()
        meter = self.meter()
        rate = await reporters.send(FLOOD_PER_SECOND, self.rest_s)
        grown = resident_mib(self.operator.pid) - before
        counted = ", ".join(f"{number} x {status}" for status, number in sorted(reporters.answers.items()))
        self.add("reports at 200 /s, by HTTP status", "accepted or refused", f"{rate:.0f} /s: {counted}")
        self.add("answer to a report, p50 / p99", "", _p50_p99(reporters.seconds))
        measured = f"{grown:.1f} MiB, after {before - began:.1f} MiB by as many before them"
        self.add("operator memory grown by them", "0 MiB", measured)
        self.add("processor time with them", "", _cores(meter.read()))

    async def _requests(self) -> dict[str, float]:
        """Return how many writes of PPOJobs, and reads of what the operator reads, the API server served.

        Nobody else writes PPOJobs once they are made, and the others' reads of pods and RayClusters are watches.
        """
        totals = {"write": 0.0, "read": 0.0}
        for sample in await self.connection.metrics("apiserver_request_total"):
            verb, resource = sample.labels["verb"], sample.labels["resource"]
            if resource == constants.PLURAL and verb in ("APPLY", "PATCH", "PUT", "POST"):
                totals["write"] += sample.value
            if resource in (constants.PLURAL, "rayclusters", "pods", "configmaps") and verb in ("GET", "LIST"):
                totals["read"] += sample.value
        return totals

    async def _looks(self) -> float:
        found = await self.operator.metrics("ppojob_reconcile_duration_seconds_count")
        return sum(sample.value for sample in found)

    async def _num_observed(self) -> int:
        return int(sum(sample.value for sample in await self.operator.metrics("ppojob_jobs")))


def _p50_p99(values: list[float]) -> str:
    return f"{percentile(values, 0.5):.2f} s / {percentile(values, 0.99):.2f} s"


def _cores(used: Usage) -> str:
    """Return how many cores each process kept busy, and for how long."""
    shares = ", ".join(f"{name} {used.cores(name):.2f}" for name in used.processor)
    return f"{used.seconds:.0f} s, cores: {shares}"


async def kuberay_alone(namespace: str, arguments: argparse.Namespace) -> float:
    """Measure KubeRay without the operator, in a separate namespace."""
    async with connect() as connection:
        rate = await ready_per_second(connection, namespace, arguments.jobs, arguments.pods, arguments.limit)
    print(f"KubeRay alone: {rate:.2f} RayClusters ready per second", flush=True)
    return rate


async def run(layout: Layout, namespace: str, arguments: argparse.Namespace, alone_per_s: float) -> list[Row]:
    """Do all measurements in a namespace that is ready for them."""
    output: Path = arguments.output
    profile = output / "operator.prof" if arguments.profile else None
    operator = OperatorProcess(namespace, output / "operator.log", server_port(), server_port(), profile)
    async with connect() as connection, dashboards.serving():
        fleet = Fleet(connection, namespace, arguments.pods)
        limits = {"rest_s": arguments.rest, "limit_s": arguments.limit, "alone_per_s": alone_per_s}
        bench = Bench(connection, fleet, operator, layout, arguments.jobs, **limits)
        try:
            async with fleet.watched():
                await operator.start()
                await bench.run_all(is_burst_alone=arguments.burst_only)
        finally:
            await operator.stop()
    return bench.rows


def show(rows: list[Row], arguments: argparse.Namespace, console: Console) -> None:
    """Print the table."""
    cores = os.cpu_count()
    title = f"operator, {arguments.jobs} PPOJobs of {arguments.pods} pods; {cores} cores for all; dashboards: one stub"
    table = Table("", "target", "measured", "load", title=title)
    for row in rows:
        table.add_row(row.what, row.target, row.measured, f"{row.load:.1f}")
    console.print(table)


def main() -> None:
    """Measure, print, and write `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=3, help="pods of a job, its head included (at least 3)")
    parser.add_argument("--rest", type=float, default=30.0, help="seconds of each measurement at a steady rate")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which no longer is waited for jobs")
    parser.add_argument("--burst-only", action="store_true", help="stop when all jobs run: KubeRay alone and beside us")
    parser.add_argument("--profile", action="store_true", help="run the operator under cProfile (it is slower)")
    arguments = parser.parse_args()
    layout = Layout.from_environment()
    if not is_healthy(layout):
        parser.error("the one-node cluster is not running; start it with: make cluster-up")
    os.environ["KUBECONFIG"] = str(layout.kubeconfig)
    os.environ["PATH"] = f"{layout.bin}{os.pathsep}{os.environ['PATH']}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    num_pods = arguments.jobs * arguments.pods
    with place(layout, num_pods) as namespace:
        alone_per_s = asyncio.run(kuberay_alone(namespace, arguments))
    with place(layout, num_pods) as namespace:
        rows = asyncio.run(run(layout, namespace, arguments, alone_per_s))
    show(rows, arguments, Console(width=150))
    (arguments.output / "results.json").write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
