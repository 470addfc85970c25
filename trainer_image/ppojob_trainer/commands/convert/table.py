"""The table: what each of verl's settings becomes in a PPOJob. Names are those of verl 0.9; older ones stand beside.

A row with targets carries a value over; one without says why nothing is carried. What needs several settings at once is
in `together`. A name may hold `*`. The first row that matches counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppojob_trainer.commands.convert.values import (
    AGGREGATIONS,
    ESTIMATORS,
    KL_ESTIMATORS,
    SCHEDULES,
    Change,
    number,
    one_of,
    only,
    same,
    steps,
    text,
    truth,
    warmup,
    whole,
)


@dataclass(frozen=True)
class Carried:
    """A setting that becomes one field, or several of the same value."""

    name: str
    targets: tuple[str, ...]
    change: Change = same


@dataclass(frozen=True)
class Checked:
    """A setting for which there is no field, because there is one way here: any other value is reported."""

    name: str
    change: Change


@dataclass(frozen=True)
class Needless:
    """A setting that has nothing to say here, whatever its value."""

    name: str
    why: str


@dataclass(frozen=True)
class Absent:
    """A setting of something that is not here: whoever sets it misses it. verl's own default of it is no loss."""

    name: str
    why: str


Row = Carried | Checked | Needless | Absent


def _field(name: str, target: str, change: Change) -> Carried:
    return Carried(name, (target,), change)


def _needless(section: str, names: str, why: str) -> list[Row]:
    return [Needless(f"{section}.{name}", why) for name in names.split()]


def _absent(section: str, names: str, why: str) -> list[Row]:
    return [Absent(f"{section}.{name}", why) for name in names.split()]


