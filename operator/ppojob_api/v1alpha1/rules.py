"""Rules of the spec that span fields, each in CEL for the API server and in Python for everybody else.

`policy.py` puts the CEL of rules on the whole spec into the ValidatingAdmissionPolicy, and `schema.py` that of rules on
one of its sections into the CRD. `validation.py` runs the Python. One table of bad specs tests both.
"""

from collections.abc import Callable, Iterator

from ppojob_api.v1alpha1.algorithm import RolloutCorrection
from ppojob_api.v1alpha1.algorithm_rules import ALGORITHM_CHECKS, ALGORITHM_RULES
from ppojob_api.v1alpha1.base import ApiModel, Problem, Rule
from ppojob_api.v1alpha1.batch_rules import BATCH_CHECKS, BATCH_CHECKS_OF_NEW_JOBS, BATCH_RULES
from ppojob_api.v1alpha1.constants import RAY_HEAD_PORTS
from ppojob_api.v1alpha1.data_rules import DATA_CHECKS, DATA_RULES
from ppojob_api.v1alpha1.device_rules import CLAIM_RULES, DEVICE_CHECKS, DEVICE_RULES
from ppojob_api.v1alpha1.elastic_rules import ELASTIC_CHECKS, ELASTIC_POOL_RULES, ELASTIC_RULES
from ppojob_api.v1alpha1.engine_rules import ENGINE_CHECKS, ENGINE_RULES, EXPERT_RULES
from ppojob_api.v1alpha1.export_rules import EXPORT_CHECKS, EXPORT_RULES
from ppojob_api.v1alpha1.model_rules import MODEL_CHECKS, MODEL_RULES
from ppojob_api.v1alpha1.network import PoolNetwork
from ppojob_api.v1alpha1.network_rules import NETWORK_CHECKS, NETWORK_RULES
from ppojob_api.v1alpha1.off_policy_rules import (
    CORRECTION_RULES,
    OFF_POLICY_CHECKS,
    OFF_POLICY_RULES,
    STALENESS_RULES,
)
from ppojob_api.v1alpha1.parallel_rules import NODES, PARALLEL_CHECKS, PARALLEL_RULES
from ppojob_api.v1alpha1.path_rules import PATH_CHECKS, PATH_RULES
from ppojob_api.v1alpha1.placement_rules import (
    ACTOR_POOL,
    CRITIC_POOL,
    DISTINCT_POOLS_RULES,
    PLACEMENT_CHECKS,
    PLACEMENT_RULES,
)
from ppojob_api.v1alpha1.pod_rules import POD_CHECKS
from ppojob_api.v1alpha1.pools import Placement, Pool, Topology
from ppojob_api.v1alpha1.quantization_rules import QUANTIZATION_CHECKS, QUANTIZATION_RULES
from ppojob_api.v1alpha1.queue_rules import QUEUE_CHECKS, QUEUE_RULES, TOPOLOGY_RULES
from ppojob_api.v1alpha1.reward import RewardType
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.template_rules import TEMPLATE_RULES
from ppojob_api.v1alpha1.training import CheckpointSpec, ScheduleMode, ScheduleSpec
from ppojob_api.v1alpha1.workers import RESERVED_NAMES

_RAY_PORTS = sorted(RAY_HEAD_PORTS.values())

