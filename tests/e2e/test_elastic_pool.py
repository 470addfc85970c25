"""Pods of an elastic pool are lost, come back, and get more or fewer by a change of the bounds, while a job trains.

both engines generate ── a pod is deleted by force: KubeRay replaces it, and an engine joins ── maxNodes: 1: one pod
remains ── maxNodes: 2: an engine joins. Trainer, vLLM, operator and KubeRay are real.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ppojob_trainer.telemetry.records import read_metrics
from tests.e2e.conftest import Site
from tests.e2e.faults import pods
from tests.e2e.small_jobs import await_step, records
from tools.cluster.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

NAME = "elastic"
SPOT = "ppojob.dev/pool=spot"
LIMIT_SECONDS = 600.0
MANY_STEPS = 1000
"""More than it does before its end."""
_SMALL = {"cpu": "250m", "shm": "512Mi"}
CHANGES: dict[str, Any] = {
    "model": {"critic": None},
    "data": {"trainBatchSize": 4, "validation": None, "maxResponseLength": 64},
    "algorithm": {"advantageEstimator": "GRPO", "kl": {"inReward": False}},
    "actor": {"miniBatchSize": 4},
    "critic": None,
    "rollout": {"samplesPerPrompt": 4},
    "pools": [
        {"name": "actor", "gpusPerNode": 1, "resourcesPerGPU": {**_SMALL, "memory": "8704Mi"}},
        {
            "name": "spot",
            "gpusPerNode": 1,
            "resourcesPerGPU": {**_SMALL, "memory": "4608Mi"},
            "elastic": {"minNodes": 1, "maxNodes": 2},
        },
    ],
    "placement": {"actor": "actor", "rollout": ["spot"], "critic": None, "ref": None, "reward": ["actor"]},
    "checkpoint": {"everySteps": 0, "export": "Never"},
    "trainer": {"totalSteps": MANY_STEPS, "validateEverySteps": 0},
}


@dataclass
class Story:
    """What was seen, in this order."""

    cluster: str = ""
    """The RayCluster before."""
    ready: list[str] = field(default_factory=list)
    """Column READY of `kubectl get ppojobs`, each value that differs from the one before."""
    deleted: str = ""
    """The pod."""
    last: Any = None
    """The status at the end."""


@pytest.fixture(scope="module")
def story(site: Site) -> Iterator[Story]:
    """The job is deleted afterwards."""
    site.apply(NAME, CHANGES)
    try:
        found = Story()
        await_engines(site, found, 2)
        found.cluster = site.job(NAME)["status"]["rayCluster"]["name"]
        found.deleted = pods(site, NAME, SPOT)[-1]
        site.kubectl("delete", "pod", found.deleted, "--force", "--grace-period=0")
        await_engines(site, found, 1)
        await_engines(site, found, 2)
        for nodes in (1, 2):
            resize(site, nodes)
            await_engines(site, found, nodes)
        await_step(site, NAME, max(records(site, NAME)) + 1)
        found.last = site.job(NAME)["status"]
        yield found
    finally:
        # It still trains, so its pods stay until it has stopped gracefully; they need the storage.
        site.delete(NAME)


def await_engines(site: Site, story: Story, number: int) -> None:
    """Wait until a step was done with so many engines; note column READY meanwhile."""
    since = max(records(site, NAME), default=0)

    def missing() -> str:
        status = site.job(NAME).get("status", {})
        # Column READY of `kubectl get ppojobs`.
        ready = status.get("ready", "")
        if story.ready[-1:] != [ready]:
            story.ready.append(ready)
        steps = read_metrics(site.root(NAME) / "metrics.jsonl")
        seen = {int(each["step"] or 0): each.get("rollout/engines") for each in steps}
        if any(step > since and engines == number for step, engines in seen.items()):
            return ""
        assert status.get("phase") not in ("Failed", "Succeeded"), status
        return f"engines of the last steps: {list(seen.values())[-5:]}, READY {ready}"

    wait_until(f"a step with {number} engines", missing, limit=LIMIT_SECONDS, interval=0.5)


def resize(site: Site, nodes: int) -> None:
    change = [{"op": "replace", "path": "/spec/pools/1/elastic/maxNodes", "value": nodes}]
    site.kubectl("patch", "ppojob", NAME, "--type=json", f"--patch={json.dumps(change)}")


def test_no_attempt_ended(story: Story) -> None:
    assert story.last["rayCluster"]["name"] == story.cluster
    assert story.last.get("attempt", 0) == 0
    assert story.last["retries"]["total"] == 0
    assert "lastFailure" not in story.last


def test_the_column_ready_follows_the_pods_and_the_bounds(story: Story) -> None:
    """One of the actor's, and those of the elastic pool."""
    after = story.ready[story.ready.index("3/3") :]
    assert "2/3" in after
    assert "2/2" in after
    assert after[-1] == "3/3"


def test_every_step_was_done_once(site: Site, story: Story) -> None:
    lines = (site.root(NAME) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [*range(1, len(steps) + 1)]


def test_the_losses_are_counted(site: Site, story: Story) -> None:
    """One for the pod that was deleted, and one for the smaller pool."""
    last = json.loads((site.root(NAME) / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/elastic_losses"] >= 1


def test_events_and_status_say_what_happened(site: Site, story: Story) -> None:
    events = site.get("events", f"--field-selector=involvedObject.name={NAME}")["items"]
    assert sum(event["reason"] == "PoolResized" for event in events) == 2
    [spot] = [pool for pool in story.last["pools"] if pool["name"] == "spot"]
    assert spot["engines"] == 2
    assert story.deleted not in pods(site, NAME, SPOT)
