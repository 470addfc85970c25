"""A job's folder in its storage, read from outside: through the head pod, or through a pod made to read the claim.

`app.py` calls it for logs, metrics and TensorBoard. The reading pod has no rights, mounts the claim read-only, ends by
itself and is deleted after the command; it needs the user's right to create pods.
"""

import json
import shlex
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.resolve import job_root
from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.kubectl.client import Cluster, KubectlError, NotThereError, Raw
from ppojob_trainer.telemetry.run_files import RunFiles

_READER_SECONDS = 900
_TENSORBOARD_SECONDS = 8 * 3600
_READY_SECONDS = 90
_STORAGE = "storage"
_READER = "reader"
_NO_FILE = 44
"""A distinct exit status for a missing file, to distinguish it from an exec that failed."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one job, and a pod that sees it."""

    cluster: Cluster
    namespace: str
    pod: str
    container: str
    files: RunFiles

    def read(self, path: Path) -> bytes:
        """Return a file.

        Raises:
            NotThereError: it is not there.
            KubectlError: it cannot be read.
        """
        quoted = shlex.quote(str(path))
        try:
            return self.cluster.output(*self._exec(f"test -e {quoted} || exit {_NO_FILE}; cat {quoted}"))
        except KubectlError as error:
            if f"exit code {_NO_FILE}" in str(error):
                raise NotThereError(f"{path} is not there: the run has not written it yet") from error
            raise

    def tail(self, pattern: str, *, lines: int, follow: bool) -> int:
        """Print the ends of the files that a pattern names; return the exit status.

        Args:
            pattern: shell pattern of files; no part of it may come from others than the user.
            lines: of each file.
            follow: continue until interrupted.
        """
        missing = f"echo 'no log {pattern}: the attempt has not written it (yet)' >&2; exit {_NO_FILE}"
        command = f"ls {pattern} >/dev/null 2>&1 || {{ {missing}; }}; exec tail -n {lines} {'-F ' * follow}{pattern}"
        return self.cluster.attach(*self._exec(command))

    def _exec(self, command: str) -> tuple[str, ...]:
        return (
            "exec",
            f"--namespace={self.namespace}",
            self.pod,
            f"--container={self.container}",
            "--",
            "sh",
            "-c",
            command,
        )


@contextmanager
def open_folder(cluster: Cluster, job: Raw) -> Iterator[RunFolder]:
    """Find a pod that mounts the job's folder, or create a temporary one.

    Raises:
        NotThereError: the job has not started.
        KubectlError: no pod could be created.
    """
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    if not job.get("status", {}).get("startTime"):
        raise NotThereError(f"{namespace}/{name} has not begun: see kubectl ppo explain-pending {name}")
    files = files_of(job)
    head = running_head(cluster, job)
    if head is not None:
        # KubeRay keeps Ray's own container first, whatever else the pod has.
        yield RunFolder(cluster, namespace, head["metadata"]["name"], head["spec"]["containers"][0]["name"], files)
        return
    with made(cluster, reader_pod(job)) as pod:
        yield RunFolder(cluster, namespace, pod, _READER, files)


def files_of(job: Raw) -> RunFiles:
    """Return where a job's files lie, as its pods see them."""
    metadata, spec = job["metadata"], job["spec"]
    mount, resume = (
        spec["storage"].get("mountPath", "/data"),
        ResumePolicy(spec.get("checkpoint", {}).get("resume", "Auto")),
    )
    root = job_root(mount, metadata["namespace"], metadata["name"], metadata["uid"], resume)
    return RunFiles(Path(PurePosixPath(root)))


@contextmanager
def made(cluster: Cluster, reader: Raw) -> Iterator[str]:
    """Make a reading pod, yield its name when it is ready, and delete it afterwards.

    Raises:
        KubectlError: it could not be made, or was not ready in time.
    """
    pod, namespace = reader["metadata"]["name"], reader["metadata"]["namespace"]
    try:
        cluster.output("create", f"--namespace={namespace}", "--filename=-", stdin=json.dumps(reader))
        wait = ("wait", f"--namespace={namespace}", "--for=condition=Ready", f"pod/{pod}")
        cluster.output(*wait, f"--timeout={_READY_SECONDS}s")
        yield pod
    finally:
        delete = ("delete", "pod", pod, f"--namespace={namespace}", "--ignore-not-found", "--wait=false")
        cluster.output(*delete, "--grace-period=1")


def running_head(cluster: Cluster, job: Raw) -> Raw | None:
    """Return the job's head pod that runs, or None."""
    selector = f"--selector={constants.LABEL_JOB}={job['metadata']['name']},ray.io/node-type=head"
    pods = cluster.get("pods", f"--namespace={job['metadata']['namespace']}", selector)["items"]
    running = [
        pod
        for pod in pods
        if pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    return max(running, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), default=None)


def tensorboard_pod(job: Raw, port: int) -> Raw:
    """Return a reading pod that serves TensorBoard to itself alone: only a port that is forwarded leads there."""
    pod = reader_pod(job)
    serve = ["tensorboard", f"--logdir={files_of(job).tensorboard}", "--host=127.0.0.1", f"--port={port}"]
    answers = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    pod["spec"]["activeDeadlineSeconds"] = _TENSORBOARD_SECONDS
    pod["spec"]["containers"][0] |= {
        "command": serve,
        "readinessProbe": {"exec": {"command": ["python", "-c", answers]}, "periodSeconds": 2, "timeoutSeconds": 5},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
    }
    return pod


def reader_pod(job: Raw) -> Raw:
    """Return a pod of the job's image that only sees its storage, for a while."""
    metadata, spec = job["metadata"], job["spec"]
    mount = spec["storage"].get("mountPath", "/data")
    claim = {"claimName": spec["storage"]["claimName"], "readOnly": True}
    container = {
        "name": _READER,
        "image": spec["image"],
        "command": ["sleep", str(_READER_SECONDS)],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": _STORAGE, "mountPath": mount, "readOnly": True}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-reader-{uuid.uuid4().hex[:5]}",
            "namespace": metadata["namespace"],
            "labels": {constants.LABEL_MANAGED_BY: "kubectl-ppo"},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _READER_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "imagePullSecrets": spec.get("imagePullSecrets", []),
            "containers": [container],
            "volumes": [{"name": _STORAGE, "persistentVolumeClaim": claim}],
        },
    }
