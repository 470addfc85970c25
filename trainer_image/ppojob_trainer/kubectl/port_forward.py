"""`kubectl ppo dashboard`: forwards Ray's dashboard or TensorBoard to this machine until Ctrl-C. Called by `app.py`."""

import typer

from ppojob_api.v1alpha1.constants import RAY_HEAD_PORTS
from ppojob_trainer.kubectl.client import Cluster, NotThereError, Raw
from ppojob_trainer.kubectl.run_folder import made, tensorboard_pod

_RAY_PORT = RAY_HEAD_PORTS["dashboard"]
_TENSORBOARD_PORT = 6006
_TOKEN = "its token: kubectl get secret {secret} -n {namespace} -o jsonpath='{{.data.auth_token}}' | base64 -d"


def dashboard(cluster: Cluster, job: Raw, port: int | None) -> int:
    """Forward Ray's dashboard; return kubectl's exit status.

    Args:
        port: of this machine; None: the dashboard's own.

    Raises:
        NotThereError: the job has no RayCluster, or it has no head yet.
    """
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    ray_cluster = job.get("status", {}).get("rayCluster", {}).get("name")
    if ray_cluster is None:
        raise NotThereError(f"{namespace}/{name} has no RayCluster: it has not started, or has ended")
    found = cluster.get("raycluster.ray.io", ray_cluster, f"--namespace={namespace}")
    service = found.get("status", {}).get("head", {}).get("serviceName")
    if service is None:
        raise NotThereError(f"{namespace}/{name} has no head pod yet: see kubectl ppo explain-pending {name}")
    here = port or _RAY_PORT
    typer.echo(f"http://127.0.0.1:{here}\n{_TOKEN.format(secret=f'{ray_cluster}-ray', namespace=namespace)}")
    return cluster.attach("port-forward", f"--namespace={namespace}", f"service/{service}", f"{here}:{_RAY_PORT}")


def tensorboard(cluster: Cluster, job: Raw, port: int | None) -> int:
    """Run TensorBoard in a pod that reads the job's storage, and forward it; return kubectl's exit status.

    Args:
        port: of this machine; None: TensorBoard's own.

    Raises:
        NotThereError: the job has not started, so it has written nothing.
    """
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    if not job.get("status", {}).get("startTime"):
        raise NotThereError(f"{namespace}/{name} has not started: there is nothing to show yet")
    here = port or _TENSORBOARD_PORT
    with made(cluster, tensorboard_pod(job, _TENSORBOARD_PORT)) as pod:
        typer.echo(f"http://127.0.0.1:{here}")
        return cluster.attach("port-forward", f"--namespace={namespace}", f"pod/{pod}", f"{here}:{_TENSORBOARD_PORT}")
