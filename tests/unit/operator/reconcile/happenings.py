"""What can happen to a job from outside, as changes of a `World`, and a world for each state.

`test_states.py` plays them in every state. Each change can be made in any world; where its object does not exist, it
changes nothing.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import FetchPod, Ray, RayState, Trouble, Workload
from ppojob_operator.reconcile.states import State
from tests.unit.operator.reconcile.worlds import World

POLICY = {
    "backoffLimit": 1,
    "infrastructureBackoffLimit": 1,
    "startupDeadlineSeconds": 3600,
    "activeDeadlineSeconds": 100_000,
    "ttlSecondsAfterFinished": 600,
}
POOLS = [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}]
MODEL = {"actor": {"path": "hf://Qwen/Qwen3-8B"}}
ILLEGAL = [{**POOLS[0], "podTemplate": {"spec": {"restartPolicy": "Always"}}}, POOLS[1]]
NO_GPUS = Trouble(Reason.INSUFFICIENT_GPUS, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
STARVED = Trouble(Reason.OUT_OF_MEMORY, "container ray-worker exceeded its memory limit", "ray-worker", 137)
NO_IMAGE = Trouble(Reason.IMAGE_PULL_FAILED, "ErrImagePull: no such image")
DAY = 86_400

Happening = Callable[[World], Any]


def fresh(*, is_queued: bool = False, is_fetched: bool = False, **policy: Any) -> World:
    """Return a job that no operator has seen."""
    queue = {"queueName": "gpus"} if is_queued else {}
    return World(runPolicy={**POLICY, **queue, **policy}, **({"model": MODEL} if is_fetched else {}))


def copied(world: World) -> World:
    """Return a world that can be changed alone."""
    return deepcopy(world)


def _policy(**changes: Any) -> Happening:
    return lambda world: world.edit(runPolicy={**world.spec["runPolicy"], **changes})


def _ray(world: World, state: RayState, **fields: Any) -> None:
    """Let Ray say something of its last job, if there is one."""
    if world.observed.ray is not None and world.observed.ray.jobs:
        world.ray_says(state, **fields)


def _fails(reason: str, kind: FailureKind) -> Happening:
    def fail(world: World) -> None:
        if world.observed.ray is not None and world.observed.ray.jobs:
            world.trainer_fails(reason, kind)

    return fail


def _stops(world: World) -> None:
    if world.observed.ray is not None and world.observed.ray.jobs:
        world.trainer_stops_gracefully()


def _pods(*, ready: bool, pool: str = "", trouble: Trouble | None = None) -> Happening:
    def change(world: World) -> None:
        before = world.status
        if world.observed.clusters:
            # Also of a RayCluster whose name could not be written.
            world.status = {"rayCluster": {"name": world.observed.clusters[-1].name}}
            world.pods_become(ready=ready, pool=pool, trouble=trouble)
        world.status = before

    return change


def _kueue(*, admits: bool) -> Happening:
    def change(world: World) -> None:
        clusters = world.observed.clusters
        if "queueName" in world.spec["runPolicy"] or any(each.queue for each in clusters):
            world.see(clusters=tuple(replace(each, is_suspended=not admits) for each in clusters))

    return change


def _kueue_takes(queue: str | None) -> Happening:
    """Let Kueue suspend the RayClusters of a job that names no queue; None: it gives them none either."""

    def change(world: World) -> None:
        clusters = tuple(
            replace(each, is_suspended=True, queue=queue or each.queue) for each in world.observed.clusters
        )
        world.see(clusters=clusters, workloads=tuple(Workload(each.uid, "no quota") for each in clusters))

    return change


def _fetch(**fields: Any) -> Happening:
    def change(world: World) -> None:
        if world.observed.fetch_job is not None:
            world.see(fetch_job=replace(world.observed.fetch_job, **fields))

    return change


def _fetch_pod(world: World) -> None:
    if world.observed.fetch_job is not None:
        world.see(fetch_pods=(FetchPod("fetch-x", world.now, has_started=True),))


def _reports(world: World) -> None:
    if "attempt" in world.status:
        world.trainer_reports(step=1)


def _is_deleted(world: World) -> None:
    world.is_deleting = True


def _ray_problem(problem: str) -> Happening:
    return lambda world: world.see(ray=Ray(world.observed.ray.jobs if world.observed.ray else (), problem))


def _write_is_lost(world: World) -> None:
    """Let one reconcile do everything but write the status."""
    before = world.status
    world.look()
    world.status = before


FAILURES: Mapping[str, Happening] = {
    "the spec becomes invalid": lambda world: world.edit(trainer={"totalSteps": -1}),
    "the layout becomes invalid": lambda world: world.edit(pools=ILLEGAL),
    "the spec is of a newer operator": lambda world: world.edit(novelty=1),
    "KubeRay is missing": lambda world: world.see(is_kuberay_served=False),
    "Kueue is missing": lambda world: world.see(workloads=None),
    "the claim is deleted": lambda world: world.see(claim=None),
    "the API server refuses": lambda world: world.see(last_error="403 rayclusters.ray.io is forbidden"),
    "the RayCluster is deleted": lambda world: world.see(clusters=(), pods=(), ray=None),
    "the head is deleted": lambda world: world.pod_is_gone("head"),
    "a worker is deleted": lambda world: world.pod_is_gone("critic"),
    "a worker runs out of memory": _pods(ready=False, pool="critic", trouble=STARVED),
    "there are no GPUs": _pods(ready=False, pool="critic", trouble=NO_GPUS),
    "an image cannot be pulled": _pods(ready=False, pool="critic", trouble=NO_IMAGE),
    "Ray does not answer": _ray_problem("connection refused"),
    "the trainer fails for good": _fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT),
    "the trainer fails": _fails(Reason.NON_FINITE, FailureKind.USER),
    "the trainer is stopped in Ray": lambda world: _ray(world, RayState.STOPPED),
    "the fetch fails": _fetch(failure="Job has reached the specified backoff limit"),
    "the startup deadline passes": lambda world: world.wait(3700),
    "the active deadline passes": lambda world: world.wait(2 * DAY),
    "the queue evicts": _kueue(admits=False),
    "the status cannot be written": _write_is_lost,
}
OTHERS: Mapping[str, Happening] = {
    "the spec is corrected": lambda world: world.edit(trainer={"totalSteps": 8}),
    "the layout is corrected": lambda world: world.edit(pools=POOLS),
    "the newer field is removed": lambda world: world.spec.pop("novelty", None),
    "KubeRay, Kueue and claim are back": lambda world: world.see(
        is_kuberay_served=True, workloads=(), claim=World().observed.claim, last_error=""
    ),
    "suspended": _policy(suspend=True),
    "resumed": _policy(suspend=False),
    "another layout with the same pods": lambda world: world.edit(
        actor={"miniBatchSize": 8, "sequenceParallelSize": 2}
    ),
    "another layout": lambda world: world.edit(pools=[POOLS[0], {**POOLS[1], "nodes": 2}]),
    "a lower deadline": _policy(activeDeadlineSeconds=1),
    "the pods are ready": _pods(ready=True),
    "the pods are deleted": lambda world: world.see(pods=()),
    "Ray answers": _ray_problem(""),
    "the trainer reports": _reports,
    "the trainer stops gracefully": _stops,
    "the trainer completes": lambda world: _ray(world, RayState.SUCCEEDED),
    "the queue admits": _kueue(admits=True),
    "Kueue's default queue takes it": _kueue_takes("default"),
    "Kueue manages jobs without a queue": _kueue_takes(None),
    "Kueue has no Workloads": lambda world: world.see(workloads=()),
    "the fetch pod starts": _fetch_pod,
    "the fetch completes": _fetch(is_complete=True),
    "a moment passes": lambda world: world.wait(20),
    "ten minutes pass": lambda world: world.wait(600),
    "another leader's clock is behind": lambda world: world.wait(-30),
    "the PPOJob is deleted": _is_deleted,
}


def running(**options: Any) -> World:
    """Return a job with a trainer that reports."""
    world = fresh(**options).settle()
    OTHERS["the fetch completes"](world)
    OTHERS["the queue admits"](world)
    return world.run()


def then(world: World, *happenings: str) -> World:
    """Let these happen, with as many reconciles after each as it takes."""
    for name in happenings:
        ({**FAILURES, **OTHERS})[name](world)
        world.settle()
    return world


def between_attempts() -> World:
    """Return a job whose attempt has just failed."""
    world = running()
    FAILURES["the trainer fails"](world)
    world.look()
    return world


def enlarged() -> World:
    """Return a job in its second attempt, for which autoBalance has moved a node to the critic's pool."""
    critic = {**POOLS[1], "minNodes": 1, "maxNodes": 2}
    world = fresh()
    world.edit(pools=[POOLS[0], critic], autoBalance={"enabled": True, "intervalMinutes": 10})
    world.run().wait(900)
    sizes = [{"name": "actor", "nodes": 1, "gpusPerNode": 2}, {"name": "critic", "nodes": 2, "gpusPerNode": 1}]
    world.trainer_reports(step=5)
    world.status |= {"layoutAdvice": [{"pools": sizes, "gpus": 4, "stepTimePercent": -20}]}
    world.settle()
    return then(world, "the trainer stops gracefully", "there are no GPUs")


