"""A real Kueue takes a job's quota for a workload of higher priority: the pods stay until the checkpoint is saved.

The job waits in its queue, is admitted again and resumes from that checkpoint. How long each part took is printed
(`--capture=no` shows it) and never asserted.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.small_jobs import FEW_SAMPLES, Stopwatch, await_resumption, await_step, records, small_pools
from tools.cluster import kueue

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

NAME = "queued"
URGENT = "urgent"
QUEUE = "gpus"
STEPS = 8
EVERY_STEPS = 2
LIMIT_SECONDS = 600.0
KUEUE_API = "kueue.x-k8s.io/v1beta1"
QUOTAS = {"cpu": "2", "memory": "20Gi"}
"""The job and the urgent workload do not both fit."""
CHANGES: dict[str, Any] = {
    **FEW_SAMPLES,
    "pools": small_pools(),
    "trainer": {"totalSteps": STEPS, "validateEverySteps": 0},
    "checkpoint": {"everySteps": EVERY_STEPS, "export": "Never"},
    "runPolicy": {"queueName": QUEUE},
}


@dataclass
class Story:
    """What was seen, in this order."""

    cluster: str = ""
    """The RayCluster before."""
    evicted: Any = None
    """The status while the pods were held."""
    last_step: int = 0
    """Finished when the urgent workload was let in."""
    left: tuple[str, ...] = ()
    """The job's pods that were there then."""
    queued: Any = None
    """The status while the job waited in its queue."""
    resumed_after: int = 0
    """Step of the checkpoint that the next attempt began with."""
    resumed: Any = None
    """The status when it trained again."""


@pytest.fixture(scope="module")
def queue(site: Site) -> Iterator[None]:
    """The queue, with room for one job, and Kueue for as long as these tests run."""
    name, layout = site.namespace, site.cluster.layout
    flavor = {"name": name, "resources": [{"name": each, "nominalQuota": quota} for each, quota in QUOTAS.items()]}
    cluster_queue = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": [*QUOTAS], "flavors": [flavor]}],
    }
    with kueue.installed(layout):
        apply(site, "ResourceFlavor", name, {})
        apply(site, "ClusterQueue", name, cluster_queue)
        apply(site, "LocalQueue", QUEUE, {"clusterQueue": name})
        yield
        # Its Workload has a finalizer, which needs Kueue.
        site.kubectl("delete", "ppojob", NAME, "--ignore-not-found", "--timeout=120s", limit=150)


def apply(site: Site, kind: str, name: str, spec: dict[str, Any]) -> None:
    manifest = {"apiVersion": KUEUE_API, "kind": kind, "metadata": {"name": name}, "spec": spec}
    site.kubectl("apply", "--filename=-", stdin=json.dumps(manifest))


@pytest.fixture(scope="module")
def story(site: Site, queue: None) -> Story:
    """The job runs to its end afterwards."""
    site.apply(NAME, CHANGES)
    # The first checkpoint is saved and a step after it is done, so that there is something to lose.
    await_step(site, NAME, EVERY_STEPS + 1)
    found = Story(cluster=site.job(NAME)["status"]["rayCluster"]["name"])
    evict(site, found)
    resume(site, found)
    site.await_condition(NAME, "Complete", "True", limit=LIMIT_SECONDS)
    return found


def evict(site: Site, story: Story) -> None:
    """Make the workload of higher priority, and wait until it is let in and the job waits in its queue."""
    apply_urgent_workload(site)
    watch = Stopwatch("the urgent workload was made", LIMIT_SECONDS)

    def evicted() -> str:
        going = [pod for pod in pods(site) if "deletionTimestamp" in pod["metadata"]]
        story.evicted = site.job(NAME)["status"]
        return "" if going and story.evicted["phase"] == "Suspending" else "pods that leave"

    def admitted() -> str:
        conditions = site.get("workload", URGENT).get("status", {}).get("conditions", [])
        return "" if any((each["type"], each["status"]) == ("Admitted", "True") for each in conditions) else "Admitted"

    watch.until("the job's pods leave", evicted)
    watch.until("the checkpoint is down and the urgent workload is let in", admitted)
    story.left = tuple(pod["metadata"]["name"] for pod in pods(site))
    story.last_step = max(records(site, NAME))
    site.await_condition(NAME, "Admitted", "False", reason="Queued", limit=LIMIT_SECONDS)
    watch.say("the job waits in its queue")
    story.queued = site.job(NAME)["status"]


def resume(site: Site, story: Story) -> None:
    """Take the workload of higher priority away, and wait until the job trains again."""
    site.kubectl("delete", "workload", URGENT)
    watch = Stopwatch("the urgent workload was deleted", LIMIT_SECONDS)
    site.await_condition(NAME, "Admitted", "True", reason="Admitted", limit=LIMIT_SECONDS)
    watch.say("the job is let in")
    story.resumed_after = await_resumption(site, NAME, 1)
    await_step(site, NAME, story.resumed_after + 1, since=watch.start)
    watch.say("a step is done")
    story.resumed = site.job(NAME)["status"]


def pods(site: Site) -> list[Any]:
    found: list[Any] = site.get("pods", f"--selector=ppojob.dev/job={NAME}")["items"]
    return found


def apply_urgent_workload(site: Site) -> None:
    """A workload of nobody: Kueue gives it quota, and no pod comes of it."""
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "100m", "memory": "10Gi"}}}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    podset = {"name": "main", "count": 1, "template": template}
    apply(site, "Workload", URGENT, {"queueName": QUEUE, "priority": 1000, "podSets": [podset]})


def condition(status: Any, kind: str) -> Any:
    return next(each for each in status["conditions"] if each["type"] == kind)


def test_the_pods_stay_while_the_trainer_stops(story: Story) -> None:
    admitted = condition(story.evicted, "Admitted")

    assert (admitted["status"], admitted["reason"]) == ("False", "Preempted")
    assert story.evicted["attempt"] == 0


def test_the_preempting_workload_waits_until_the_pods_are_deleted(story: Story) -> None:
    assert story.left == ()


def test_the_job_waits_in_its_queue_in_its_raycluster(story: Story) -> None:
    assert story.queued["phase"] == "Queued"
    assert "Preempted to accommodate a workload" in condition(story.queued, "Admitted")["message"]
    assert story.queued["rayCluster"]["name"] == story.resumed["rayCluster"]["name"] == story.cluster


def test_it_resumes_from_the_checkpoint_of_its_last_step(story: Story) -> None:
    assert story.resumed_after == story.last_step
    assert story.queued["stop"]["reason"] == "Preempted"
    assert story.queued["checkpoint"]["step"] == story.last_step


def test_it_was_no_retry_and_every_step_was_done_once(site: Site, story: Story) -> None:
    status = site.job(NAME)["status"]
    lines = (site.root(NAME) / "metrics.jsonl").read_text().splitlines()

    assert (status["attempt"], status["retries"]["total"]) == (1, 0)
    assert "lastFailure" not in status
    assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)]
