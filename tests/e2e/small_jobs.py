"""The first example made small, for jobs that are looked at while they run: few tokens a step, and one or two ranks."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.conftest import Site
from tools.cluster.waiting import wait_until

FEW_SAMPLES: dict[str, Any] = {
    "data": {"trainBatchSize": 8, "validation": {"reasoningGym": {"size": 8}}},
    "actor": {"miniBatchSize": 4},
    "critic": {"miniBatchSize": 4},
}
_SMALL = {"cpu": "250m", "memory": "6Gi", "shm": "512Mi"}
_STEP_LIMIT_SECONDS = 600.0
_RESUMED = re.compile(r"resuming after step (\d+)")


def small_pools(actor_ranks: int, **fields: Any) -> list[dict[str, Any]]:
    """The pools of actor and critic, with `fields` in both; the actor's share theirs with the rollout engine."""
    # With two ranks there is room for both in twice the small size.
    memory = _SMALL["memory"] if actor_ranks > 1 else "9Gi"
    return [
        {"name": "actor", "gpusPerNode": actor_ranks, "resourcesPerGPU": {**_SMALL, "memory": memory}, **fields},
        {"name": "critic", "gpusPerNode": 1, "resourcesPerGPU": {**_SMALL, "memory": "7Gi"}, **fields},
    ]


def records(site: Site, name: str) -> dict[int, float]:
    """Step -> when it was last finished, in seconds since 1970."""
    metrics = site.root(name) / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {record["step"]: record["time"] for record in map(json.loads, lines)}


def await_step(site: Site, name: str, step: int, *, since: float = 0.0) -> float:
    """Wait until the step was finished after `since`, and return when; a job that ends before fails at once."""

    def missing() -> str:
        if records(site, name).get(step, 0.0) > since:
            return ""
        status = site.job(name).get("status", {})
        assert status.get("phase") not in ("Failed", "Succeeded"), status
        return f"{name} is at step {max(records(site, name), default=0)}"

    wait_until(f"step {step} of {name}", missing, limit=_STEP_LIMIT_SECONDS, interval=0.5)
    return records(site, name)[step]


def await_resumption(site: Site, name: str, attempt: int) -> int:
    """Wait until the attempt's driver says after which step it goes on, and return that."""
    log = site.root(name) / "logs" / f"attempt-{attempt}" / "driver.log"
    found: list[str] = []

    def missing() -> str:
        found[:] = _RESUMED.findall(log.read_text(errors="replace")) if log.exists() else []
        return "" if found else "nothing there"

    wait_until(f"{log} to say where it goes on", missing, limit=_STEP_LIMIT_SECONDS, interval=0.5)
    return int(found[0])


@dataclass(frozen=True)
class Stopwatch:
    """Prints how long after its start something was so."""

    event: str
    """What happened at its start."""
    limit: float
    """Longest wait, in seconds."""
    start: float = field(default_factory=time.time)
    """In seconds since 1970."""

    def say(self, words: str) -> None:
        """Print that this is so now."""
        print(f"\n{time.time() - self.start:.0f} s after {self.event}: {words}", end="", flush=True)

    def until(self, words: str, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing any more, and say so."""
        wait_until(words, missing, limit=self.limit, interval=0.5)
        self.say(words)
