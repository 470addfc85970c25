"""docs/troubleshooting.md quotes real messages: each one is produced here, and must be on the page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import OutOfMemoryError as NodeOutOfMemoryError

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator import ownership
from ppojob_operator.plan import JobKey, OtherLease, Trouble
from ppojob_operator.reading import read_job
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.kubectl.status_table import missing_operator
from ppojob_trainer.main.connection import check_gpus
from ppojob_trainer.main.memory_fit import check_memory
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError
from ppojob_trainer.worker_groups.memory import explain_memory
from ppojob_trainer.worker_groups.placement import bundle_resources, explain_shortage
from ppojob_trainer.worker_groups.roles.trained import ModelSize
from tests.bad_specs import GOOD
from tests.unit.operator.reconcile.worlds import SURROUNDINGS, World

PAGE = " ".join(Path("docs/troubleshooting.md").read_text().split())
KL = {"kl": {"inReward": True}}


def spec_of(**changes: Any) -> PPOJobSpec:
    return resolve(parse_spec({**GOOD["spec"], "algorithm": KL, **changes}))


def unplaced(spec: PPOJobSpec, found: int) -> str:
    with pytest.raises(PoolNotPlacedError) as caught:
        check_gpus(spec, found)
    return str(caught.value)


def test_models_that_cannot_fit() -> None:
    size = ModelSize(5_000_000_000, 80_000_000_000)
    with pytest.raises(ModelMismatchError) as caught:
        check_memory(spec_of(), {"critic": size, "ref": size})

    assert str(caught.value) in PAGE


@pytest.mark.parametrize(
    ("error", "role", "method"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has 79.1 GiB."), "actor",
         "update_actor"),
        (NodeOutOfMemoryError("Memory on the node was 62.1GB used / 64.0GB limit, which is too much."), "critic",
         "update_critic"),
    ],
)  # fmt: skip
def test_memory_that_is_short_in_a_phase(error: Exception, role: str, method: str) -> None:
    assert str(explain_memory(error, role, 0, method)) in PAGE


@pytest.mark.parametrize(
    ("reason", "words", "pool"),
    [
        (Reason.INSUFFICIENT_GPUS, "0/12 nodes are available: 12 Insufficient nvidia.com/gpu.", {}),
        (
            Reason.UNSCHEDULABLE,
            "0/12 nodes are available: 12 node(s) didn't match Pod's node affinity/selector.",
            {"nodeSelector": {"gpu-type": "a100"}},
        ),
    ],
)
def test_pods_that_do_not_come(reason: str, words: str, pool: dict[str, Any]) -> None:
    pools = [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 8, **pool}]
    world = World(pools=pools).settle().pods_become(ready=True)
    world.pods_become(ready=False, pool="critic", trouble=Trouble(reason, words)).settle()

    assert f"{reason}: {world.condition(Condition.POOLS_READY).message}" in PAGE


def test_reports_that_do_not_arrive() -> None:
    url = "https://ppojob.ppojob-system.svc:443/v1alpha1"
    world = World().see(surroundings=replace(SURROUNDINGS, report_url=url)).run().wait(61).settle()
    condition = world.condition(Condition.PROGRESSING)

    assert f"{condition.reason}: {condition.message}" in PAGE


def test_a_pod_that_wanted_more_memory_than_it_may_have() -> None:
    words = "container ray-worker exceeded its memory limit of 64Gi and was terminated"
    world, killed = World().run(), Trouble(Reason.OUT_OF_MEMORY, words, "ray-worker", 137)
    pod = f"{world.cluster_name}-critic"
    world.pods_become(ready=False, pool="critic", trouble=killed).settle()

    failure = world.status["lastFailure"]
    message = failure["message"].replace(pod, "products-1a2b3-critic-worker-x7k2p")
    assert f"{failure['reason']}: {message}" in PAGE


def test_a_pod_on_a_node_that_was_lost() -> None:
    world = World().run()
    pod = f"{world.cluster_name}-critic"
    lost = Trouble(Reason.NODE_LOST, "DeletionByTaintManager: deleting due to NoExecute taint")
    pods = (
        replace(each, disruption=lost, is_deleting=True) if each.name == pod else each for each in world.observed.pods
    )
    world.see(pods=tuple(pods)).settle().pod_is_gone("critic").wait(31).trainer_reports().settle()

    failure = world.status["lastFailure"]
    message = failure["message"].replace(pod, "products-1a2b3-critic-worker-x7k2p")
    assert f"{failure['reason']}: {message}" in PAGE


def test_a_job_of_another_operator() -> None:
    ours, theirs = (
        OperatorStatus(namespace=name, lease="ppojob-leader", version="0.2.0") for name in ("rl-team", "ppojob-system")
    )
    world = World()
    world.status = {"operator": theirs.to_wire()}
    event = ownership.judge(read_job(world.raw), ours, OtherLease(0.0, 15.0), 120.0).event

    assert event is not None
    assert f"{event.reason}: {event.message}" in PAGE


def test_a_job_that_no_operator_takes() -> None:
    ours = OperatorStatus(namespace="ppojob-system", lease="ppojob-leader", version="0.2.0")
    job = replace(read_job(World().raw), key=JobKey("team-b", "products"))
    event = ownership.release(job, ours, "namespaceSelector (ppojob.dev/enabled=true)").event

    assert event is not None
    assert f"{job.key}: {event.message}" in PAGE
    assert missing_operator({"metadata": {"namespace": "team-b"}}) in PAGE


def test_gpus_that_ray_has_not() -> None:
    spec = spec_of(pools=[{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "nodes": 2, "gpusPerNode": 1}])
    pool = spec.pool("critic")
    total = {"pool_critic": 1.0, "CPU": 4.0, "GPU": 3.0}

    assert explain_shortage(pool, bundle_resources(spec, pool), 120, total, total) in PAGE


def test_a_machine_with_fewer_gpus_than_the_pools_want() -> None:
    assert unplaced(spec_of(), 2) in PAGE


def test_a_machine_with_enough_gpus_is_taken() -> None:
    check_gpus(spec_of(), 3)
