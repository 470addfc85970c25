"""The scheduler takes a worker's pod for one of higher priority: the hook delays this until the checkpoint is saved.

The job waits until there is room again, resumes from that checkpoint and does no step twice. How long each part took is
printed (`--capture=no` shows it) and never asserted.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ppojob_api.v1alpha1.quantities import parse_quantity
from tests.e2e.conftest import Site
from tests.e2e.small_jobs import FEW_SAMPLES, Stopwatch, await_resumption, await_step, records, small_pools
from tools.cluster.images.pause import ensure_pause_image

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

NAME = "preempted"
URGENT = "urgent"
STEPS = 8
EVERY_STEPS = 2
LIMIT_SECONDS = 600.0
MARGIN_BYTES = 256 * 2**20
"""How much less than a worker's pod leaves behind is asked for."""
CHANGES: dict[str, Any] = {
    **FEW_SAMPLES,
    "pools": small_pools(),
    "trainer": {"totalSteps": STEPS, "validateEverySteps": 0},
    "checkpoint": {"everySteps": EVERY_STEPS, "export": "Never"},
}


@dataclass
class Story:
    """What was seen, in this order."""

    cluster: str = ""
    """The RayCluster before."""
    victims: dict[str, Any] = field(default_factory=dict)
    """Pods of the job that the scheduler took, by name, as they were last."""
    last_step: int = 0
    """Finished when the victim was gone."""
    waiting: Any = None
    """The status while there was no room."""
    resumed_after: int = 0
    """Step of the checkpoint that the next attempt began with."""
    resumed: Any = None
    """The status when it trained again."""


@pytest.fixture(scope="module")
def story(site: Site) -> Iterator[Story]:
    """The job runs to its end afterwards."""
    priority = f"{site.namespace}-{URGENT}"
    try:
        site.kubectl("create", "priorityclass", priority, "--value=1000")
        site.apply(NAME, CHANGES)
        # The first checkpoint is saved and a step after it is done, so that there is something to lose.
        await_step(site, NAME, EVERY_STEPS + 1)
        found = Story(cluster=site.job(NAME)["status"]["rayCluster"]["name"])
        preempt(site, found, priority)
        resume(site, found)
        site.await_condition(NAME, "Complete", "True", limit=LIMIT_SECONDS)
        yield found
    finally:
        site.kubectl("delete", "pod", URGENT, "--ignore-not-found", "--timeout=50s")
        site.kubectl("delete", "ppojob", NAME, "--ignore-not-found", "--timeout=120s", limit=150)
        site.kubectl("delete", "priorityclass", priority, "--ignore-not-found")


def preempt(site: Site, story: Story, priority: str) -> None:
    """Make the pod of higher priority, and wait until it runs and the job waits for room."""
    apply_urgent_pod(site, priority)
    watch = Stopwatch("the urgent pod was made", LIMIT_SECONDS)

    def taken() -> str:
        pods = site.get("pods", f"--selector=ppojob.dev/job={NAME}")["items"]
        story.victims |= {pod["metadata"]["name"]: pod for pod in pods if disruption(pod)}
        return "" if story.victims else "a pod with DisruptionTarget"

    def running() -> str:
        taken()
        phase = site.get("pod", URGENT)["status"]["phase"]
        return "" if phase == "Running" else f"it is {phase}"

    def failed() -> str:
        return "" if site.job(NAME)["status"].get("lastFailure") else "lastFailure"

    watch.until("a pod of the job is taken", taken)
    watch.until("the urgent pod runs", running)
    story.last_step = max(records(site, NAME))
    watch.until("the failure is in the status", failed)
    site.await_condition(NAME, "PoolsReady", "False", reason="Unschedulable", limit=LIMIT_SECONDS)
    story.waiting = site.job(NAME)["status"]


def resume(site: Site, story: Story) -> None:
    """Take the pod of higher priority away, and wait until the job trains again."""
    site.kubectl("delete", "pod", URGENT)
    watch = Stopwatch("the urgent pod was deleted", LIMIT_SECONDS)
    story.resumed_after = await_resumption(site, NAME, 1)
    await_step(site, NAME, story.resumed_after + 1, since=watch.start)
    watch.say("a step is done")
    story.resumed = site.job(NAME)["status"]


def apply_urgent_pod(site: Site, priority: str) -> None:
    """It fits where one worker's pod is gone: with the head's room alone it would not."""
    workers = site.get("pods", f"--selector=ppojob.dev/job={NAME},ppojob.dev/pool")["items"]
    memory = free_memory(site) + min(map(requested_memory, workers)) - MARGIN_BYTES
    container = {
        "name": "pause",
        "image": ensure_pause_image(site.cluster.layout),
        "resources": {"requests": {"memory": str(memory)}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": URGENT},
        "spec": {"priorityClassName": priority, "terminationGracePeriodSeconds": 1, "containers": [container]},
    }
    site.kubectl("apply", "--filename=-", stdin=json.dumps(pod))


def free_memory(site: Site) -> int:
    """Bytes that no pod on the cluster's only node has asked for."""
    [node] = [each for each in site.get("nodes")["items"] if "taints" not in each["spec"]]
    where = f"spec.nodeName={node['metadata']['name']},status.phase!=Succeeded,status.phase!=Failed"
    pods = site.get("pods", "--all-namespaces", f"--field-selector={where}")["items"]
    return int(parse_quantity(node["status"]["allocatable"]["memory"])) - sum(map(requested_memory, pods))


def requested_memory(pod: Any) -> int:
    requests = (container["resources"].get("requests", {}) for container in pod["spec"]["containers"])
    return sum(int(parse_quantity(each.get("memory", "0"))) for each in requests)


def disruption(pod: Any) -> str:
    """The reason in a pod's condition DisruptionTarget; "" where it has none."""
    conditions = {each["type"]: each for each in pod["status"].get("conditions", [])}
    return str(conditions.get("DisruptionTarget", {}).get("reason", ""))


def test_the_scheduler_took_one_worker_and_no_more(story: Story) -> None:
    [victim] = story.victims.values()

    assert disruption(victim) == "PreemptionByScheduler"
    assert victim["metadata"]["labels"]["ppojob.dev/pool"] in ("actor", "critic")


def test_the_preemption_is_named_and_is_not_the_users(story: Story) -> None:
    [victim], failure = story.victims, story.waiting["lastFailure"]

    assert (failure["reason"], failure["attempt"]) == ("Preempted", 0)
    assert f"pod {victim}: PreemptionByScheduler" in failure["message"]
    retries = {
        name: story.resumed["retries"][name] for name in ("user", "infrastructure", "ignored", "counted", "total")
    }
    assert retries == {"user": 0, "infrastructure": 0, "ignored": 1, "counted": 0, "total": 1}


def test_the_hook_held_the_pod_until_the_checkpoint_was_down(story: Story) -> None:
    assert f"stopped gracefully after step {story.last_step}" in story.waiting["lastFailure"]["message"]
    assert story.resumed_after == story.last_step


def test_the_job_waited_in_its_raycluster_for_room(story: Story) -> None:
    assert story.waiting["rayCluster"]["name"] == story.cluster
    assert story.resumed["rayCluster"]["name"] == story.cluster
    assert story.resumed["attempt"] == 1


def test_every_step_was_done_once(site: Site, story: Story) -> None:
    lines = (site.root(NAME) / "metrics.jsonl").read_text().splitlines()

    assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert site.job(NAME)["status"]["retries"]["total"] == story.resumed["retries"]["total"]
