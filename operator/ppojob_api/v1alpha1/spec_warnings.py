"""Warnings about settings of a valid spec that are probably a mistake.

`ppojob validate`, the admission webhook (in kubectl's output) and condition Accepted show them. A warning must almost
always be right, because users ignore noise. Errors are in `rules.py`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ppojob_api.v1alpha1.algorithm import PolicyLoss
from ppojob_api.v1alpha1.parallel_rules import placed
from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import DEFAULT_STALENESS, ScheduleMode, WeightUpdates
from ppojob_api.v1alpha1.validation import FieldError

_ANY_GPU = (None, "nvidia.com/gpu", "amd.com/gpu")
"""Resource names that every GPU model has."""
_LARGE_FOR_GSPO = 0.1
_MOVING_TAGS = ("", "latest")


def spec_warnings(spec: PPOJobSpec) -> Iterator[FieldError]:
    """Yield the warnings about a spec, each with the field's path, the value and what to do."""
    yield from _nothing_is_saved(spec)
    yield from _image_moves(spec)
    yield from _nothing_to_balance(spec)
    yield from _reward_limit_is_no_limit(spec)
    yield from _gspo_is_hardly_clipped(spec)
    yield from _is_off_policy(spec)
    yield from _copies_cross_nodes(spec)
    yield from _experts_cross_nodes(spec)
    yield from _topology_without_a_queue(spec)
    if spec.device is Device.CUDA:
        for index, pool in enumerate(spec.pools):
            yield from _kinds_are_mixed(pool, f"spec.pools[{index}]")


def _image_moves(spec: PPOJobSpec) -> Iterator[FieldError]:
    name, _, digest = spec.image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if not digest and tag in _MOVING_TAGS:
        remedy = "this tag is mutable, and pods that start later may get another image: use a version or a digest"
        yield FieldError("spec.image", spec.image, remedy)


def _nothing_is_saved(spec: PPOJobSpec) -> Iterator[FieldError]:
    if spec.checkpoint.every_steps == 0:
        remedy = (
            "no checkpoint is saved before the end, so after a failure the job restarts at its first step: set "
            "it above 0"
        )
        yield FieldError("spec.checkpoint.everySteps", 0, remedy)


def _reward_limit_is_no_limit(spec: PPOJobSpec) -> Iterator[FieldError]:
    function, phase_s = spec.reward.function, spec.trainer.phase_timeout_seconds
    if function is not None and function.timeout_seconds >= phase_s:
        remedy = (
            f"trainer.phaseTimeoutSeconds ({phase_s}) ends the phase first, so onError is never applied: set it lower"
        )
        yield FieldError("spec.reward.function.timeoutSeconds", function.timeout_seconds, remedy)


def _gspo_is_hardly_clipped(spec: PPOJobSpec) -> Iterator[FieldError]:
    high = spec.actor.clip_ratio_high
    if spec.algorithm.policy_loss is PolicyLoss.GSPO and high >= _LARGE_FOR_GSPO:
        remedy = "GSPO's ratio is a mean over a response's tokens and stays near 1: the paper clips at 4e-4 (low: 3e-4)"
        yield FieldError("spec.actor.clipRatioHigh", high, remedy)


def _is_off_policy(spec: PPOJobSpec) -> Iterator[FieldError]:
    mode = spec.schedule.mode
    if mode is ScheduleMode.ONE_STEP_OFF:
        steps = spec.schedule.max_staleness or DEFAULT_STALENESS
        remedy = (
            f"this job is not trained on-policy: responses come from weights up to {steps} step"
            f"{'s' * (steps > 1)} old; for on-policy training, use Auto"
        )
        yield FieldError("spec.schedule.mode", mode.value, remedy)
    if spec.schedule.updates_in_flight:
        remedy = (
            "which weights sample a token depends on measured times, so the same seed gives other results each time; "
            "for equal results, use BetweenGenerations"
        )
        yield FieldError("spec.schedule.weightUpdates", WeightUpdates.IN_FLIGHT.value, remedy)


def _copies_cross_nodes(spec: PPOJobSpec) -> Iterator[FieldError]:
    pools = {pool.name: pool for pool in spec.pools}
    critic = spec.placement.critic if spec.algorithm.needs_critic else None
    for role, training, name in (("actor", spec.actor, spec.placement.actor), ("critic", spec.critic, critic)):
        pool = pools.get(name or "")
        if pool is None or training.fsdp_size is None:
            continue
        copy, node = training.fsdp_size * training.tensor_parallel_size, pool.gpus_per_node
        if copy % node and node % copy:
            what = "the model" if training.pipeline_parallel_size == 1 else "a pipeline stage"
            remedy = (
                f"a copy of {what} has {copy} GPUs, and nodes of pool {pool.name} have {node}, so some copies are "
                "gathered across nodes: let one divide the other"
            )
            yield FieldError(f"spec.{role}.fsdpSize", training.fsdp_size, remedy)


