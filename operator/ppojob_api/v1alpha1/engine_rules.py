"""Rules of the engines: the user's own training engines, and which of vLLM's arguments are not the user's to give.

`rules.py` puts them beside the others. That of `spec.rollout.engineArgs` is in Python alone: CEL does not see the keys
of an object without a schema. That a class has a module or a file is in CEL beside its fields. Whether a class
can be created, and which arguments vLLM has, is known to the trainer, which refuses the others before it loads a model.
"""

from collections.abc import Iterator, Mapping

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.engine import Engine, EngineClass
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec

_WEIGHTS = "the trainer sends the weights, and this changes how they are stored: remove it"
_PROCESSES = "the trainer starts the engine's processes: remove it"
_ALGORITHM = "this changes which responses are sampled: remove it"

RESERVED_ENGINE_ARGS: Mapping[str, str] = {
    "model": "use model.actor.path",
    "tokenizer": "the tokenizer is that of model.actor.path: remove it",
    "trust_remote_code": "use model.actor.trustRemoteCode",
    "max_model_len": "use data.maxPromptLength and data.maxResponseLength",
    "max_num_seqs": "use rollout.maxNumSeqs",
    "max_num_batched_tokens": "use rollout.maxNumBatchedTokens",
    "enable_chunked_prefill": "use rollout.enableChunkedPrefill",
    "enable_prefix_caching": "use rollout.enablePrefixCaching",
    "enforce_eager": "use rollout.enforceEager",
    "gpu_memory_utilization": "use rollout.gpuMemoryUtilization",
    "enable_sleep_mode": "use rollout.sleep",
    "tensor_parallel_size": "use rollout.tensorParallelSize",
    "seed": "use trainer.seed",
    "dtype": _WEIGHTS,
    "quantization": "use rollout.quantization",
    "quantization_config": "use rollout.quantization",
    "load_format": _WEIGHTS,
    "enable_lora": "use model.actor.lora: the engine gets the merged weights",
    "pipeline_parallel_size": "use rollout.pipelineParallelSize",
    "data_parallel_size": "the number of engines follows from the pool's GPUs: remove it",
    "enable_expert_parallel": "use rollout.enableExpertParallel",
    "enable_eplb": "the trainer sends each GPU its own experts, and this moves them between GPUs: remove it",
    "prefill_context_parallel_size": "use rollout.tensorParallelSize",
    "expert_placement_strategy": "some of vLLM's kernels need consecutive experts on each GPU: remove it",
    "distributed_executor_backend": _PROCESSES,
    "nnodes": "use rollout.pipelineParallelSize or tensorParallelSize, of more GPUs than a node has",
    "node_rank": _PROCESSES,
    "master_addr": _PROCESSES,
    "master_port": _PROCESSES,
    "worker_cls": _PROCESSES,
    "worker_extension_cls": _PROCESSES,
    "logprobs_mode": "the trainer compares its log-probs with these: remove it",
    "generation_config": _ALGORITHM,
    "enable_return_routed_experts": "use rollout.routingReplay",
    "aux_output_config": "use rollout.routingReplay",
    "speculative_config": "use rollout.speculative",
    "per_request_spec_decode_metrics": "the trainer reports the drafts of rollout.speculative: remove it",
    "disable_log_stats": "the trainer reports the engine's metrics: remove it",
}
"""Name of an argument of vLLM's AsyncEngineArgs -> what to do instead."""

SCHEDULING_ARGS = frozenset({"async_scheduling", "scheduler_cls", "scheduling_policy"})
"""Arguments with which the user chooses how vLLM schedules. Then vLLM's scheduler runs in place of the trainer's."""

_IS_ONE_STAGE = "self.rollout.pipelineParallelSize == 1"

ENGINE_RULES = [
    Rule(
        rule=f"!has(self.rollout.speculative) || {_IS_ONE_STAGE}",
        message="rollout.speculative drafts in engines of one stage: set rollout.pipelineParallelSize to 1",
        field_path=".rollout.pipelineParallelSize",
    ),
    *(
        Rule(
            rule=f"(self.{role}.engine == 'Class') == has(self.{role}.engineClass)",
            message=f"{role}.engine Class needs the block engineClass, and only Class reads it",
            field_path=f".{role}.engineClass",
        )
        for role in ("actor", "critic")
    ),
]

