"""Workload W as a PPOJob in the cluster, and the same job by `ppojob run` on the same GPUs: their step times, compared.

Called by the command `compare`, on a cluster that runs. The tests' benchmark has the workload and the layout: actor and
critic in a pool of one GPU each, overlapped. It refuses to compare when the two pools did not get a GPU each.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppojob_api.v1alpha1 import constants
from tests.bench import workload
from tests.bench.layouts import layouts
from tests.bench.measurement import WARM_UP_STEPS
from tools.cluster import storage
from tools.cluster.command import run
from tools.cluster.demo import manifests, operator, progress
from tools.cluster.demo.follow import follow
from tools.cluster.demo.pods import words
from tools.cluster.demo.target import NAMESPACE, OPERATOR_NAMESPACE, Target, ours
from tools.cluster.errors import ClusterError
from tools.cluster.offline.device_plugin import RESOURCE
from tools.cluster.offline.host_image import OPERATOR_IMAGE, TRAINER_IMAGE
from tools.cluster.offline.machine import Machine
from tools.cluster.stages import Stages
from tools.cluster.waiting import wait_until

JOB = "workload-w"
LAYOUT = "split-overlapped"
NUM_GPUS = 2
STEP = "timing_s/step"
PODS_LIMIT_SECONDS = 120.0
_TRAINER = "from ppojob_trainer.cli import main; main()"
_GPU_NODE = re.compile(r"nvidia\d+")
_POOL_PODS = f"--selector={constants.LABEL_POOL}"
# Inside a pod: the GPUs that were assigned to it, those whose nodes it has, and those that the driver lets it see.
_SHOW_GPUS = "echo $NVIDIA_VISIBLE_DEVICES; ls /dev | grep -xE 'nvidia[0-9]+'; nvidia-smi -L 2>&1 || true"


@dataclass(frozen=True)
class Work:
    """What is trained: the workload's shape, on which device, for how many steps; and each run's limit in seconds."""

    shape: str
    device: str
    num_steps: int
    limit: float

    @property
    def size(self) -> workload.Size:
        """The workload's size; `tiny` is for a machine without a GPU."""
        return workload.Size("tiny", 8, 16, 16, 512) if self.shape == "tiny" else workload.Size(self.shape)


def compare(machine: Machine, work: Work, stages: Stages) -> None:
    """Install the operator, train in the cluster, then outside, and print both step times.

    Raises:
        StageFailed: a stage failed; it has been reported.
    """
    target = ours(machine.layout)
    with stages.stage("the operator (helm upgrade --install)"):
        operator.install(target, OPERATOR_IMAGE)
    with stages.stage("the workload") as stage:
        target.apply(manifests.namespace())
        folder = storage.ensure_claim(machine.layout, namespace=NAMESPACE, name=manifests.CLAIM)
        workload.prepare(folder / "workload", work.size, work.num_steps)
        job = job_of(work, folder)
        stage.note = str(folder)
    try:
        in_cluster = _train_in_cluster(target, machine, work, job, stages)
    finally:
        _keep_words(target, machine.output)
    with stages.stage("remove the job, for its GPUs"):
        target.kubectl("delete", "ppojob", JOB, "--timeout=90s", limit=100)
        target.kubectl("wait", "--for=delete", "pods", "--selector=ray.io/cluster", "--timeout=90s", limit=100)
    with stages.stage("the same job by `ppojob run`") as stage:
        alone = _train_alone(machine, work, job)
        stage.note = f"{alone:.3f} s a step"
    ratio = in_cluster / alone
    result = {"in_kubernetes_s": in_cluster, "ppojob_run_s": alone, "ratio": ratio, "steps": work.num_steps}
    (machine.output / "comparison.json").write_text(json.dumps(result, indent=1))
    stages.console.print(
        f"median step after {WARM_UP_STEPS} steps: {in_cluster:.3f} s in Kubernetes, "
        f"{alone:.3f} s by ppojob run, ratio {ratio:.4f}"
    )


def job_of(work: Work, folder: Path) -> dict[str, Any]:
    """The PPOJob; what it reads and writes lies in `folder`, on the claim and outside at the same path."""
    job = workload.job(folder / "workload", work.size, layouts(NUM_GPUS)[LAYOUT], work.num_steps, work.device)
    job["metadata"] = {"name": JOB, "namespace": NAMESPACE}
    cpus, memory = share_of_machine(os.cpu_count() or 1, _memory_bytes())
    pool = {"cpu": cpus, "memory": memory, "shm": "8Gi" if work.device == "CUDA" else "1Gi"}
    spec = job["spec"]
    spec |= {"image": TRAINER_IMAGE, "head": {"resources": {"cpu": cpus, "memory": memory}}}
    spec["storage"] = {"claimName": manifests.CLAIM, "mountPath": str(folder)}
    # Named, because without a GPU nothing would be asked of the device plugin.
    own = {"nodes": 1, "gpuResourceName": RESOURCE, "resourcesPerGPU": pool}
    spec["pools"] = [{**item, **own} for item in spec["pools"]]
    return job