def _experts_cross_nodes(spec: PPOJobSpec) -> Iterator[FieldError]:
    """Groups are consecutive GPUs from a multiple of their size on: none spans nodes if it divides a node's GPUs."""
    warned: set[str] = set()
    for role, training, pool in placed(spec):
        field = f"spec.{'actor' if role == 'ref' else role}.expertParallelSize"
        size, node = training.expert_parallel_size, pool.gpus_per_node
        if node % size == 0 or field in warned:
            continue
        warned.add(field)
        # Permitted: it divides all that the present size divides, the GPUs of a copy and the model's experts.
        inside = math.gcd(size, node)
        remedy = f"set it to {inside}" if inside > 1 else "remove the field"
        if role == "ref":
            remedy = f"set placement.ref to [{spec.placement.actor}], or {remedy}"
        yield FieldError(
            field,
            size,
            f"{'the reference is divided like the actor, and ' * (role == 'ref')}nodes of pool {pool.name} have {node} "
            f"GPUs, so groups of {size} span nodes and exchange tokens over the network twice in each layer with "
            f"experts: if GPU memory allows, {remedy}",
        )


def _topology_without_a_queue(spec: PPOJobSpec) -> Iterator[FieldError]:
    for index, pool in enumerate(spec.pools):
        if pool.topology is not None and spec.run_policy.queue_name is None:
            remedy = "only Kueue reads it, and the job names no queue: set runPolicy.queueName"
            yield FieldError(f"spec.pools[{index}].topology", pool.topology.to_wire(), remedy)


def _nothing_to_balance(spec: PPOJobSpec) -> Iterator[FieldError]:
    if spec.auto_balance.enabled and spec.run_policy.queue_name is not None:
        remedy = (
            "autoBalance does not resize pools of a job in a queue: use only one of autoBalance and runPolicy.queueName"
        )
        yield FieldError("spec.autoBalance.enabled", True, remedy)
        return
    is_bound = all((pool.min_nodes or pool.nodes) == (pool.max_nodes or pool.nodes) for pool in spec.pools)
    if spec.auto_balance.enabled and is_bound:
        remedy = (
            "no pool can be resized, because minNodes and maxNodes equal nodes or are not set: set minNodes and "
            "maxNodes"
        )
        yield FieldError("spec.autoBalance.enabled", True, remedy)


def _kinds_are_mixed(pool: Pool, path: str) -> Iterator[FieldError]:
    if max(pool.nodes, pool.max_nodes or 0) == 1:
        return
    pod = _object(pool.pod_template, "spec")
    terms = _node_terms(pod)
    mixed = [name for term in terms for name in _gpu_values(term)]
    if mixed:
        remedy = (
            "the pool may get several kinds of GPU, and each step waits for the slowest: name one kind, or use "
            "two pools"
        )
        yield FieldError(f"{path}.podTemplate.spec.affinity.nodeAffinity", mixed, remedy)
    is_pinned = bool(pool.node_selector or pod.get("nodeSelector") or terms)
    if not is_pinned and pool.gpu_resource_name in _ANY_GPU:
        remedy = (
            f"no node selector chooses the kind of GPU for the {pool.nodes} pods; if the cluster has several kinds, "
            "each step waits for the slowest: name one, such as {nvidia.com/gpu.product: ...}"
        )
        yield FieldError(f"{path}.nodeSelector", None, remedy)


def _node_terms(pod: Mapping[str, Any]) -> list[Any]:
    """Return the node selector terms of a pod template, which is not validated yet."""
    affinity = _object(_object(pod, "affinity"), "nodeAffinity")
    terms = _object(affinity, "requiredDuringSchedulingIgnoredDuringExecution").get("nodeSelectorTerms")
    return terms if isinstance(terms, list) else []


def _gpu_values(term: Any) -> list[str]:
    """Return the values that a term allows for a GPU label, if it allows several."""
    expressions = term.get("matchExpressions") if isinstance(term, Mapping) else None
    for expression in expressions if isinstance(expressions, list) else []:
        is_about_gpus = isinstance(expression, Mapping) and "gpu" in str(expression.get("key", "")).lower()
        values = expression.get("values") if is_about_gpus and expression.get("operator") == "In" else None
        if isinstance(values, list) and len(values) > 1:
            return [str(value) for value in values]
    return []


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}
