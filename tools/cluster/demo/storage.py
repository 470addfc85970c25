"""Looks into the job's storage through a pod, so that it works on any cluster: the model, old results, new results."""

from __future__ import annotations

import time
from pathlib import Path

from tools.cluster.demo import manifests
from tools.cluster.demo.pods import require_image, words
from tools.cluster.demo.target import NAMESPACE, Target
from tools.cluster.errors import ClusterError
from tools.cluster.waiting import wait_until

START_LIMIT_SECONDS = 900.0
CLAIM_LIMIT_SECONDS = 180.0
MODEL_LIMIT_SECONDS = 600.0
# The trainer writes them when it has something to write; only the metrics must be there.
RESULT_FILES = ("metrics.jsonl", "plot.png")


def open_storage(target: Target, image: str) -> None:
    """Start the pod that reads the storage, and wait for it (on a cluster of the user's the image is pulled now).

    Raises:
        ClusterError: the image cannot be pulled, the claim gets no volume, or it takes too long; says why.
    """
    close_storage(target)
    target.apply(manifests.storage_pod(image))
    start = time.monotonic()

    def missing() -> str:
        pod = target.get("pod", manifests.STORAGE_POD)
        if pod["status"]["phase"] == "Running":
            return ""
        require_image(pod, "IMAGE")
        unbound = _unbound(target)
        if unbound and time.monotonic() - start > CLAIM_LIMIT_SECONDS:
            raise ClusterError(
                f"{unbound}. Make a claim {manifests.CLAIM} in the namespace {NAMESPACE} that gets a volume "
                "(another StorageClass, or ReadWriteOnce where all pods run on one node), then run this again"
            )
        return f"{words(pod)}; {unbound}" if unbound else words(pod)

    wait_until("the pod that reads the storage", missing, limit=START_LIMIT_SECONDS, interval=1)


def _unbound(target: Target) -> str:
    """What keeps the claim from its volume; "" if it has one."""
    claim = target.get("persistentvolumeclaim", manifests.CLAIM)
    if claim["status"].get("phase") == "Bound":
        return ""
    selector = f"--field-selector=involvedObject.uid={claim['metadata']['uid']}"
    said = [f"{event['reason']}: {event.get('message', '')}" for event in target.get("events", selector)["items"]]
    why = said[-1] if said else "nobody has said why"
    return f"the claim {NAMESPACE}/{manifests.CLAIM} is {claim['status'].get('phase', 'Pending')} ({why})"


def close_storage(target: Target) -> None:
    """Remove the pod again."""
    target.kubectl("delete", "pod", manifests.STORAGE_POD, "--ignore-not-found", "--grace-period=0", limit=120)


def has_model(target: Target) -> bool:
    """True if the model's folder stands complete (it appears by a rename)."""
    return _succeeds(target, "test", "-f", f"{manifests.MODEL_PATH}/config.json")


def prepare_model(target: Target, image: str) -> None:
    """Run the Kubernetes Job that writes the model, and wait for its end.

    Raises:
        ClusterError: it fails, with the end of its log.
    """
    target.kubectl("delete", "job", manifests.MODEL_JOB, "--ignore-not-found", limit=120)
    target.apply(manifests.model_job(image))

    def missing() -> str:
        status = target.get("job", manifests.MODEL_JOB).get("status", {})
        conditions = {item["type"]: item.get("message", "") for item in status.get("conditions", [])}
        if "Failed" in conditions:
            log = target.kubectl("logs", f"job/{manifests.MODEL_JOB}", "--tail=25")
            raise ClusterError(f"the job {manifests.MODEL_JOB} failed: {conditions['Failed']}\n{log}")
        if "Complete" in conditions:
            return ""
        pods = target.get("pods", f"--selector=job-name={manifests.MODEL_JOB}")["items"]
        return "; ".join([f"the end of job {NAMESPACE}/{manifests.MODEL_JOB}", *map(words, pods)])

    wait_until("the model", missing, limit=MODEL_LIMIT_SECONDS, interval=1)


def forget_job(target: Target, name: str) -> None:
    """Remove the files of an earlier job of this name: a new one would resume from its checkpoint."""
    _execute(target, "rm", "-rf", job_folder(name))


def copy_results(target: Target, name: str, folder: Path) -> list[Path]:
    """Copy the job's metrics and plot to `folder`; return what came.

    Raises:
        ClusterError: there are no metrics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copied = []
    for file_name in RESULT_FILES:
        source = f"{job_folder(name)}/{file_name}"
        (folder / file_name).unlink(missing_ok=True)
        if _succeeds(target, "test", "-f", source):
            options = ("--retries=3", f"{NAMESPACE}/{manifests.STORAGE_POD}:{source}", str(folder / file_name))
            target.kubectl("cp", *options, limit=120)
            copied.append(folder / file_name)
    if not (folder / RESULT_FILES[0]).is_file():
        raise ClusterError(f"{job_folder(name)}/{RESULT_FILES[0]} is not in the storage")
    return copied


def job_folder(name: str) -> str:
    """Where the trainer writes for the job `name`."""
    return f"{manifests.MOUNT_PATH}/ppojob/{NAMESPACE}/{name}"


def _execute(target: Target, *command: str) -> str:
    return target.kubectl("exec", manifests.STORAGE_POD, "--", *command, limit=120)


def _succeeds(target: Target, *command: str) -> bool:
    try:
        _execute(target, *command)
    except ClusterError as error:
        if "terminated with exit code 1" in str(error):
            return False
        raise
    return True