_BALANCE = "self.actor.routerAuxLossCoefficient"
_REPLAY = "self.rollout.routingReplay"
_DIVIDED = "self.rollout.enableExpertParallel"

EXPERT_RULES = [
    Rule(
        rule=f"!{_REPLAY} || self.rollout.enablePrefixCaching",
        message="vLLM keeps the experts of routingReplay beside its prefix cache: set enablePrefixCaching to true",
        field_path=".rollout.enablePrefixCaching",
    ),
    Rule(
        rule=f"!{_REPLAY} || !has(self.rollout.speculative)",
        message="routingReplay does not record the experts of drafts: remove rollout.speculative",
        field_path=".rollout.speculative",
    ),
    Rule(
        rule=f"!{_REPLAY} || self.schedule.?weightUpdates.orValue('') != 'InFlight'",
        message="routingReplay does not record responses of several weights: use weightUpdates BetweenGenerations",
        field_path=".schedule.weightUpdates",
    ),
    Rule(
        rule=f"!{_REPLAY} || self.actor.engine == 'FSDP'",
        message="a training engine of class Class does not replay experts: set rollout.routingReplay to false",
        field_path=".rollout.routingReplay",
    ),
    Rule(
        rule=f"!{_REPLAY} || {_IS_ONE_STAGE}",
        message="routingReplay records the experts of one stage: set rollout.pipelineParallelSize to 1",
        field_path=".rollout.pipelineParallelSize",
    ),
    Rule(
        rule=f"!{_DIVIDED} || self.rollout.tensorParallelSize > 1",
        message=(
            "the GPUs of an engine divide its experts: set rollout.tensorParallelSize above 1, or "
            "enableExpertParallel to false"
        ),
        field_path=".rollout.enableExpertParallel",
    ),
    Rule(
        rule=f"!{_DIVIDED} || self.device != 'CPU'",
        message="vLLM's CPU kernels ignore which experts a worker has: set enableExpertParallel to false",
        field_path=".rollout.enableExpertParallel",
    ),
    Rule(
        rule=f"{_BALANCE} == 0.0 || self.actor.engine == 'FSDP'",
        message="an engine of class Class has no load-balancing loss: set actor.routerAuxLossCoefficient to 0",
        field_path=".actor.routerAuxLossCoefficient",
    ),
    Rule(
        rule=f"{_BALANCE} == 0.0 || !self.model.actor.compile",
        message="compiled layers have no load-balancing loss: set model.actor.compile to false",
        field_path=".model.actor.compile",
    ),
]
"""Of fields for mixtures of experts. The trainer knows whether the model is one, and refuses others."""


def engine_classes(spec: PPOJobSpec) -> Iterator[tuple[str, EngineClass]]:
    """Yield the path and the block of each of the user's training engines."""
    for role, training in (("actor", spec.actor), ("critic", spec.critic)):
        if training.engine_class is not None:
            yield f"{role}.engineClass", training.engine_class


def _engine_classes_are_read(spec: PPOJobSpec) -> Iterator[Problem]:
    for role, training in (("actor", spec.actor), ("critic", spec.critic)):
        where, is_given = f"{role}.engineClass", training.engine_class is not None
        if training.engine is Engine.CLASS and not is_given:
            yield where, None, "engine Class needs this block with className and a module or a path: add it"
        if training.engine is not Engine.CLASS and is_given:
            remedy = f"engine {training.engine.value} reads no class: remove the block, or set {role}.engine: Class"
            yield where, None, remedy


def _engine_classes_are_module_or_file(spec: PPOJobSpec) -> Iterator[Problem]:
    for where, own in engine_classes(spec):
        if (own.module is None) == (own.path is None):
            yield where, {"module": own.module, "path": own.path}, "set exactly one of module and path"


def _engine_args_are_the_users(spec: PPOJobSpec) -> Iterator[Problem]:
    for name, value in spec.rollout.engine_args.items():
        if name in RESERVED_ENGINE_ARGS:
            yield f"rollout.engineArgs.{name}", value, RESERVED_ENGINE_ARGS[name]


def _drafts_are_of_one_stage(spec: PPOJobSpec) -> Iterator[Problem]:
    rollout = spec.rollout
    if rollout.speculative is not None and rollout.pipeline_parallel_size > 1:
        remedy = "rollout.speculative drafts in engines of one stage: set it to 1, or remove rollout.speculative"
        yield "rollout.pipelineParallelSize", rollout.pipeline_parallel_size, remedy