def share_of_machine(num_cpus: int, memory_bytes: int) -> tuple[str, str]:
    """CPU and memory of each of three pods, as Kubernetes writes them: a quarter of the machine, or what suffices."""
    return f"{min(8000, 250 * num_cpus)}m", f"{min(48, memory_bytes // (4 << 30))}Gi"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _train_in_cluster(target: Target, machine: Machine, work: Work, job: dict[str, Any], stages: Stages) -> float:
    file = machine.output / "ppojob.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    start = time.monotonic()
    with stages.stage("kubectl apply, and the pods") as stage:
        target.kubectl("apply", f"--filename={file}")
        wait_until("the pools' pods", lambda: _missing_pods(target), limit=PODS_LIMIT_SECONDS, interval=1)
        gpus = {pod: gpus_of(target.kubectl("exec", pod, "--", "sh", "-c", _SHOW_GPUS)) for pod in _pods(target)}
        require_own_gpus(gpus)
        stage.note = "; ".join(f"{pod} has {', '.join(found)}" for pod, found in gpus.items())
    with stages.stage("training in Kubernetes") as stage:
        followed = follow(target, JOB, start=start, limit=work.limit, console=stages.console)
        if followed.finished == "Failed":
            raise ClusterError(f"the job failed: {progress.failure(target.get('ppojob', JOB))}")
        storage_folder = Path(job["spec"]["storage"]["mountPath"])
        seconds = median_step(storage_folder / "ppojob" / NAMESPACE / JOB / "metrics.jsonl")
        stage.note = f"{followed.finished} {followed.seconds:.0f} s after kubectl apply; {seconds:.3f} s a step"
    return seconds


def _missing_pods(target: Target) -> str:
    pods = target.get("pods", _POOL_PODS)["items"]
    unready = [pod for pod in pods if pod["status"]["phase"] != "Running"]
    return "; ".join(map(words, unready)) if len(pods) == NUM_GPUS else f"{NUM_GPUS} pods; there are {len(pods)}"


def _pods(target: Target) -> list[str]:
    return [pod["metadata"]["name"] for pod in target.get("pods", _POOL_PODS)["items"]]


def gpus_of(said: str) -> list[str]:
    """The GPUs that a pod has, from its answer to `_SHOW_GPUS`: assigned ids, then nodes, then the driver's."""
    return [line.strip() for line in said.splitlines() if line.strip()]


def require_own_gpus(gpus: dict[str, list[str]]) -> None:
    """Refuse pods that were given the same GPU, or that have more than one node of a GPU.

    Raises:
        ClusterError: names the pods and what they have.
    """
    # Where the driver reports no ids, a GPU's node is its id, so a pod has said it twice.
    nodes = [{line for line in found if _GPU_NODE.fullmatch(line)} for found in gpus.values()]
    if any(len(own) != 1 for own in nodes) or len(set.union(*nodes)) != len(nodes):
        raise ClusterError(f"each pool's pod must have one GPU of its own, and they have: {gpus}")


def _keep_words(target: Target, output: Path) -> None:
    """Write what Kubernetes says of the job to files, and print the short ones."""
    questions = {
        "ppojobs": ("get", "ppojobs", "--output=wide"),
        "pods": ("get", "pods", "--output=wide"),
        "describe": ("describe", "ppojob", JOB),
        "yaml": ("get", "ppojob,raycluster,pods", "--output=yaml"),
        "events": ("get", "events", "--sort-by=.lastTimestamp"),
        "operator-log": ("logs", f"deployment/{operator.RELEASE}", f"--namespace={OPERATOR_NAMESPACE}"),
    }
    for name, question in questions.items():
        try:
            said = target.kubectl(*question)
        except ClusterError as error:
            said = str(error)
        (output / f"{name}.txt").write_text(said)
        if name in ("ppojobs", "pods", "describe"):
            print(f"$ kubectl {' '.join(question)}\n{said}", flush=True)


def _train_alone(machine: Machine, work: Work, job: dict[str, Any]) -> float:
    folder = machine.output / "ppojob-run"
    command = [sys.executable, "-c", _TRAINER, "run", str(machine.output / "ppojob.yaml"), "--output", str(folder)]
    log = machine.layout.log("ppojob-run")
    run(command, limit=work.limit, environment=machine.trainer_environment(), log=log, folder=machine.folder)
    return median_step(folder / "metrics.jsonl")


def median_step(metrics: Path) -> float:
    """The median seconds of a step after the warm-up.

    Raises:
        ClusterError: no step after the warm-up is in the file.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    steps = [float(row[STEP]) for row in rows if row.get("step", 0) > WARM_UP_STEPS and STEP in row]
    if not steps:
        raise ClusterError(f"{metrics} has no step after the first {WARM_UP_STEPS}")
    return statistics.median(steps)
