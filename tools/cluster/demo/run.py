"""The demo, stage by stage. Called by the command `demo`.

A second run reuses the cluster, the images and the model; a job of the same name is deleted and run again.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tools.cluster import cluster, storage
from tools.cluster.demo import foreign, manifests, operator, progress
from tools.cluster.demo import storage as job_storage
from tools.cluster.demo.follow import Followed, follow
from tools.cluster.demo.target import NAMESPACE, OPERATOR_NAMESPACE, Target
from tools.cluster.errors import ClusterError
from tools.cluster.images.build import ensure_in_cluster
from tools.cluster.layout import PROJECT, Layout
from tools.cluster.stages import Stages

EXAMPLE = PROJECT / "examples" / "01-quickstart" / "ppojob.yaml"
OUTPUT = PROJECT / "output" / "demo"
JOB = "quickstart"
# A few of the metrics that people know from verl; the file has them all.
SHOWN_METRICS = (
    "critic/score/mean",
    "actor/ppo_kl",
    "actor/pg_loss",
    "actor/entropy",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "response_length/mean",
    "perf/time_per_step",
    "overlap/saved_s",
    "pool/actor/busy_fraction",
    "pool/critic/busy_fraction",
)
_HOW_TO_REMOVE = (
    f"to remove what the demo made: kubectl delete namespace {NAMESPACE}; "
    f"helm uninstall {operator.RELEASE} --namespace={OPERATOR_NAMESPACE}; kubectl delete namespace {OPERATOR_NAMESPACE}"
)


@dataclass(frozen=True)
class ImageNames:
    """The images of one demo."""

    trainer: str
    operator: str


def run(layout: Layout, target: Target, images: ImageNames | None, *, limit: float, stages: Stages) -> None:
    """Run the demo on `target`; without `images` the cluster is ours and is made first.

    Raises:
        StageFailed: a stage failed; it has been reported.
    """
    if not target.is_ours:
        with stages.stage("your cluster") as stage:
            stage.note = foreign.check(target)
    names = images or _make_cluster(layout, stages)
    with stages.stage("the operator (helm upgrade --install)") as stage:
        operator.install(target, names.operator)
        stage.note = names.operator
    with stages.stage(f"namespace {NAMESPACE} and its storage"):
        target.apply(manifests.namespace())
        if target.is_ours:
            storage.ensure_claim(layout, namespace=NAMESPACE, name=manifests.CLAIM)
        elif not target.has("persistentvolumeclaim", manifests.CLAIM):
            target.apply(manifests.claim())
        job_storage.open_storage(target, names.trainer)
    with stages.stage("the model") as stage:
        stage.note = "exists already" if job_storage.has_model(target) else "prepared by a Kubernetes Job"
        if stage.note != "exists already":
            job_storage.prepare_model(target, names.trainer)
    _train(target, names.trainer, limit, stages)
    if not target.is_ours:
        stages.console.print(_HOW_TO_REMOVE, markup=False)


def _make_cluster(layout: Layout, stages: Stages) -> ImageNames:
    with cluster.locked(layout):
        cluster.up(layout, stages)
    operator = ensure_in_cluster(layout, stages, "operator")
    trainer = ensure_in_cluster(layout, stages, "trainer")
    return ImageNames(trainer=trainer.name, operator=operator.name)


def _train(target: Target, image: str, limit: float, stages: Stages) -> None:
    with stages.stage("remove an earlier job of this name"):
        target.kubectl("delete", "ppojob", JOB, "--ignore-not-found", "--timeout=180s", limit=200)
        # Its pods hold the node's memory until they are gone.
        target.kubectl("wait", "--for=delete", "pods", "--selector=ray.io/cluster", "--timeout=180s", limit=200)
        job_storage.forget_job(target, JOB)
    with stages.stage(f"kubectl apply {EXAMPLE.relative_to(PROJECT)}") as stage:
        stage.note = f"spec.image is replaced by {image}"
        target.kubectl("apply", "--filename=-", stdin=manifests.with_image(EXAMPLE.read_text(), image))
        start = time.monotonic()
    with stages.stage("training") as stage:
        followed = follow(target, JOB, start=start, limit=limit, console=stages.console)
        stage.note = _summary(followed)
        if followed.finished == "Failed":
            raise ClusterError(f"the job failed: {progress.failure(target.get('ppojob', JOB))}")
    with stages.stage("results") as stage:
        copied = job_storage.copy_results(target, JOB, OUTPUT)
        job_storage.close_storage(target)
        stage.note = ", ".join(str(path.relative_to(PROJECT)) for path in copied)
    stages.console.print(target.kubectl("get", "ppojobs"), markup=False)
    stages.console.print(_last_metrics(OUTPUT / "metrics.jsonl"))
    model = target.get("ppojob", JOB).get("status", {}).get("model", {}).get("path", "")
    stages.console.print(f"the trained model, on the claim {manifests.CLAIM}: {model or 'not exported'}", markup=False)
    stages.console.print(_summary(followed))
    stages.console.print(f"the operator's log: kubectl -n {OPERATOR_NAMESPACE} logs deployment/{operator.RELEASE}")


def _summary(followed: Followed) -> str:
    first = followed.first_step_seconds
    return f"{followed.finished} after {followed.seconds:.0f} s" + (
        f"; {first:.0f} s from apply to the first PPO step" if first is not None else ""
    )


def _last_metrics(path: Path) -> Table:
    """The best known metrics of the first and the last record, side by side."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    steps = [record for record in records if SHOWN_METRICS[0] in record]
    table = Table("metric", "first step", "last step", title=f"{len(records)} records in {path.relative_to(PROJECT)}")
    for name in SHOWN_METRICS if steps else ():
        table.add_row(name, *(f"{record[name]:.4g}" if name in record else "" for record in (steps[0], steps[-1])))
    return table
