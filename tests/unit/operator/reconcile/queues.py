"""Jobs in Kueue's hands, and what Kueue does with them, for the tests of its admission."""

from dataclasses import replace
from typing import Any

from ppojob_operator.plan import Workload
from tests.unit.operator.reconcile.worlds import World

NO_RETRIES = (0, 0, 0)
NO_ROOM = "couldn't assign flavors to pod set actor: insufficient unused quota for nvidia.com/gpu, 2 more needed"
PREEMPTED = "Preempted to accommodate a workload (UID: 1, JobUID: 2) due to prioritization in the ClusterQueue"


class Queue:
    """A job in the queue `gpus`, and what Kueue does with it."""

    def __init__(self, **policy: Any) -> None:
        self.world = World(runPolicy=self.policy(**policy)).settle()

    @staticmethod
    def policy(**policy: Any) -> dict[str, Any]:
        """Return the job's `runPolicy`."""
        return {"queueName": "gpus", **policy}

    def says(self, waits_for: str = "", eviction: str = "") -> "Queue":
        """Let Kueue say something of the RayCluster."""
        cluster = self.world.observed.clusters[0]
        self.world.see(workloads=(Workload(cluster.uid, waits_for, eviction),))
        return self

    def lets_in(self) -> "Queue":
        """Let Kueue give the RayCluster its quota."""
        self._suspend(False)
        return self.says()

    def runs(self) -> "Queue":
        """Bring the job to a trainer that reports."""
        self.lets_in().world.run()
        return self

    def evicts(self) -> "Queue":
        """Let Kueue take the quota away: KubeRay deletes the pods, and their hooks hold them."""
        self._suspend(True)
        pods = tuple(replace(pod, is_deleting=True) for pod in self.world.observed.pods)
        self.world.see(pods=pods)
        return self.says(eviction=PREEMPTED)

    def pods_are_gone(self) -> "Queue":
        """Let the hooks end."""
        self.world.see(pods=())
        return self

    def _suspend(self, requested: bool) -> None:
        clusters = tuple(replace(cluster, is_suspended=requested) for cluster in self.world.observed.clusters)
        self.world.see(clusters=clusters)

    def settle(self) -> World:
        """Look until nothing changes."""
        return self.world.settle()


class DefaultQueue(Queue):
    """A job without a queue where Kueue has a default one: its webhook changes the RayCluster as it is created."""

    def __init__(self, **policy: Any) -> None:
        self.world = World(runPolicy=policy)
        self.world.default_queue = "default"
        self.world.settle()


class NoQueue(Queue):
    """A job without a queue where Kueue has `manageJobsWithoutQueueName`."""

    def __init__(self, **policy: Any) -> None:
        self.world = World(runPolicy=policy)
        self.world.default_queue = ""
        self.world.settle()
