"""Rules of the sizes over which models are divided (tensor, sequence, pipeline, expert, FSDP): against nodes and pools.

`rules.py` puts them beside the others, each in CEL and in Python. Only the trainer can check whether they divide the
model's heads, layers and experts: it reads the model's configuration before it loads anything.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.batch_rules import IS_IDLE
from ppojob_api.v1alpha1.engine import Engine
from ppojob_api.v1alpha1.placement_rules import ACTOR_POOL, CRITIC_POOL, ROLLOUT_POOLS
from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import Trained

NODES = "p.?nodes.orValue(1)"
"""Nodes of a pool `p`, in CEL: the API server stores no default of a field that a template may set."""

_POOL_OF = {"actor": (ACTOR_POOL, IS_IDLE["actor"]), "critic": (CRITIC_POOL, IS_IDLE["critic"])}
"""The pool of a trained role, and when it has none."""

_REPLICAS = {
    "tensorParallelSize": ("self.rollout.tensorParallelSize", "rollout.tensorParallelSize"),
    "pipelineParallelSize": (
        "(self.rollout.pipelineParallelSize * self.rollout.tensorParallelSize)",
        "rollout.pipelineParallelSize times tensorParallelSize",
    ),
}
"""Field of an engine's size -> the number that must divide its pools in CEL, and what that is called. If the second one
divides them, so does the first: it is checked for the field that the error names."""


def _divide_pool(role: str, pool: str, *sizes: str) -> str:
    """Return in CEL whether the product of a role's sizes divides the GPUs of its pool."""
    product = " * ".join(f"self.{role}.{size}" for size in sizes)
    return f"self.pools.all(p, p.name != {pool} || ({NODES} * p.gpusPerNode) % ({product}) == 0)"


def _fits_nodes(role: str, pool: str) -> str:
    """Return in CEL whether a node, or several whole nodes of the pool, have a group that computes a layer together."""
    tensor = f"self.{role}.tensorParallelSize"
    peers = f"({tensor} * self.{role}.sequenceParallelSize)"
    spans = (
        f"self.{role}.engine == 'FSDP' && p.gpusPerNode % {tensor} == 0 && {peers} % p.gpusPerNode == 0 && "
        f"({NODES} * p.gpusPerNode) % {peers} == 0"
    )
    return f"self.pools.all(p, p.name != {pool} || p.gpusPerNode % {peers} == 0 || ({spans}))"