def _trained(verl: str, role: str, engine: str) -> list[Row]:
    """Rows of what actor and critic have in common."""
    return [
        _field(f"{verl}.ppo_mini_batch_size", f"{role}.miniBatchSize", whole),
        _field(f"{verl}.ppo_max_token_len_per_gpu", f"{role}.maxTokensPerGPU", whole),
        _field(f"{verl}.loss_agg_mode", f"{role}.lossAggregation", AGGREGATIONS),
        _field(f"{verl}.grad_clip", f"{role}.gradClip", number),
        _field(f"{verl}.optim.clip_grad", f"{role}.gradClip", number),
        _field(f"{verl}.optim.lr", f"{role}.learningRate", number),
        _field(f"{verl}.optim.weight_decay", f"{role}.weightDecay", number),
        _field(f"{verl}.optim.lr_warmup_steps", f"{role}.learningRateWarmupSteps", warmup),
        _field(f"{verl}.optim.lr_scheduler_type", f"{role}.learningRateSchedule", SCHEDULES),
        _field(f"{verl}.optim.warmup_style", f"{role}.learningRateSchedule", SCHEDULES),
        _field(f"{verl}.optim.lr_decay_style", f"{role}.learningRateSchedule", SCHEDULES),
        _field(f"{verl}.ulysses_sequence_parallel_size", f"{role}.sequenceParallelSize", whole),
        _field(f"{engine}.ulysses_sequence_parallel_size", f"{role}.sequenceParallelSize", whole),
        _field(f"{engine}.param_offload", f"model.{role}.offload.parameters", truth),
        _field(f"{engine}.optimizer_offload", f"model.{role}.offload.optimizer", truth),
        _field(f"{verl}.megatron.param_offload", f"model.{role}.offload.parameters", truth),
        _field(f"{verl}.megatron.optimizer_offload", f"model.{role}.offload.optimizer", truth),
        Needless(f"{verl}.megatron.grad_offload", "gradients are freed after each update"),
        Absent(f"{verl}.megatron.*", _MEGATRON),
        Absent(f"{verl}.veomni*", _MEGATRON),
        Checked(f"{engine}.offload_policy", only(False, f"use model.{role}.offload, which moves whole phases")),
        Checked(f"{verl}.strategy", _ENGINES),
        Checked(f"{engine}.strategy", _ENGINES),
        Checked(f"{verl}.shuffle", only(False, "minibatches keep the order of the batch in every epoch")),
        Checked(f"{verl}.optim.optimizer", one_of({"AdamW": "", "adam": ""}, "the optimizer is AdamW")),
        Checked(f"{verl}.optim.min_lr", only(0.0, "schedules end at a learning rate of 0")),
        Checked(f"{verl}.optim.lr_warmup_init", only(0.0, "a warm-up begins at a learning rate of 0")),
        Checked(f"{verl}.optim.weight_decay_incr_style", only("constant", "the weight decay is constant")),
        Checked(f"{verl}.optim.use_precision_aware_optimizer", only(False, "AdamW's state is float32")),
        Absent(f"{verl}.optim.override_optimizer_config*", f"the optimizer is AdamW; see model.{role}.offload"),
        *_needless(
            f"{verl}.optim",
            "muon_* *_dtype lr_wsd_decay_style use_checkpoint_opt_param_scheduler use_layer_wise_distributed_optimizer "
            "lr_decay_steps weight_decay_incr_steps",
            "it belongs to another optimizer or schedule",
        ),
        Checked(f"{verl}.optim.betas", only([0.9, 0.999], "AdamW's betas are 0.9 and 0.999")),
        Checked(f"{verl}.optim.min_lr_ratio", only(0.0, "schedules end at a learning rate of 0")),
        Checked(f"{verl}.optim.num_cycles", only(0.5, "the cosine is half a period long")),
        Needless(f"{verl}.ppo_micro_batch_size*", f"micro-batches are filled up to {role}.maxTokensPerGPU"),
        Needless(f"{verl}.forward_*", f"micro-batches are filled up to {role}.maxTokensPerGPU"),
        Needless(f"{verl}.use_dynamic_bsz", f"micro-batches are always filled up to {role}.maxTokensPerGPU"),
        Checked(f"{engine}.model_dtype", only("fp32", f"parameters are float32: see model.{role}.offload for memory")),
        Checked(f"{engine}.dtype", only("bfloat16", "roles compute in bfloat16")),
        Checked(f"{engine}.fsdp_size", only(-1, "a model is sharded over all ranks of its role")),
        Checked(f"{engine}.full_determinism", only(False, "seeds are fixed, kernels are not")),
        Checked(f"{engine}.qat.enable", only(False, _NO_QUANTIZATION)),
        Checked(f"{verl}.qat.enable", only(False, _NO_QUANTIZATION)),
        Checked(f"{verl}.loss_scale_factor", only(None, "losses are normalised by the minibatch's own tokens")),
        Needless(f"{verl}.optim.total_training_steps", "schedules run over trainer.totalSteps"),
        Checked(f"{verl}.router_replay.mode", only("disabled", "there is no replay of experts' routes")),
        Checked(f"{verl}.load_weight", only(True, "a model always starts from its weights")),
        Absent(f"{engine}.mixed_precision.*", "roles compute in bfloat16 and sum gradients in float32"),
        *_needless(
            verl, "qat.* pad_to_length* data_loader_seed rollout_n nccl_timeout router_replay.*", "it changes no numbers"
        ),
        *_needless(f"{verl}.optim", "optimizer_impl zero_indexed_step", "the optimizer is torch's AdamW"),
        *_needless(
            engine,
            "reshard_after_forward use_no_sync_*",
            f"models stay gathered where the pool has the memory, see model.{role}.reshardAfterForward",
        ),
        *_needless(
            engine,
            "wrap_policy.* grad_offload forward_prefetch use_orig_params seed entropy_* "
            "use_torch_compile pad_to_length* forward_only turbo_config.* qat.*",
            "FSDP2 shards layer by layer, and needs no setting of this",
        ),
    ]


def _model(verl: str, role: str) -> list[Row]:
    return [
        _field(f"{verl}.trust_remote_code", f"model.{role}.trustRemoteCode", truth),
        _field(f"{verl}.enable_gradient_checkpointing", f"model.{role}.gradientCheckpointing", truth),
        _field(f"{verl}.enable_activation_offload", f"model.{role}.activationOffload", truth),
        *_needless(verl, "use_remove_padding use_rmpad", "sequences are always packed"),
        Needless(f"{verl}.use_fused_kernels", "log-probs never hold all logits"),
        Needless(f"{verl}.fused_kernel_options*", "log-probs never hold all logits"),
        Needless(f"{verl}.use_shm", "rank 0 reads the model once for all"),
        Checked(f"{verl}.use_liger", only(False, "model code is transformers' own")),
        Checked(f"{verl}.external_lib", only(None, "install it in the image; trustRemoteCode runs a model's own code")),
        Checked(f"{verl}.override_config", only({}, "write the values into the model's config.json")),
    ]