SPEC_RULES = [
    *PLACEMENT_RULES,
    *BATCH_RULES,
    *DATA_RULES,
    *ALGORITHM_RULES,
    *ENGINE_RULES,
    Rule(
        rule=f"self.schedule.mode != 'ParallelUpdate' || {CRITIC_POOL} != {ACTOR_POOL}",
        message="ParallelUpdate needs actor and critic in different pools: use Auto, or give the critic its own pool",
        field_path=".schedule.mode",
    ),
    Rule(
        rule=f"self.pools.all(p, !has(p.minNodes) || p.minNodes <= {NODES})",
        message="minNodes of a pool must not be above its nodes",
        field_path=".pools",
        value=f"self.pools.filter(p, has(p.minNodes) && p.minNodes > {NODES}).map(p, p.name)",
    ),
    Rule(
        rule=f"self.pools.all(p, !has(p.maxNodes) || {NODES} <= p.maxNodes)",
        message="maxNodes of a pool must not be below its nodes",
        field_path=".pools",
        value=f"self.pools.filter(p, has(p.maxNodes) && {NODES} > p.maxNodes).map(p, p.name)",
    ),
    Rule(
        rule=(
            "!has(self.schedule.disabledOverlaps) || size(self.schedule.disabledOverlaps) == 0 || "
            "self.schedule.mode in ['Auto', 'Overlapped']"
        ),
        message="only mode Overlapped has overlaps to disable",
        field_path=".schedule.disabledOverlaps",
    ),
    Rule(
        rule="(self.reward.type == 'Function') != has(self.model.reward)",
        message="reward.type Model and Both need model.reward; type Function must not have it",
        field_path=".model.reward",
    ),
    Rule(
        rule="!has(self.workers) || self.workers.all(w, self.pools.exists(p, p.name == w.pool))",
        message="the pool of each worker must be the name of one of spec.pools",
        field_path=".workers",
        value="self.workers.filter(w, !self.pools.exists(p, p.name == w.pool)).map(w, w.pool)",
    ),
    Rule(
        rule=f"!(self.telemetry.?prometheusPort.orValue(0) in {_RAY_PORTS})",
        message="this port of the head pod is Ray's own; choose another, or 0 for none",
        field_path=".telemetry.prometheusPort",
    ),
    *CLAIM_RULES,
    *ELASTIC_RULES,
    *OFF_POLICY_RULES,
    *EXPERT_RULES,
    *QUANTIZATION_RULES,
    *MODEL_RULES,
    *PARALLEL_RULES,
    *QUEUE_RULES,
    *PATH_RULES,
    *TEMPLATE_RULES,
]
"""Rules on the whole spec: of the policy."""

RULES_OF: dict[type[ApiModel], list[Rule]] = {
    Placement: DISTINCT_POOLS_RULES,
    Pool: [*DEVICE_RULES, *ELASTIC_POOL_RULES],
    PoolNetwork: NETWORK_RULES,
    Topology: TOPOLOGY_RULES,
    CheckpointSpec: EXPORT_RULES,
    ScheduleSpec: STALENESS_RULES,
    RolloutCorrection: CORRECTION_RULES,
}
"""Rules on a section of the spec: of the CRD, by the section's model."""


def check(spec: PPOJobSpec, *, is_accepted: bool = False) -> Iterator[Problem]:
    """Yield every problem of a spec that spans fields.

    Args:
        is_accepted: leave out what a job may have that an earlier version accepted, and with which it can run.
    """
    for rule in _CHECKS if is_accepted else (*_CHECKS, *BATCH_CHECKS_OF_NEW_JOBS):
        yield from rule(spec)


def _pool_names_are_unique(spec: PPOJobSpec) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, pool in enumerate(spec.pools):
        if pool.name in seen:
            yield f"pools[{index}].name", pool.name, "another pool has this name: give each pool a different name"
        seen.add(pool.name)


def _nodes_are_within_their_bounds(spec: PPOJobSpec) -> Iterator[Problem]:
    for index, pool in enumerate(spec.pools):
        if pool.min_nodes is not None and pool.min_nodes > pool.nodes:
            yield f"pools[{index}].minNodes", pool.min_nodes, f"is above nodes, which is {pool.nodes}: lower it"
        if pool.max_nodes is not None and pool.max_nodes < pool.nodes:
            yield f"pools[{index}].maxNodes", pool.max_nodes, f"is below nodes, which is {pool.nodes}: raise it"


def _env_names_are_unique(spec: PPOJobSpec) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, variable in enumerate(spec.env):
        if variable.name in seen:
            yield f"env[{index}].name", variable.name, "this variable is set twice: remove one"
        seen.add(variable.name)


def _parallel_updates_need_two_pools(spec: PPOJobSpec) -> Iterator[Problem]:
    is_split = spec.placement.critic not in (None, spec.placement.actor)
    if spec.schedule.mode is ScheduleMode.PARALLEL_UPDATE and not is_split:
        remedy = "needs actor and critic in different pools: use Auto, or give the critic its own pool"
        yield "schedule.mode", spec.schedule.mode.value, remedy


def _only_overlapped_has_overlaps_to_disable(spec: PPOJobSpec) -> Iterator[Problem]:
    schedule = spec.schedule
    if schedule.disabled_overlaps and schedule.mode not in (ScheduleMode.AUTO, ScheduleMode.OVERLAPPED):
        value = [overlap.value for overlap in schedule.disabled_overlaps]
        yield (
            "schedule.disabledOverlaps",
            value,
            f"mode {schedule.mode} has no overlaps to disable: use Overlapped, or remove it",
        )


