"""A small version of the first example: few tokens in a step, one or two ranks; and waiting for its steps."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ppojob_trainer.telemetry.records import read_metrics
from tests.e2e.conftest import Site
from tools.cluster.waiting import wait_until

FEW_SAMPLES: dict[str, Any] = {
    "data": {"trainBatchSize": 8, "validation": {"reasoningGym": {"size": 8}}},
    "actor": {"miniBatchSize": 4},
    "critic": {"miniBatchSize": 4},
}
_SMALL = {"cpu": "250m", "shm": "512Mi"}
_STEP_LIMIT_SECONDS = 600.0
_RESUMED = re.compile(r"resuming after step (\d+)")


def small_pools(actor_ranks: int = 1, *, critic_nodes: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Return the pools of actor and critic, with `fields` in both. The actor's pool has the engines, too.

    Two pods of the critic have no room for a reference.

    Args:
        actor_ranks: of the actor, in one pod.
        critic_nodes: pods of the critic, with one rank each.
    """
    # Each of two ranks has half of the optimizer.
    actor = {**_SMALL, "memory": "9Gi" if actor_ranks == 1 else "6Gi"}
    critic = {**_SMALL, "memory": "7Gi" if critic_nodes == 1 else "5Gi"}
    return [
        {"name": "actor", "gpusPerNode": actor_ranks, "resourcesPerGPU": actor, **fields},
        {"name": "critic", "nodes": critic_nodes, "gpusPerNode": 1, "resourcesPerGPU": critic, **fields},
    ]


def records(site: Site, name: str) -> dict[int, float]:
    """Return for each step when it was last finished, in seconds since 1970."""
    found = read_metrics(site.root(name) / "metrics.jsonl")
    return {int(record["step"] or 0): record["time"] or 0.0 for record in found}


def await_step(site: Site, name: str, step: int, *, since: float = 0.0) -> float:
    """Wait until the step was finished after `since`, and return when. Fail at once if the job ends before."""

    def missing() -> str:
        if records(site, name).get(step, 0.0) > since:
            return ""
        status = site.job(name).get("status", {})
        assert status.get("phase") not in ("Failed", "Succeeded"), status
        return f"{name} is at step {max(records(site, name), default=0)}"

    wait_until(f"step {step} of {name}", missing, limit=_STEP_LIMIT_SECONDS, interval=0.5)
    return records(site, name)[step]


def await_resumption(site: Site, name: str, attempt: int) -> int:
    """Wait until the attempt's driver logs after which step it resumes, and return that step."""
    log = site.root(name) / "logs" / f"attempt-{attempt}" / "driver.log"
    found: list[str] = []

    def missing() -> str:
        found[:] = _RESUMED.findall(log.read_text(errors="replace")) if log.exists() else []
        return "" if found else "not logged yet"

    wait_until(f"the step after which {log} resumes", missing, limit=_STEP_LIMIT_SECONDS, interval=0.5)
    return int(found[0])


@dataclass(frozen=True)
class Stopwatch:
    """Prints the seconds from its start to later events."""

    event: str
    """What happened at its start."""
    limit: float
    """Longest wait, in seconds."""
    start: float = field(default_factory=time.time)
    """In seconds since 1970."""

    def say(self, words: str) -> None:
        """Print that this has happened now."""
        print(f"\n{time.time() - self.start:.0f} s after {self.event}: {words}", end="", flush=True)

    def until(self, words: str, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing any more, and print it."""
        wait_until(words, missing, limit=self.limit, interval=0.5)
        self.say(words)
