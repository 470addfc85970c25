"""Rules of the queues in `spec.runPolicy` and of `pools[].topology`: what Kueue and the gang schedulers ask of a job.

`rules.py` puts the CEL into the schema and the Python beside the other checks. Kueue takes at most eight sets of pods;
the head and the seven pools that a spec may have are just so many. The queue may also come from a label of the job,
which CEL does not see. In Python it is in the spec (`validation.with_queue`), so what needs a queue is in Python alone.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.runtime import GangScheduler
from ppojob_api.v1alpha1.spec import PPOJobSpec

_HEAD = "head"
"""Kueue's own name for the pods of Ray's head."""

_GANG_SCHEDULER = "self.runPolicy.?gangScheduler.orValue('None')"
"""In CEL."""

QUEUE_RULES = [
    Rule(
        rule=f"!has(self.runPolicy.queueName) || !self.pools.exists(p, p.name == '{_HEAD}')",
        message=(
            f"with runPolicy.queueName, no pool may be called {_HEAD}, because Kueue uses this name for Ray's head: "
            "rename the pool"
        ),
        field_path=".pools",
        value=f"'{_HEAD}'",
    ),
    Rule(
        rule=f"!has(self.runPolicy.gangSchedulerQueue) || {_GANG_SCHEDULER} != 'None'",
        message="gangSchedulerQueue has an effect only with gangScheduler: set gangScheduler, or remove it",
        field_path=".runPolicy.gangSchedulerQueue",
    ),
    Rule(
        rule=f"{_GANG_SCHEDULER} != 'KAI' || has(self.runPolicy.gangSchedulerQueue)",
        message="KAI ignores pods without a queue: set gangSchedulerQueue",
        field_path=".runPolicy.gangScheduler",
    ),
]

TOPOLOGY_RULES = [
    Rule(rule="has(self.required) != has(self.preferred)", message="set exactly one of required and preferred")
]


def _topologies_are_required_or_preferred(spec: PPOJobSpec) -> Iterator[Problem]:
    for index, pool in enumerate(spec.pools):
        topology = pool.topology
        if topology is not None and (topology.required is None) == (topology.preferred is None):
            yield f"pools[{index}].topology", topology.to_wire(), "set exactly one of required and preferred"


def _no_pool_has_kueues_name_for_the_head(spec: PPOJobSpec) -> Iterator[Problem]:
    for index, pool in enumerate(spec.pools):
        if spec.run_policy.queue_name is not None and pool.name == _HEAD:
            remedy = "with runPolicy.queueName, Kueue uses this name for Ray's head: rename the pool"
            yield f"pools[{index}].name", pool.name, remedy


def _priority_is_of_a_queue(spec: PPOJobSpec) -> Iterator[Problem]:
    policy = spec.run_policy
    if policy.queue_priority_class is not None and policy.queue_name is None:
        remedy = "it has an effect only with runPolicy.queueName: set queueName, or remove it"
        yield "runPolicy.queuePriorityClass", policy.queue_priority_class, remedy


def _gang_scheduler_and_its_queue_belong_together(spec: PPOJobSpec) -> Iterator[Problem]:
    scheduler, queue = spec.run_policy.gang_scheduler, spec.run_policy.gang_scheduler_queue
    if queue is not None and scheduler is GangScheduler.NONE:
        yield (
            "runPolicy.gangSchedulerQueue",
            queue,
            "it has an effect only with gangScheduler: set gangScheduler, or remove it",
        )
    if queue is None and scheduler is GangScheduler.KAI:
        remedy = "ignores pods without a queue: set runPolicy.gangSchedulerQueue"
        yield "runPolicy.gangScheduler", scheduler.value, remedy


QUEUE_CHECKS = (
    _no_pool_has_kueues_name_for_the_head,
    _priority_is_of_a_queue,
    _gang_scheduler_and_its_queue_belong_together,
    _topologies_are_required_or_preferred,
)