def _the_trainers_scheduler_is_there(spec: PPOJobSpec) -> Iterator[Problem]:
    needs = {
        "rollout.speculative": spec.rollout.speculative is not None,
        "schedule.weightUpdates: InFlight": spec.schedule.updates_in_flight,
        "rollout.routingReplay": spec.rollout.routing_replay,
    }
    needing = next((field for field, is_set in needs.items() if is_set), None)
    for name, value in spec.rollout.engine_args.items():
        if name in SCHEDULING_ARGS and needing is not None:
            remedy = f"{needing} needs the trainer's scheduler: remove rollout.engineArgs.{name}, or {needing}"
            yield f"rollout.engineArgs.{name}", value, remedy


def _experts_can_be_replayed(spec: PPOJobSpec) -> Iterator[Problem]:
    rollout, replay = spec.rollout, "rollout.routingReplay"
    if not rollout.routing_replay:
        return
    if not rollout.enable_prefix_caching:
        remedy = (
            f"vLLM keeps the experts of {replay} beside its prefix cache: set rollout.enablePrefixCaching: true, or "
            f"{replay}: false"
        )
        yield "rollout.enablePrefixCaching", rollout.enable_prefix_caching, remedy
    if rollout.speculative is not None:
        given = rollout.speculative.to_wire()
        remedy = f"{replay} does not record the experts of drafts: remove rollout.speculative, or set {replay}: false"
        yield "rollout.speculative", given, remedy
    if rollout.pipeline_parallel_size > 1:
        remedy = f"{replay} records the experts of one stage: set it to 1, or {replay}: false"
        yield "rollout.pipelineParallelSize", rollout.pipeline_parallel_size, remedy
    if spec.schedule.updates_in_flight:
        remedy = (
            f"{replay} does not record responses of several weights: set BetweenGenerations, or set {replay}: false"
        )
        yield "schedule.weightUpdates", "InFlight", remedy
    if spec.actor.engine is Engine.CLASS:
        yield (
            replay,
            True,
            "a training engine of actor.engineClass does not replay experts: set rollout.routingReplay: false",
        )


def _engines_can_divide_experts(spec: PPOJobSpec) -> Iterator[Problem]:
    rollout, where = spec.rollout, "rollout.enableExpertParallel"
    if not rollout.enable_expert_parallel:
        return
    if rollout.tensor_parallel_size == 1:
        remedy = (
            "the GPUs of an engine divide its experts, and rollout.tensorParallelSize is 1: set it above 1, or "
            f"{where}: false"
        )
        yield where, True, remedy
    if spec.device is Device.CPU:
        remedy = f"vLLM's CPU kernels ignore which experts a worker has: set {where}: false, or device: CUDA"
        yield where, True, remedy


def _experts_can_be_balanced(spec: PPOJobSpec) -> Iterator[Problem]:
    coefficient = spec.actor.router_aux_loss_coefficient
    if coefficient == 0:
        return
    if spec.actor.engine is Engine.CLASS:
        remedy = "a training engine of actor.engineClass has no load-balancing loss: set it to 0"
        yield "actor.routerAuxLossCoefficient", coefficient, remedy
    if spec.model.actor.compile:
        remedy = "compiled layers have no load-balancing loss: set it to false, or actor.routerAuxLossCoefficient to 0"
        yield "model.actor.compile", True, remedy


def _shortest_lookup_is_not_above_the_longest(spec: PPOJobSpec) -> Iterator[Problem]:
    given = spec.rollout.speculative
    if given is not None and given.prompt_lookup_min > given.prompt_lookup_max:
        remedy = f"must not be above promptLookupMax, which is {given.prompt_lookup_max}: lower it, or raise the other"
        yield "rollout.speculative.promptLookupMin", given.prompt_lookup_min, remedy


ENGINE_CHECKS = (
    _engine_classes_are_read,
    _engine_classes_are_module_or_file,
    _engine_args_are_the_users,
    _drafts_are_of_one_stage,
    _the_trainers_scheduler_is_there,
    _experts_can_be_replayed,
    _engines_can_divide_experts,
    _experts_can_be_balanced,
    _shortest_lookup_is_not_above_the_longest,
)