def enlarged_and_ready() -> World:
    """Return the same with all pods, for a Ray that does not answer."""
    world = enlarged()
    OTHERS["the pods are ready"](world)
    second = replace(next(pod for pod in world.observed.pods if pod.pool == "critic"), name="critic-2")
    return then(world.see(pods=(*world.observed.pods, second)), "Ray does not answer")


WORLDS: Mapping[State, Callable[[], World]] = {
    State.PENDING: lambda: fresh().see(claim=None).settle(),
    State.FETCHING: lambda: fresh(is_fetched=True).settle(),
    State.QUEUED: lambda: fresh(is_queued=True).settle(),
    State.RESTARTING: between_attempts,
    State.WAITING_FOR_PODS: lambda: fresh().settle(),
    State.SUBMITTING: lambda: then(fresh().settle(), "the pods are ready", "Ray does not answer"),
    State.TRAINER_SUBMITTED: lambda: then(fresh().settle(), "the pods are ready", "Ray answers"),
    State.RUNNING: running,
    State.SUSPENDING: lambda: then(running(), "suspended"),
    State.REALLOCATING: lambda: then(running(), "another layout"),
    State.PREEMPTED: lambda: then(running(is_queued=True), "the queue evicts"),
    State.SUSPENDED: lambda: then(running(), "suspended", "the trainer stops gracefully"),
    State.SUCCEEDED: lambda: then(running(), "the trainer completes"),
    State.FAILED: lambda: then(running(), "the trainer fails for good"),
}
"""A world in each state."""


def explanations(world: World) -> set[str]:
    """Return the reasons that the status has for whatever is wrong: of conditions, and of the last failure."""
    conditions = world.status.get("conditions", [])
    bad = {each["reason"] for each in conditions if each["status"] != "True" and each["message"]}
    verdicts = {each["reason"] for each in conditions if each["type"] in (Condition.FAILED, Condition.STALLED)}
    last = world.status.get("lastFailure", {}).get("reason")
    return bad | verdicts | ({last} if last else set())