PARALLEL_RULES = [
    *(
        Rule(
            rule=(
                f"{is_idle}self.{role}.tensorParallelSize * self.{role}.sequenceParallelSize == 1 || "
                + _fits_nodes(role, pool)
            ),
            message=(
                f"{role}.tensorParallelSize times sequenceParallelSize must divide gpusPerNode of the {role}'s pool "
                "or, with engine FSDP and a tensorParallelSize that divides it, be a multiple of it that divides the "
                "pool's GPUs"
            ),
            field_path=f".{role}",
            value=f"self.{role}.tensorParallelSize * self.{role}.sequenceParallelSize",
        )
        for role, (pool, is_idle) in _POOL_OF.items()
    ),
    *(
        Rule(
            rule=(
                f"{is_idle}self.{role}.pipelineParallelSize == 1 || "
                + _divide_pool(role, pool, "pipelineParallelSize", "tensorParallelSize", "sequenceParallelSize")
            ),
            message=(
                f"{role}.pipelineParallelSize times tensorParallelSize and sequenceParallelSize must divide the GPUs "
                f"of the {role}'s pool"
            ),
            field_path=f".{role}.pipelineParallelSize",
        )
        for role, (pool, is_idle) in _POOL_OF.items()
    ),
    *(
        Rule(
            rule=f"{is_idle}self.{role}.virtualPipelineParallelSize == 1 || self.{role}.pipelineParallelSize > 1",
            message=(
                f"{role}.virtualPipelineParallelSize above 1 needs pipelineParallelSize above 1: without a pipeline, "
                "set it to 1"
            ),
            field_path=f".{role}.virtualPipelineParallelSize",
        )
        for role, (_, is_idle) in _POOL_OF.items()
    ),
    *(
        Rule(
            rule=(
                f"{is_idle}!has(self.{role}.fsdpSize) || "
                f"(self.{role}.fsdpSize % self.{role}.sequenceParallelSize == 0 && "
                + _divide_pool(role, pool, "fsdpSize", "tensorParallelSize", "pipelineParallelSize")
                + ")"
            ),
            message=(
                f"{role}.fsdpSize must be a multiple of sequenceParallelSize, and times tensorParallelSize and "
                f"pipelineParallelSize it must divide the GPUs of the {role}'s pool"
            ),
            field_path=f".{role}.fsdpSize",
        )
        for role, (pool, is_idle) in _POOL_OF.items()
    ),
    *(
        Rule(
            rule=(
                f"{is_idle}self.{role}.expertParallelSize == 1 || "
                f"(has(self.{role}.fsdpSize) ? "
                f"(self.{role}.fsdpSize * self.{role}.tensorParallelSize) % self.{role}.expertParallelSize == 0 : "
                + _divide_pool(role, pool, "expertParallelSize", "pipelineParallelSize")
                + ")"
            ),
            message=(
                f"{role}.expertParallelSize must divide fsdpSize times tensorParallelSize, or without fsdpSize the "
                f"GPUs of each pipeline stage in the {role}'s pool"
            ),
            field_path=f".{role}.expertParallelSize",
        )
        for role, (pool, is_idle) in _POOL_OF.items()
    ),
    *(
        Rule(
            rule=(
                f"self.rollout.{field} == 1 || self.device == 'CPU' || "
                f"self.pools.all(p, !(p.name in {ROLLOUT_POOLS}) || "
                f"p.gpusPerNode % {size} == 0 || (!has(p.elastic) && "
                f"{size} % p.gpusPerNode == 0 && ({NODES} * p.gpusPerNode) % {size} == 0))"
            ),
            message=(
                f"{name} must divide gpusPerNode of each pool that generates, or be a multiple of it that divides the "
                "GPUs of the pool; in an elastic pool it must divide gpusPerNode"
            ),
            field_path=f".rollout.{field}",
        )
        for field, (size, name) in _REPLICAS.items()
    ),
    *(
        Rule(
            rule=(
                f"self.rollout.{field} == 1 || self.device != 'CPU' || "
                f"self.pools.all(p, !(p.name in {ROLLOUT_POOLS}) || (!has(p.elastic) && {NODES} % {size} == 0))"
            ),
            message=(
                f"with device CPU, {name} must divide the nodes of each pool that generates; in an elastic pool it "
                "must be 1"
            ),
            field_path=f".rollout.{field}",
        )
        for field, (size, name) in _REPLICAS.items()
    ),
]


def _groups_fit_their_nodes(spec: PPOJobSpec) -> Iterator[Problem]:
    """Ranks that compute a layer together communicate in every layer, so a node has all of them.

    Only those that gather keys and values may be on several nodes: the trainer divides heads inside a node.
    """
    for role, training, pool in placed(spec):
        node, peers = pool.gpus_per_node, training.num_peers
        if node % peers == 0:
            continue
        may_span = training.engine is Engine.FSDP and node % training.tensor_parallel_size == 0
        if may_span and peers % node == 0 and pool.gpus % peers == 0:
            continue
        # If the layers fit a node, only the slices can be the reason.
        field, value = ("sequenceParallelSize", training.sequence_parallel_size) if may_span else _larger(training)
        size = f"tensorParallelSize x sequenceParallelSize = {peers}"
        why = f"does not divide the {node} GPUs of a node of pool {pool.name}"
        if role == "ref":
            remedy = f"set placement.ref to [{spec.placement.actor}], or give its nodes more GPUs"
            yield f"actor.{field}", value, f"the reference is divided like the actor, and {size} {why}: {remedy}"
        elif may_span:
            if peers % node:
                why += ", and is no multiple of them"
                remedy = "use a divisor or a multiple"
            else:
                why += f", and its nodes together have {pool.gpus}, of which it is no divisor"
                remedy = "use other sizes, give its nodes more GPUs, or add nodes"
            yield f"{role}.{field}", value, f"{size} {why}: {remedy}"
        else:
            yield f"{role}.{field}", value, f"{size} {why}: use divisors, or give its nodes more GPUs"


