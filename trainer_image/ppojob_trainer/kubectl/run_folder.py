"""A job's folder in its storage, read from outside: through the head pod, or through a pod made to read the claim.

`app.py` calls it for logs, metrics and TensorBoard, `model_files.py` for an exported model. The reading pod has no
rights, mounts the claim read-only, ends by itself and is deleted after the command. It needs the user's right to create
pods.
"""

import json
import re
import shlex
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.resolve import job_root
from ppojob_api.v1alpha1.templates import completed_spec
from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.kubectl.client import Cluster, KubectlError, NotThereError, Raw
from ppojob_trainer.telemetry.run_files import RunFiles

READER_SECONDS = 900
LONG_READER_SECONDS = 8 * 3600
_READY_SECONDS = 90
_PROCESS = re.compile(r"[a-z][-a-z0-9_]{0,62}")
_STORAGE = "storage"
_READER = "reader"
_NO_FILE = 44
"""A distinct exit status for a missing file, to distinguish it from an exec that failed."""


# Not a pipe of tee and sha256sum: a container's user may not open its own output by name.
_COPY_PART = """
import hashlib, sys
path, start, left, digest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), hashlib.sha256()
with open(path, "rb") as file:
    file.seek(start)
    while piece := file.read(min(left, 1 << 20)):
        sys.stdout.buffer.write(piece)
        digest.update(piece)
        left -= len(piece)
sys.stdout.flush()
print(digest.hexdigest(), file=sys.stderr)
"""
"""A program of the pod: a part of a file goes to stdout, and its SHA-256 to stderr."""


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
                raise NotThereError(f"{path} does not exist: the run has not written it yet") from error
            raise

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the sizes in bytes of all files below a folder, by their names below it.

        Raises:
            NotThereError: there is no such folder.
            KubectlError: it cannot be read.
        """
        quoted = shlex.quote(str(folder))
        found = f"cd {quoted} 2>/dev/null || exit {_NO_FILE}; find . -type f -printf '%s %P\\n'"
        try:
            lines = self.cluster.output(*self._exec(found)).decode().splitlines()
        except KubectlError as error:
            if f"exit code {_NO_FILE}" in str(error):
                raise NotThereError(f"{folder} does not exist") from error
            raise
        return {name: int(size) for size, _, name in (line.partition(" ") for line in lines)}

    def copy(self, path: Path, start: int, length: int, into: Callable[[bytes], object]) -> str:
        """Pass a part of a file on to `into`; return what the pod says on stderr, its SHA-256 of the part included.

        Raises:
            KubectlError: it cannot be read, or the connection was cut.
        """
        command = shlex.join(["exec", "python", "-c", _COPY_PART, str(path), str(start), str(length)])
        return self.cluster.stream(*self._exec(command), into=into).decode(errors="replace")

    def log_pattern(self, role: str, rank: int | None, attempt: int) -> str:
        """Return the shell pattern of the logs of a role's processes.

        Raises:
            ValueError: the role is not a word that a log could be named after.
        """
        # It becomes part of a shell's command.
        if not _PROCESS.fullmatch(role):
            raise ValueError(
                f"--role {role!r} is not a role: use driver, actor, rollout, ref, critic, reward, or your own"
            )
        which = role if role == "driver" else f"{role}-{'*' if rank is None else rank}"
        return str(self.files.log_of(which, attempt=attempt))

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
def open_folder(cluster: Cluster, job: Raw, seconds: int = READER_SECONDS) -> Iterator[RunFolder]:
    """Find a pod that mounts the job's folder, or create one that exists for at most `seconds`.

    Raises:
        NotThereError: the job has not started.
        KubectlError: no pod could be created.
    """
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    if not job.get("status", {}).get("startTime"):
        raise NotThereError(f"{namespace}/{name} has not started: see kubectl ppo explain-pending {name}")
    files = files_of(job)
    head = running_head(cluster, job)
    if head is not None:
        # KubeRay keeps Ray's own container first, whatever else the pod has.
        yield RunFolder(cluster, namespace, head["metadata"]["name"], head["spec"]["containers"][0]["name"], files)
        return
    with made(cluster, reader_pod(job, seconds)) as pod:
        yield RunFolder(cluster, namespace, pod, _READER, files)


def files_of(job: Raw) -> RunFiles:
    """Return where a job's files lie, as its pods see them."""
    metadata, spec = job["metadata"], _spec(job)
    mount, resume = (
        spec["storage"].get("mountPath", "/data"),
        ResumePolicy(spec.get("checkpoint", {}).get("resume", "Auto")),
    )
    root = job_root(mount, metadata["namespace"], metadata["name"], metadata["uid"], resume)
    return RunFiles(Path(PurePosixPath(root)))


def _spec(job: Raw) -> Mapping[str, Any]:
    """Return the spec of a job, completed with its template.

    Raises:
        KubectlError: the operator has not completed it yet.
    """
    spec = completed_spec(job)
    if "claimName" not in spec.get("storage", {}):
        name = job["metadata"]["name"]
        raise KubectlError(f"the template of {name} is not resolved yet: `kubectl describe ppojob {name}` says why")
    return spec


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
    pod = reader_pod(job, LONG_READER_SECONDS)
    serve = ["tensorboard", f"--logdir={files_of(job).tensorboard}", "--host=127.0.0.1", f"--port={port}"]
    answers = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    pod["spec"]["containers"][0] |= {
        "command": serve,
        "readinessProbe": {"exec": {"command": ["python", "-c", answers]}, "periodSeconds": 2, "timeoutSeconds": 5},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
    }
    return pod


def reader_pod(job: Raw, seconds: int) -> Raw:
    """Return a pod of the job's image that only sees its storage, for at most `seconds`."""
    metadata, spec = job["metadata"], _spec(job)
    mount = spec["storage"].get("mountPath", "/data")
    claim = {"claimName": spec["storage"]["claimName"], "readOnly": True}
    container = {
        "name": _READER,
        "image": spec["image"],
        "command": ["sleep", str(seconds)],
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
            "activeDeadlineSeconds": seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "imagePullSecrets": spec.get("imagePullSecrets", []),
            "containers": [container],
            "volumes": [{"name": _STORAGE, "persistentVolumeClaim": claim}],
        },
    }
