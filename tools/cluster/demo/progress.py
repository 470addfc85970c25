"""What the demo shows of a PPOJob: read from its status and Events. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

TERMINAL_CONDITIONS = ("Complete", "Failed")


@dataclass(frozen=True)
class Progress:
    """One observation of the job, as text."""

    phase: str
    step: int
    total_steps: int
    eta_seconds: int | None
    reward: str
    pools: str
    event: str
    finished: str = ""

    def line(self) -> str:
        """One line for a log."""
        eta = f"{self.eta_seconds} s left" if self.eta_seconds is not None else "time left unknown"
        parts = [f"{self.phase:11}", f"step {self.step}/{self.total_steps}", eta, f"reward {self.reward}", self.pools]
        return "  ".join([*parts, self.event])

    def table(self, seconds: float) -> Table:
        """A table for a terminal; `seconds` since the job was applied."""
        table = Table("phase", "step", "progress", "time left", "reward", "ready", "last event", "seconds")
        share = f"{100 * self.step // self.total_steps} %" if self.total_steps else ""
        eta = f"{self.eta_seconds} s" if self.eta_seconds is not None else ""
        step = f"{self.step}/{self.total_steps}"
        table.add_row(self.phase, step, share, eta, self.reward, self.pools, self.event, f"{seconds:.0f}")
        return table


def read(job: dict[str, Any], events: list[dict[str, Any]]) -> Progress:
    """The job's progress; `events` are the job's own, in any order."""
    status = job.get("status", {})
    progress = status.get("progress", {})
    true = [item["type"] for item in status.get("conditions", []) if item["status"] == "True"]
    pools = [
        f"{pool['name']} {pool.get('readyNodes', 0)}/{pool.get('desiredNodes', '?')}"
        for pool in status.get("pools", [])
    ]
    return Progress(
        phase=status.get("phase", "Pending"),
        step=progress.get("step", 0),
        total_steps=progress.get("totalSteps", job["spec"].get("trainer", {}).get("totalSteps", 0)),
        eta_seconds=progress.get("etaSeconds"),
        reward=progress.get("reward", "-"),
        pools=", ".join(pools) or "no pools yet",
        event=_last(events),
        finished=next((name for name in TERMINAL_CONDITIONS if name in true), ""),
    )


def pools_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The pools in the job's status; none before the operator has looked at it."""
    return list(job.get("status", {}).get("pools", []))


def failure(job: dict[str, Any]) -> str:
    """Why the job failed: its condition and the trainer's last words."""
    status = job.get("status", {})
    conditions = [item for item in status.get("conditions", []) if item["type"] == "Failed"]
    said = [f"{item.get('reason', '')}: {item.get('message', '')}" for item in conditions]
    last = status.get("lastFailure", {})
    return "\n".join([*said, last.get("message", ""), last.get("logTail", "")]).strip()


def _last(events: list[dict[str, Any]]) -> str:
    if not events:
        return "no event yet"
    newest = max(events, key=_time)
    return f"{newest.get('reason', '')}: {newest.get('message') or newest.get('note') or ''}"


def _time(event: dict[str, Any]) -> str:
    series = event.get("series") or {}
    created = event.get("metadata", {}).get("creationTimestamp")
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"), created)
    return max((str(time) for time in times if time), default="")