def _stages_fill_the_pools(spec: PPOJobSpec) -> Iterator[Problem]:
    """All stages have equally many GPUs, in whole groups that compute a layer together."""
    for role, training, pool in placed(spec):
        stages = training.pipeline_parallel_size
        if stages == 1 or pool.gpus % (stages * training.num_peers) == 0:
            continue
        group = f"times tensorParallelSize x sequenceParallelSize = {training.num_peers} " * (training.num_peers > 1)
        why = f"{group}does not divide the {pool.gpus} GPUs of pool {pool.name}"
        if role == "ref":
            remedy = f"set placement.ref to [{spec.placement.actor}], or use a divisor"
            why = f"the reference is divided like the actor, and it {why}"
            yield "actor.pipelineParallelSize", stages, f"{why}: {remedy}"
        else:
            yield f"{role}.pipelineParallelSize", stages, f"{why}: use a divisor, or remove the field"


def _virtual_stages_are_of_a_pipeline(spec: PPOJobSpec) -> Iterator[Problem]:
    for role, training, _ in placed(spec):
        number = training.virtual_pipeline_parallel_size
        # The reference has the actor's sizes.
        if role != "ref" and number > 1 and training.pipeline_parallel_size == 1:
            why = (
                f"only stages of a pipeline are divided further, and {role}.pipelineParallelSize is 1: set "
                f"{role}.pipelineParallelSize above 1, or {role}.virtualPipelineParallelSize to 1"
            )
            yield f"{role}.virtualPipelineParallelSize", number, why


def _copies_fill_the_pools(spec: PPOJobSpec) -> Iterator[Problem]:
    for role, training, pool in placed(spec):
        size, tensor, sequence = training.fsdp_size, training.tensor_parallel_size, training.sequence_parallel_size
        if size is None:
            continue
        field = f"{'actor' if role == 'ref' else role}.fsdpSize"
        if size % sequence:
            yield field, size, f"sequenceParallelSize is {sequence}: use a multiple of it, or remove the field"
        elif pool.gpus % (size * tensor * training.pipeline_parallel_size):
            divisions = {"tensorParallelSize": tensor, "pipelineParallelSize": training.pipeline_parallel_size}
            named = " and ".join(f"{name} {number}" for name, number in divisions.items() if number > 1)
            product = f"times {named} it" if named else "it"
            of_ref = "the reference is divided like the actor, and " if role == "ref" else ""
            remedy = f"set placement.ref to [{spec.placement.actor}], or " if role == "ref" else ""
            why = f"{product} does not divide the {pool.gpus} GPUs of pool {pool.name}"
            yield field, size, f"{of_ref}{why}: {remedy}use a divisor, or remove the field"