_ENGINES = one_of({"fsdp": "", "fsdp2": ""}, "models are trained by FSDP2, tensorParallelSize divides large ones")
_MEGATRON = "models are trained by FSDP2; for large ones set tensorParallelSize of the role and its offload"
_NO_QUANTIZATION = "models are trained and generate with their own weights"
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TEXT = "prompts are text: pictures, sound and video are not read"
_SERVERS = "vLLM generates inside the job; there are no servers, tools or agent loops"

TABLE: tuple[Row, ...] = (
    # Data.
    _field("data.train_batch_size", "data.trainBatchSize", whole),
    _field("data.max_prompt_length", "data.maxPromptLength", whole),
    _field("data.max_response_length", "data.maxResponseLength", whole),
    _field("data.shuffle", "data.shuffle", truth),
    _field("data.seed", "trainer.seed", whole),
    _field("data.apply_chat_template_kwargs", "data.chatTemplateKwargs", same),
    Checked("data.reward_fn_key", only("data_source", "rename the column to data_source, or set dataSource")),
    Checked("data.train_max_samples", only(-1, "cut the file, all its rows are read")),
    Checked("data.val_max_samples", only(-1, "cut the file, all its rows are read")),
    Checked("data.custom_cls.path", only(None, "write the prompts into Parquet or JSON Lines")),
    Checked("data.custom_cls.name", only(None, "write the prompts into Parquet or JSON Lines")),
    Checked("data.gen_batch_size", only(None, "each step generates data.trainBatchSize prompts")),
    Checked("data.tokenizer", only(None, "the tokenizer is the one in the actor's folder")),
    *_absent("data", "image_key video_key audio_key image_patch_size mm_processor_kwargs*", _TEXT),
    *_absent("data", "sampler.* datagen.*", "prompts come from files, in an order drawn with trainer.seed"),
    Checked("data.*_path", only(None, _SERVERS)),
    Needless("data.val_batch_size", "all validation prompts are generated at once"),
    *_needless(
        "data",
        "return_* dataloader_num_workers filter_overlong_prompts_workers use_shm validation_shuffle trust_remote_code",
        "it has no bearing on text prompts read from files",
    ),
    # The policy.
    *_model("actor_rollout_ref.model", "actor"),
    _field("actor_rollout_ref.model.custom_chat_template", "data.chatTemplate", text),
    Checked(
        "actor_rollout_ref.model.*exclude_modules", only(None, "name the layers in model.actor.lora.targetModules")
    ),
    Checked("actor_rollout_ref.model.lora_adapter_path", only(None, "merge the adapter into the model's folder")),
    Checked("actor_rollout_ref.model.tokenizer_path", only(None, "put the tokenizer into the model's folder")),
    Checked("actor_rollout_ref.model.hf_config_path", only(None, "put config.json into the model's folder")),
    Carried(f"{_A}.clip_ratio", ("actor.clipRatioLow", "actor.clipRatioHigh"), number),
    _field(f"{_A}.clip_ratio_low", "actor.clipRatioLow", number),
    _field(f"{_A}.clip_ratio_high", "actor.clipRatioHigh", number),
    _field(f"{_A}.clip_ratio_c", "actor.clipRatioDual", number),
    _field(f"{_A}.entropy_coeff", "actor.entropyCoefficient", number),
    _field(f"{_A}.ppo_epochs", "algorithm.epochs", whole),
    _field(f"{_A}.use_kl_loss", "algorithm.kl.inLoss", truth),
    _field(f"{_A}.kl_loss_coef", "algorithm.kl.lossCoefficient", number),
    _field(f"{_A}.kl_loss_type", "algorithm.kl.lossEstimator", KL_ESTIMATORS),
    _field(f"{_A}.checkpoint.async_save", "checkpoint.async", truth),
    Checked(f"{_A}.policy_loss.loss_mode", only("vanilla", "the policy loss is PPO's clipped one")),
    *_trained(_A, "actor", f"{_A}.fsdp_config"),
    Needless(f"{_A}.checkpoint.*", "a checkpoint always holds all that a resumed run needs; see checkpoint.export"),
    Needless(f"{_A}.policy_loss.*", "it belongs to another policy loss than PPO's"),
    Needless(f"{_A}.entropy_*", "the entropy is always computed in chunks"),
    Absent(f"{_A}.freeze_vision_tower", _TEXT),
    *_needless(_A, "tau_* calculate_* sum_pi_squared*", "it changes nothing in PPO on text"),
    Checked(f"{_A}.use_prefix_grouper", only(False, "sequences are packed, and share no prefix in training")),
    Needless(f"{_A}.use_torch_compile", "see model.actor.compile, which compiles the layers"),
    # The reference.
    _field("actor_rollout_ref.ref.model.path", "model.ref.path", text),
    _field("actor_rollout_ref.ref.fsdp_config.param_offload", "model.ref.offload.parameters", truth),
    _field("actor_rollout_ref.ref.megatron.param_offload", "model.ref.offload.parameters", truth),
    Absent("actor_rollout_ref.ref.megatron.*", _MEGATRON),
    Needless("actor_rollout_ref.ref.*", "the reference computes as the actor does"),
    # Generation.
    _field(f"{_R}.n", "rollout.samplesPerPrompt", whole),
    _field(f"{_R}.temperature", "rollout.temperature", number),
    _field(f"{_R}.top_p", "rollout.topP", number),
    _field(f"{_R}.top_k", "rollout.topK", whole),
    _field(f"{_R}.ignore_eos", "rollout.ignoreEos", truth),
    _field(f"{_R}.gpu_memory_utilization", "rollout.gpuMemoryUtilization", number),
    _field(f"{_R}.max_num_seqs", "rollout.maxNumSeqs", whole),
    _field(f"{_R}.max_num_batched_tokens", "rollout.maxNumBatchedTokens", whole),
    _field(f"{_R}.enable_chunked_prefill", "rollout.enableChunkedPrefill", truth),
    _field(f"{_R}.enable_prefix_caching", "rollout.enablePrefixCaching", truth),
    _field(f"{_R}.enforce_eager", "rollout.enforceEager", truth),
    _field(f"{_R}.free_cache_engine", "rollout.sleep", truth),
    _field(f"{_R}.calculate_log_probs", "rollout.logProbs", truth),
    _field(f"{_R}.tensor_model_parallel_size", "rollout.tensorParallelSize", whole),
    _field(f"{_R}.val_kwargs.n", "rollout.validation.samplesPerPrompt", whole),
    _field(f"{_R}.val_kwargs.top_p", "rollout.validation.topP", number),
    Checked(f"{_R}.val_kwargs.top_k", only(-1, "validation samples from all tokens, see rollout.validation.topP")),
    Checked(f"{_R}.name", only("vllm", "vLLM generates")),
    Checked(f"{_R}.dtype", only("bfloat16", "vLLM computes in bfloat16")),
    Checked(f"{_R}.do_sample", only(True, "training samples its responses")),
    Checked(f"{_R}.pipeline_model_parallel_size", only(1, "vLLM is divided by rollout.tensorParallelSize")),
    Checked(f"{_R}.expert_parallel_size", only(1, "vLLM is divided by rollout.tensorParallelSize")),
    Checked(f"{_R}.multi_turn.enable", only(False, _SERVERS)),
    Checked(f"{_R}.quantization", only(None, "vLLM computes with the policy's own weights")),
    Needless(f"{_R}.data_parallel_size", "there are as many replicas as the pool has room for"),
    Needless(f"{_R}.log_prob_*", "micro-batches are filled up to actor.maxTokensPerGPU"),
    Checked(f"{_R}.engine_kwargs*", only(None, "vLLM's options beyond those of rollout cannot be given")),
    Checked(f"{_R}.over_sample_rate", only(0, "as many responses are written as are used")),
    Checked(f"{_R}.max_model_len", only(None, "it is data.maxPromptLength + data.maxResponseLength")),
    Checked(f"{_R}.disaggregation.enabled", only(False, _SERVERS)),
    Checked(f"{_R}.enable_rollout_routing_replay", only(False, "there is no replay of experts' routes")),
    Checked(f"{_R}.agent.default_agent_loop", only("single_turn_agent", _SERVERS)),
    Checked(f"{_R}.agent.agent_loop_config_path", only(None, _SERVERS)),
    Checked(f"{_R}.skip_rollout", only(False, "generation is never skipped")),
    Checked(f"{_R}.mtp.enable", only(False, "no tokens are predicted ahead")),
    *_absent(_R, "server.* sglang_rollout_mode", _SERVERS),
    *_needless(_R, "seed full_determinism", "each sample's seed comes of trainer.seed, step, prompt and sample"),
    *_needless(_R, "prompt_length response_length", "they are those of data"),
    *_needless(
        _R,
        "mode nnodes n_gpus_per_node scheduling_policy load_format layered_summon logprobs_mode disable_log_stats "
        "multi_stage_wake_up multi_turn.* agent.* checkpoint_engine.* trace.* skip_tokenizer_init "
        "moe_* prometheus.* quantization_config_file cudagraph_capture_sizes router_config_path limit_images mtp.* "
        "disaggregation.* update_weights_* skip_dump_dir layer_name_map.* skip.*",
        "vLLM runs inside the job, and needs no setting of this",
    ),
    # The critic.
    *_model("critic.model", "critic"),
    _field("critic.cliprange_value", "critic.clipRangeValue", number),
    *_trained("critic", "critic", "critic.fsdp"),
    # Where verl 0.6 and older have what is now critic.fsdp.
    _field("critic.model.fsdp_config.param_offload", "model.critic.offload.parameters", truth),
    _field("critic.model.fsdp_config.optimizer_offload", "model.critic.offload.optimizer", truth),
    Needless("critic.model.fsdp_config.*", "FSDP2 shards layer by layer, and needs no setting of this"),
    Needless("critic.model.*", "the critic is the actor's model with a value head, or model.critic.path"),
    Needless("critic.ppo_epochs", "the critic is updated as often as the actor, see algorithm.epochs"),
    Needless("critic.checkpoint.*", "a checkpoint always holds all that a resumed run needs"),
    Needless("critic.profiler.*", "see telemetry.profile"),
    # The algorithm.
    _field("algorithm.adv_estimator", "algorithm.advantageEstimator", ESTIMATORS),
    _field("algorithm.gamma", "algorithm.gamma", number),
    _field("algorithm.lam", "algorithm.lam", number),
    _field("algorithm.use_kl_in_reward", "algorithm.kl.inReward", truth),
    _field("algorithm.kl_penalty", "algorithm.kl.estimator", KL_ESTIMATORS),
    _field(
        "algorithm.kl_ctrl.type",
        "algorithm.kl.controller.type",
        one_of({"fixed": "Fixed", "adaptive": "Adaptive"}, "choose one of them"),
    ),
    _field("algorithm.kl_ctrl.kl_coef", "algorithm.kl.controller.coefficient", number),
    _field("algorithm.kl_ctrl.horizon", "algorithm.kl.controller.horizon", whole),
    _field("algorithm.kl_ctrl.target_kl", "algorithm.kl.controller.target", number),
    Checked("algorithm.norm_adv_by_std_in_grpo", only(True, "grpo divides by the group's standard deviation")),
    Checked("algorithm.use_pf_ppo", only(False, "there is no preference-filtered PPO")),
    Checked("algorithm.filter_groups.enable", only(False, "no prompts are drawn anew: every batch is used whole")),
    Checked(
        "algorithm.rollout_correction.rollout_is", only(None, "training is on-policy: there is nothing to correct")
    ),
    *_needless(
        "algorithm", "pf_ppo.* filter_groups.* rollout_correction.*", "it belongs to an algorithm that is not chosen"
    ),
    # Rewards.
    _field("reward.num_workers", "reward.function.numWorkers", whole),
    Checked("reward_model.reward_manager", only("naive", "a reward function is called with each response by itself")),
    Checked("reward.reward_manager.name", only("naive", "a reward function is called with each response by itself")),
    Checked("*sandbox_fusion.url", only(None, "a reward function may call a service by itself")),
    _field("reward_model.model.trust_remote_code", "model.reward.trustRemoteCode", truth),
    Checked(
        "reward_model.reward_kwargs*", only(None, "what a manager is told a function gets in reward.function.kwargs")
    ),
    Checked("reward.reward_kwargs*", only(None, "what a manager is told a function gets in reward.function.kwargs")),
    *_needless("reward_model", "reward_loop_source use_reward_loop", "rewards are computed beside generation"),
    Checked("reward_model.reward_loop_*", only(None, "a reward function is called with each response by itself")),
    Needless("reward_manager.*", "a reward function is called with each response by itself"),
    Checked(
        "reward.reward_manager.module.path", only(None, "a reward function is called with each response by itself")
    ),
    *_needless("reward.reward_manager", "source module.*", "a reward function is called with each response by itself"),
    *_needless(
        "reward_model",
        "num_workers enable_resource_pool n_gpus_per_node nnodes strategy model.* rollout.* micro_batch_size* "
        "max_length use_dynamic_bsz forward_max_token_len_per_gpu launch_reward_fn_async ulysses_* profiler.* "
        "nccl_timeout megatron.* load_weight",
        "the reward model runs in a pool of the job: see placement.reward and model.reward",
    ),
    Needless("reward.reward_model.*", "the reward model runs in a pool of the job: see placement.reward, model.reward"),
    Needless("*sandbox_fusion.*", "a reward function may call a service by itself"),
    # The run.
    _field("trainer.total_training_steps", "trainer.totalSteps", whole),
    _field("trainer.save_freq", "checkpoint.everySteps", steps),
    _field("trainer.test_freq", "trainer.validateEverySteps", steps),
    _field("trainer.val_before_train", "trainer.validateBeforeTraining", truth),
    _field("trainer.critic_warmup", "critic.warmupSteps", whole),
    _field("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", whole),
    _field("trainer.project_name", "telemetry.trackerProject", text),
    _field("trainer.device", "device", one_of({"cuda": "cuda", "cpu": "cpu"}, "roles compute on CUDA or on CPU")),
    Checked(
        "trainer.val_only", only(False, "a job trains; validate a model with trainer.totalSteps 1 and look at step 0")
    ),
    Checked("trainer.v1.trainer_mode", only("sync", "training is on-policy; schedule.mode says what overlaps")),
    Needless("trainer.max_critic_ckpt_to_keep", "a checkpoint holds actor and critic: see checkpoint.keep"),
    Needless("trainer.default_local_dir", "checkpoints are in <mountPath>/ppojob/<namespace>/<name>"),
    Needless("trainer.default_hdfs_dir", "checkpoints are in the storage; for a bucket see checkpoint.path"),
    Needless("trainer.log_val_generations", "see telemetry.samplesPerStep"),
    Needless("trainer.balance_batch", "ranks always get about as many tokens each"),
    *_needless(
        "trainer",
        "rollout_data_dir validation_data_dir esi_redundant_time checkpoint_callback_class del_local_ckpt_after_load "
        "ray_wait_register_center_timeout use_v1 v1.* use_legacy_worker_impl balance_batch",
        "the job needs no setting of this",
    ),
    Needless("ray_kwargs.*", "the operator starts Ray"),
    Needless("hydra.*", "there is no Hydra"),
    Checked("model_engine", one_of({"dp": ""}, _MEGATRON)),
    Absent("*.mtp.*", "no tokens are predicted ahead"),
    *_absent("async_training", "*", "training is on-policy; schedule.mode says what runs at the same time"),
    Needless("actor_rollout_ref.hybrid_engine", "actor and rollout share a pool or not: see placement"),
    Needless("actor_rollout_ref.nccl_timeout", "see trainer.phaseTimeoutSeconds"),
    Needless("global_profiler.*", "see telemetry.profile"),
    Needless("*.profiler.*", "see telemetry.profile"),
    Needless(
        "actor_rollout_ref.model.*", "it has no bearing on a causal language model trained whole or with adapters"
    ),
    Needless("skip.*", "generation is never skipped"),
    Needless("transfer_queue.*", "rows move from worker to worker"),
    Needless("distillation.*", "there is no distillation"),
)
"""What each setting becomes. What no row matches is reported as unknown."""

DEFAULTS: Mapping[str, Any] = {
    "checkpoint.everySteps": 0,
    "trainer.validateEverySteps": 0,
    "rollout.tensorParallelSize": 2,
    "rollout.maxNumSeqs": 256,
    "reward.function.numWorkers": 8,
    "telemetry.trackers": ["WandB"],
    "telemetry.trackerProject": "verl_examples",
}
"""Where verl's default differs from ours and changes what the run does: written where verl's setting is not given."""
