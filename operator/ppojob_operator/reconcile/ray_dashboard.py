"""Policy: which Ray dashboard has the current attempt? There is one once the RayCluster's head pod is ready."""

from dataclasses import dataclass

from ppojob_operator.manifests import naming
from ppojob_operator.plan import Job, Observed
from ppojob_operator.reconcile.completion import is_finished
from ppojob_operator.reconcile.layout import spec_in_force
from ppojob_operator.reconcile.reading import parse_time
from ppojob_operator.reconcile.situation import Situation


@dataclass(frozen=True)
class DashboardTarget:
    """The dashboard of a job's current attempt."""

    cluster: str
    """Name of the RayCluster."""
    service_url: str
    """Its address by the head's Service."""
    pod_url: str
    """Its address by the head pod's IP address."""


def dashboard_target(job: Job, observed: Observed) -> DashboardTarget | None:
    """Return the dashboard of the current attempt; None: the head is not ready, or the job has finished."""
    spec = spec_in_force(job)
    if spec is None or job.is_deleting or is_finished(job.status):
        return None
    situation = Situation(job, spec, observed, parse_time(None))
    cluster, head = situation.cluster, situation.head
    if cluster is None or head is None or not head.is_ready or not cluster.head_service:
        return None
    return DashboardTarget(
        cluster=cluster.name,
        service_url=naming.dashboard_url(cluster.head_service, job.key.namespace),
        pod_url=f"http://{head.address}:{naming.DASHBOARD_PORT}",
    )