def _experts_fill_the_copies(spec: PPOJobSpec) -> Iterator[Problem]:
    """The ranks of a copy, or of its stage, are divided into whole groups that have all experts."""
    for role, training, pool in placed(spec):
        size, stages = training.expert_parallel_size, training.pipeline_parallel_size
        tensor = training.tensor_parallel_size
        if size == 1:
            continue
        if training.fsdp_size is not None and role != "ref" and training.fsdp_size * tensor % size:
            times = f" times tensorParallelSize {tensor}" * (tensor > 1)
            why = f"does not divide fsdpSize {training.fsdp_size}{times}: use a divisor, or remove the field"
            yield f"{role}.expertParallelSize", size, why
        elif training.fsdp_size is None and pool.gpus % (size * stages):
            of_stages = f"times pipelineParallelSize {stages} " * (stages > 1)
            why = f"{of_stages}does not divide the {pool.gpus} GPUs of pool {pool.name}"
            if role == "ref":
                remedy = f"set placement.ref to [{spec.placement.actor}], or use a divisor"
                yield (
                    "actor.expertParallelSize",
                    size,
                    f"the reference is divided like the actor, and it {why}: {remedy}",
                )
            else:
                yield f"{role}.expertParallelSize", size, f"{why}: use a divisor, or remove the field"


def placed(spec: PPOJobSpec) -> Iterator[tuple[str, Trained, Pool]]:
    """Yield the roles that are divided, with their sizes and pools; the reference for each pool but the actor's."""
    placement, pools = spec.placement, {pool.name: pool for pool in spec.pools}
    critic = (placement.critic or placement.actor) if spec.algorithm.needs_critic else None
    has_copy = spec.algorithm.needs_reference and not spec.model.reference_is_actor
    copies = (placement.ref_pools or (critic or placement.actor,)) if has_copy else ()
    found = [("actor", spec.actor, placement.actor), ("critic", spec.critic, critic)]
    found += [("ref", spec.actor, pool) for pool in copies if pool != placement.actor]
    for role, training, name in found:
        if name in pools:
            yield role, training, pools[name]


def _replicas_fit_their_nodes(spec: PPOJobSpec) -> Iterator[Problem]:
    rollout = spec.rollout
    tensor, stages = rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    for pool in spec.pools:
        if pool.name not in spec.placement.rollout_pools:
            continue
        if remedy := _remedy_of_replicas(spec.device, pool, tensor):
            yield "rollout.tensorParallelSize", tensor, remedy
        elif remedy := _remedy_of_replicas(spec.device, pool, rollout.gpus_per_replica):
            times = f"times tensorParallelSize {tensor}, which is {rollout.gpus_per_replica}: " * (tensor > 1)
            yield "rollout.pipelineParallelSize", stages, f"{times}{remedy}"


def _remedy_of_replicas(device: Device, pool: Pool, size: int) -> str | None:
    """Return why a pool is not divided into replicas of `size` GPUs (CPU: nodes), and what to do; None: it is.

    A replica has a part of a node, or whole nodes. In an elastic pool it has no more than one, because nodes leave.
    """
    node, name, is_elastic = pool.gpus_per_node, pool.name, pool.elastic is not None
    if device is Device.CPU:
        if is_elastic and size > 1:
            return f"with device CPU, an engine of the elastic pool {name} has one node: set it to 1"
        if pool.nodes % size:
            return f"with device CPU, it does not divide the {pool.nodes} nodes of pool {name}: use a divisor"
        return None
    if node % size == 0 or (not is_elastic and size % node == 0 and pool.gpus % size == 0):
        return None
    why = f"it does not divide the {node} GPUs of a node of pool {name}"
    if is_elastic:
        return f"{why}, and an engine of an elastic pool has one node: use a divisor"
    return f"{why}: use a divisor, or a multiple of {node} that divides all {pool.gpus} GPUs of the pool"


def _larger(training: Trained) -> tuple[str, int]:
    """Return the size to name in the error."""
    if training.tensor_parallel_size >= training.sequence_parallel_size:
        return "tensorParallelSize", training.tensor_parallel_size
    return "sequenceParallelSize", training.sequence_parallel_size


PARALLEL_CHECKS = (
    _groups_fit_their_nodes,
    _stages_fill_the_pools,
    _virtual_stages_are_of_a_pipeline,
    _copies_fill_the_pools,
    _experts_fill_the_copies,
    _replicas_fit_their_nodes,
)