def _the_run_has_one_length(spec: PPOJobSpec) -> Iterator[Problem]:
    trainer = spec.trainer
    if trainer.total_steps is not None and trainer.total_epochs is not None:
        remedy = (
            f"only one of totalSteps and totalEpochs may be set, and totalSteps is {trainer.total_steps}: remove "
            "one of the two"
        )
        yield "trainer.totalEpochs", trainer.total_epochs, remedy


def _prometheus_has_a_port_of_its_own(spec: PPOJobSpec) -> Iterator[Problem]:
    port = spec.telemetry.prometheus_port
    if port in _RAY_PORTS:
        yield "telemetry.prometheusPort", port, "this port of the head pod is Ray's own: choose another, or 0 for none"


def _reward_has_what_its_type_reads(spec: PPOJobSpec) -> Iterator[Problem]:
    reward, kind = spec.reward, spec.reward.type.value
    if reward.uses_function and reward.function is None:
        yield "reward.function", None, f"type {kind} needs the block reward.function: add it"
    if not reward.uses_function and reward.function is not None:
        yield "reward.function", None, f"type {kind} does not use a function: remove it, or set type: Both"
    if reward.uses_model and spec.model.reward is None:
        yield "model.reward", None, f"reward.type {kind} needs the block model.reward with a path: add it"
    if not reward.uses_model and spec.model.reward is not None:
        remedy = f"reward.type {kind} does not use a model: remove it, or set reward.type to Model or Both"
        yield "model.reward.path", spec.model.reward.path, remedy


def _reward_weights_weigh(spec: PPOJobSpec) -> Iterator[Problem]:
    weights = spec.reward.weights
    if weights is None:
        return
    shown = {"function": weights.function, "model": weights.model}
    if spec.reward.type is not RewardType.BOTH:
        yield "reward.weights", shown, "only type Both uses weights: remove them, or set type: Both"
    elif weights.function == 0 and weights.model == 0:
        yield "reward.weights", shown, "every score would be 0: set at least one weight to another value"


def _reward_is_module_or_file(spec: PPOJobSpec) -> Iterator[Problem]:
    function = spec.reward.function
    if function is not None and (function.module is None) == (function.path is None):
        value = {"module": function.module, "path": function.path}
        yield "reward.function", value, "set exactly one of module and path"


def _workers_have_names_pools_and_classes(spec: PPOJobSpec) -> Iterator[Problem]:
    pools = [pool.name for pool in spec.pools]
    seen: set[str] = set()
    for index, worker in enumerate(spec.workers):
        where = f"workers[{index}]"
        if worker.name in RESERVED_NAMES:
            yield f"{where}.name", worker.name, "this is the name of a built-in worker group: choose another"
        if worker.name in seen:
            yield f"{where}.name", worker.name, "another worker has this name: give each worker a different name"
        seen.add(worker.name)
        if worker.pool not in pools:
            remedy = f"there is no pool of this name: use one of {', '.join(pools)}, or add the pool"
            yield f"{where}.pool", worker.pool, remedy
        if (worker.module is None) == (worker.path is None):
            value = {"module": worker.module, "path": worker.path}
            yield where, value, "set exactly one of module and path"
        if worker.num_workers % (worker.tensor_parallel_size * worker.pipeline_parallel_size):
            remedy = "it must be a multiple of tensorParallelSize * pipelineParallelSize: change one of them"
            yield f"{where}.numWorkers", worker.num_workers, remedy


_CHECKS: tuple[Callable[[PPOJobSpec], Iterator[Problem]], ...] = (
    _pool_names_are_unique,
    _nodes_are_within_their_bounds,
    _env_names_are_unique,
    *PLACEMENT_CHECKS,
    *BATCH_CHECKS,
    *ALGORITHM_CHECKS,
    _parallel_updates_need_two_pools,
    _only_overlapped_has_overlaps_to_disable,
    *DATA_CHECKS,
    _reward_has_what_its_type_reads,
    _reward_weights_weigh,
    _reward_is_module_or_file,
    _workers_have_names_pools_and_classes,
    _the_run_has_one_length,
    _prometheus_has_a_port_of_its_own,
    *OFF_POLICY_CHECKS,
    *MODEL_CHECKS,
    *PARALLEL_CHECKS,
    *NETWORK_CHECKS,
    *QUEUE_CHECKS,
    *DEVICE_CHECKS,
    *ELASTIC_CHECKS,
    *ENGINE_CHECKS,
    *QUANTIZATION_CHECKS,
    *EXPORT_CHECKS,
    *PATH_CHECKS,
    *POD_CHECKS,
)
