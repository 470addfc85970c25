"""Rules of `tensorParallelSize` and `sequenceParallelSize`: against the GPUs of pools, and what is not computed.

`rules.py` puts them beside the others, each in CEL and in Python. Whether they divide the model's heads only the
trainer can say, which reads the model's configuration before it loads anything.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.batch_rules import NEEDS_CRITIC
from ppojob_api.v1alpha1.placement_rules import ACTOR_POOL, CRITIC_POOL, ROLLOUT_POOLS
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import Trained

_TRAINED = ("actor", "critic")
_POOL_OF = {
    "actor": (ACTOR_POOL, ""),
    "critic": (
        CRITIC_POOL,
        f"!{NEEDS_CRITIC} || ",
    ),
}
"""The pool of a trained role, and when it has none."""

PARALLEL_RULES = [
    *(
        Rule(
            rule=(
                f"{is_idle}self.{role}.tensorParallelSize * self.{role}.sequenceParallelSize == 1 || "
                f"self.pools.all(p, p.name != {pool} || (p.nodes * p.gpusPerNode) % "
                f"(self.{role}.tensorParallelSize * self.{role}.sequenceParallelSize) == 0)"
            ),
            message=f"{role}.tensorParallelSize times sequenceParallelSize must divide the GPUs of the {role}'s pool",
            field_path=f".{role}",
        )
        for role, (pool, is_idle) in _POOL_OF.items()
    ),
    *(
        Rule(
            rule=f"self.{role}.tensorParallelSize == 1 || self.{role}.sequenceParallelSize == 1",
            message="tensorParallelSize and sequenceParallelSize cannot both be above 1: set one of them to 1",
            field_path=f".{role}.sequenceParallelSize",
        )
        for role in _TRAINED
    ),
    *(
        Rule(
            rule=(
                f"self.{role}.tensorParallelSize == 1 || "
                f"!(has(self.model.{role}.lora) || self.model.{role}.activationOffload)"
            ),
            message=(
                "tensorParallelSize above 1 cannot be combined with lora or activationOffload: use sequenceParallelSize"
            ),
            field_path=f".{role}.tensorParallelSize",
        )
        for role in _TRAINED
    ),
    Rule(
        rule=(
            "self.rollout.tensorParallelSize == 1 || "
            f"self.pools.all(p, !(p.name in {ROLLOUT_POOLS}) || "
            "p.gpusPerNode % self.rollout.tensorParallelSize == 0)"
        ),
        message="rollout.tensorParallelSize must divide gpusPerNode of each pool that generates",
        field_path=".rollout.tensorParallelSize",
    ),
    Rule(
        rule="self.rollout.tensorParallelSize == 1 || self.device != 'CPU'",
        message="with device CPU, a replica uses a whole node: set tensorParallelSize to 1",
        field_path=".rollout.tensorParallelSize",
    ),
]


def _peers_divide_the_pools(spec: PPOJobSpec) -> Iterator[Problem]:
    pools = {pool.name: pool.gpus for pool in spec.pools}
    critic = (spec.placement.critic or spec.placement.actor) if spec.algorithm.needs_critic else None
    for role, training, pool in (("actor", spec.actor, spec.placement.actor), ("critic", spec.critic, critic)):
        if pool in pools and pools[pool] % training.num_peers:
            field, value = _larger(training)
            remedy = f"does not divide the {pools[pool]} GPUs of pool {pool}: use a divisor, or give the pool more GPUs"
            yield f"{role}.{field}", value, remedy
    has_copy = spec.algorithm.needs_reference and not spec.model.reference_is_actor
    ref = spec.placement.ref or critic or spec.placement.actor
    if has_copy and ref != spec.placement.actor and ref in pools and pools[ref] % spec.actor.num_peers:
        field, value = _larger(spec.actor)
        yield (
            f"actor.{field}",
            value,
            f"the reference is sharded like the actor, and this value does not divide the {pools[ref]} GPUs of "
            "its pool "
            f"{ref}: set placement.ref to {spec.placement.actor}, or give the pool more GPUs",
        )


def _peers_are_of_one_kind(spec: PPOJobSpec) -> Iterator[Problem]:
    for role, training, model in (
        ("actor", spec.actor, spec.model.actor),
        ("critic", spec.critic, spec.model.critic),
    ):
        tensor, sequence = training.tensor_parallel_size, training.sequence_parallel_size
        if tensor > 1 and sequence > 1:
            remedy = f"tensorParallelSize is {tensor}, and only one of the two may be above 1: set one of them to 1"
            yield f"{role}.sequenceParallelSize", sequence, remedy
        for name, is_asked in (("lora", model.lora is not None), ("activationOffload", model.activation_offload)):
            if tensor > 1 and is_asked:
                remedy = (
                    f"a value above 1 cannot be combined with model.{role}.{name}: use sequenceParallelSize, or "
                    "remove that field"
                )
                yield f"{role}.tensorParallelSize", tensor, remedy


def _replicas_fit_their_nodes(spec: PPOJobSpec) -> Iterator[Problem]:
    size = spec.rollout.tensor_parallel_size
    names = spec.placement.rollout_pools
    if size > 1 and spec.device is Device.CPU:
        remedy = "with device CPU, a replica uses a whole node: set it to 1"
        yield "rollout.tensorParallelSize", size, remedy
    for pool in spec.pools:
        if pool.name in names and pool.gpus_per_node % size:
            remedy = f"does not divide the {pool.gpus_per_node} GPUs of a node of pool {pool.name}: use a divisor"
            yield "rollout.tensorParallelSize", size, remedy


def _larger(training: Trained) -> tuple[str, int]:
    """The field that is to blame."""
    if training.tensor_parallel_size >= training.sequence_parallel_size:
        return "tensorParallelSize", training.tensor_parallel_size
    return "sequenceParallelSize", training.sequence_parallel_size


PARALLEL_CHECKS = (_peers_divide_the_pools, _peers_are_of_one_kind, _replicas_fit_their_nodes)
