"""The table: what each of verl's settings becomes in a PPOJob. Names are those of verl 0.9; some rows add older names.

A row with targets converts a value; a row without targets says why the value is not converted. Fields that depend on
several settings are in `draft`. A name may contain `*`. The first row that matches counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppojob_trainer.commands.convert.rows import (
    MEGATRON,
    Checked,
    Converted,
    Ignored,
    Row,
    Unsupported,
    field,
    ignored,
    rows_of_model,
    rows_of_trained,
    unsupported,
)
from ppojob_trainer.commands.convert.values import (
    ESTIMATORS,
    KL_ESTIMATORS,
    LOSSES,
    number,
    one_of,
    only,
    same,
    steps,
    text,
    truth,
    whole,
)

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TEXT = "prompts are text: pictures, sound and video are not read"
_ENGINE_EXPERTS = "all GPUs of an engine divide its experts, or none: see rollout.enableExpertParallel"
_SERVERS = "vLLM generates inside the job; there are no servers, tools or agent loops"

TABLE: tuple[Row, ...] = (
    # Data.
    field("data.train_batch_size", "data.trainBatchSize", whole),
    field("data.max_prompt_length", "data.maxPromptLength", whole),
    field("data.max_response_length", "data.maxResponseLength", whole),
    field("data.shuffle", "data.shuffle", truth),
    field("data.seed", "trainer.seed", whole),
    field("data.apply_chat_template_kwargs", "data.chatTemplateKwargs", same),
    Checked("data.reward_fn_key", only("data_source", "rename the column to data_source, or set dataSource")),
    Checked("data.train_max_samples", only(-1, "cut the file, all its rows are read")),
    Checked("data.val_max_samples", only(-1, "cut the file, all its rows are read")),
    Checked("data.custom_cls.path", only(None, "write the prompts into Parquet or JSON Lines")),
    Checked("data.custom_cls.name", only(None, "write the prompts into Parquet or JSON Lines")),
    Checked("data.gen_batch_size", only(None, "each step generates data.trainBatchSize prompts")),
    Checked("data.tokenizer", only(None, "the tokenizer is the one in the actor's folder")),
    *unsupported("data", "image_key video_key audio_key image_patch_size mm_processor_kwargs*", _TEXT),
    *unsupported("data", "sampler.* datagen.*", "prompts come from files, in an order drawn with trainer.seed"),
    Checked("data.*_path", only(None, _SERVERS)),
    Ignored("data.val_batch_size", "all validation prompts are generated at once"),
    *ignored(
        "data",
        "return_* dataloader_num_workers filter_overlong_prompts_workers use_shm validation_shuffle trust_remote_code",
        "it has no effect on text prompts from files",
    ),
    # The policy.
    *rows_of_model("actor_rollout_ref.model", "actor"),
    field("actor_rollout_ref.model.custom_chat_template", "data.chatTemplate", text),
    Checked(
        "actor_rollout_ref.model.*exclude_modules", only(None, "name the layers in model.actor.lora.targetModules")
    ),
    Checked("actor_rollout_ref.model.lora_adapter_path", only(None, "merge the adapter into the model's folder")),
    Checked("actor_rollout_ref.model.tokenizer_path", only(None, "put the tokenizer into the model's folder")),
    Checked("actor_rollout_ref.model.hf_config_path", only(None, "put config.json into the model's folder")),
    Converted(f"{_A}.clip_ratio", ("actor.clipRatioLow", "actor.clipRatioHigh"), number),
    field(f"{_A}.clip_ratio_low", "actor.clipRatioLow", number),
    field(f"{_A}.clip_ratio_high", "actor.clipRatioHigh", number),
    field(f"{_A}.clip_ratio_c", "actor.clipRatioDual", number),
    field(f"{_A}.entropy_coeff", "actor.entropyCoefficient", number),
    field(f"{_A}.ppo_epochs", "algorithm.epochs", whole),
    field(f"{_A}.use_kl_loss", "algorithm.kl.inLoss", truth),
    field(f"{_A}.kl_loss_coef", "algorithm.kl.lossCoefficient", number),
    field(f"{_A}.kl_loss_type", "algorithm.kl.lossEstimator", KL_ESTIMATORS),
    field(f"{_A}.checkpoint.async_save", "checkpoint.async", truth),
    field(f"{_A}.policy_loss.loss_mode", "algorithm.policyLoss", LOSSES),
    *rows_of_trained(_A, "actor", f"{_A}.fsdp_config"),
    Ignored(f"{_A}.checkpoint.*", "a checkpoint always holds all that a resumed run needs; see checkpoint.export"),
    Ignored(f"{_A}.policy_loss.*", "it belongs to another policy loss"),
    Ignored(f"{_A}.entropy_*", "the entropy is always computed in chunks"),
    Unsupported(f"{_A}.freeze_vision_tower", _TEXT),
    *ignored(_A, "tau_* calculate_* sum_pi_squared*", "it changes nothing in PPO on text"),
    Checked(f"{_A}.use_prefix_grouper", only(False, "sequences are packed, and share no prefix in training")),
    Ignored(f"{_A}.use_torch_compile", "see model.actor.compile, which compiles the layers"),
    # The reference.
    field("actor_rollout_ref.ref.fsdp_config.param_offload", "model.ref.offload.parameters", truth),
    field("actor_rollout_ref.ref.megatron.param_offload", "model.ref.offload.parameters", truth),
    Unsupported("actor_rollout_ref.ref.megatron.*", MEGATRON),
    Ignored("actor_rollout_ref.ref.*", "the reference computes as the actor does"),
    # Generation.
    field(f"{_R}.n", "rollout.samplesPerPrompt", whole),
    field(f"{_R}.temperature", "rollout.temperature", number),
    field(f"{_R}.top_p", "rollout.topP", number),
    field(f"{_R}.top_k", "rollout.topK", whole),
    field(f"{_R}.ignore_eos", "rollout.ignoreEos", truth),
    field(f"{_R}.gpu_memory_utilization", "rollout.gpuMemoryUtilization", number),
    field(f"{_R}.max_num_seqs", "rollout.maxNumSeqs", whole),
    field(f"{_R}.max_num_batched_tokens", "rollout.maxNumBatchedTokens", whole),
    field(f"{_R}.enable_chunked_prefill", "rollout.enableChunkedPrefill", truth),
    field(f"{_R}.enable_prefix_caching", "rollout.enablePrefixCaching", truth),
    field(f"{_R}.enforce_eager", "rollout.enforceEager", truth),
    field(f"{_R}.free_cache_engine", "rollout.sleep", truth),
    field(f"{_R}.calculate_log_probs", "rollout.logProbs", truth),
    field(f"{_R}.tensor_model_parallel_size", "rollout.tensorParallelSize", whole),
    field(f"{_R}.pipeline_model_parallel_size", "rollout.pipelineParallelSize", whole),
    field(f"{_R}.val_kwargs.n", "rollout.validation.samplesPerPrompt", whole),
    field(f"{_R}.val_kwargs.top_p", "rollout.validation.topP", number),
    Checked(f"{_R}.val_kwargs.top_k", only(-1, "validation samples from all tokens, see rollout.validation.topP")),
    Checked(f"{_R}.name", only("vllm", "vLLM generates")),
    Checked(f"{_R}.dtype", only("bfloat16", "vLLM computes in bfloat16")),
    Checked(f"{_R}.do_sample", only(True, "training samples its responses")),
    Checked(f"{_R}.expert_parallel_size", only(1, _ENGINE_EXPERTS)),
    Checked(f"{_R}.multi_turn.enable", only(False, _SERVERS)),
    Checked(f"{_R}.quantization", only(None, "vLLM rounds weights to FP8 only: see rollout.quantization")),
    Ignored(f"{_R}.data_parallel_size", "the number of replicas follows from the pool's GPUs"),
    Ignored(f"{_R}.log_prob_*", "micro-batches are filled up to actor.maxTokensPerGPU"),
    Checked(f"{_R}.engine_kwargs.vllm*", only({}, "give vLLM's arguments in rollout.engineArgs")),
    Ignored(f"{_R}.engine_kwargs*", "these are the arguments of an engine that does not run"),
    Checked(f"{_R}.over_sample_rate", only(0, "as many responses are generated as are used")),
    Checked(f"{_R}.max_model_len", only(None, "it is data.maxPromptLength + data.maxResponseLength")),
    Checked(f"{_R}.disaggregation.enabled", only(False, _SERVERS)),
    Checked(f"{_R}.agent.default_agent_loop", only("single_turn_agent", _SERVERS)),
    Checked(f"{_R}.agent.agent_loop_config_path", only(None, _SERVERS)),
    Checked(f"{_R}.skip_rollout", only(False, "generation is never skipped")),
    Checked(f"{_R}.mtp.enable", only(False, "multi-token prediction is not supported")),
    *unsupported(_R, "server.* sglang_rollout_mode", _SERVERS),
    *ignored(_R, "seed full_determinism", "each sample's seed follows from trainer.seed, step, prompt and sample"),
    *ignored(_R, "prompt_length response_length", "they are those of data"),
    *ignored(
        _R,
        "mode nnodes n_gpus_per_node scheduling_policy load_format layered_summon logprobs_mode disable_log_stats "
        "multi_stage_wake_up multi_turn.* agent.* checkpoint_engine.* trace.* skip_tokenizer_init "
        "moe_* prometheus.* quantization_config_file cudagraph_capture_sizes router_config_path limit_images mtp.* "
        "disaggregation.* update_weights_* skip_dump_dir layer_name_map.* skip.*",
        "vLLM runs inside the job, and needs no such setting",
    ),
    # The critic.
    *rows_of_model("critic.model", "critic"),
    field("critic.cliprange_value", "critic.clipRangeValue", number),
    *rows_of_trained("critic", "critic", "critic.fsdp"),
    # Where verl 0.6 and older have what is now critic.fsdp.
    field("critic.model.fsdp_config.param_offload", "model.critic.offload.parameters", truth),
    field("critic.model.fsdp_config.optimizer_offload", "model.critic.offload.optimizer", truth),
    Ignored("critic.model.fsdp_config.*", "FSDP2 shards layer by layer, and needs no such setting"),
    Ignored("critic.model.*", "the critic is the actor's model with a value head, or model.critic.path"),
    Ignored("critic.ppo_epochs", "the critic is updated as often as the actor, see algorithm.epochs"),
    Ignored("critic.checkpoint.*", "a checkpoint always holds all that a resumed run needs"),
    Ignored("critic.profiler.*", "see telemetry.profile"),
    # The algorithm.
    field("algorithm.adv_estimator", "algorithm.advantageEstimator", ESTIMATORS),
    field("algorithm.gamma", "algorithm.gamma", number),
    field("algorithm.lam", "algorithm.lam", number),
    field("algorithm.use_kl_in_reward", "algorithm.kl.inReward", truth),
    field("algorithm.kl_penalty", "algorithm.kl.estimator", KL_ESTIMATORS),
    field(
        "algorithm.kl_ctrl.type",
        "algorithm.kl.controller.type",
        one_of({"fixed": "Fixed", "adaptive": "Adaptive"}, "choose one of them"),
    ),
    field("algorithm.kl_ctrl.kl_coef", "algorithm.kl.controller.coefficient", number),
    field("algorithm.kl_ctrl.horizon", "algorithm.kl.controller.horizon", whole),
    field("algorithm.kl_ctrl.target_kl", "algorithm.kl.controller.target", number),
    Ignored("algorithm.norm_adv_by_std_in_grpo", "only grpo reads it: see advantageEstimator DrGRPO"),
    Checked("algorithm.use_pf_ppo", only(False, "there is no preference-filtered PPO")),
    Checked("algorithm.rollout_correction.rollout_is", only(None, "importance weights are by token or by sequence")),
    Checked("algorithm.rollout_correction.rollout_rs", only(None, "responses are not rejected: see rolloutCorrection")),
    Checked("algorithm.rollout_correction.bypass_mode", only(False, "it is true or false")),
    Checked("algorithm.rollout_correction.loss_type", only("ppo_clip", "the policy's loss is that of policyLoss")),
    Checked(
        "algorithm.rollout_correction.rollout_is_batch_normalize", only(False, "weights are not divided by their mean")
    ),
    *ignored("algorithm", "pf_ppo.* rollout_correction.*", "it belongs to an algorithm that is not chosen"),
    # Rewards.
    field("reward.num_workers", "reward.function.numWorkers", whole),
    Checked("reward_model.reward_manager", only("naive", "a reward function is called for one response at a time")),
    Checked("reward.reward_manager.name", only("naive", "a reward function is called for one response at a time")),
    Checked("*sandbox_fusion.url", only(None, "a reward function may call a service by itself")),
    field("reward_model.model.trust_remote_code", "model.reward.trustRemoteCode", truth),
    Checked(
        "reward_model.reward_kwargs*", only(None, "a reward function gets such settings in reward.function.kwargs")
    ),
    Checked("reward.reward_kwargs*", only(None, "a reward function gets such settings in reward.function.kwargs")),
    *ignored("reward_model", "reward_loop_source use_reward_loop", "rewards are computed beside generation"),
    Checked("reward_model.reward_loop_*", only(None, "a reward function is called for one response at a time")),
    Ignored("reward_manager.*", "a reward function is called for one response at a time"),
    Checked("reward.reward_manager.module.path", only(None, "a reward function is called for one response at a time")),
    *ignored("reward.reward_manager", "source module.*", "a reward function is called for one response at a time"),
    *ignored(
        "reward_model",
        "num_workers enable_resource_pool n_gpus_per_node nnodes strategy model.* rollout.* micro_batch_size* "
        "max_length use_dynamic_bsz forward_max_token_len_per_gpu launch_reward_fn_async ulysses_* profiler.* "
        "nccl_timeout megatron.* load_weight",
        "the reward model runs in a pool of the job: see placement.reward and model.reward",
    ),
    Ignored("reward.reward_model.*", "the reward model runs in a pool of the job: see placement.reward, model.reward"),
    Ignored("*sandbox_fusion.*", "a reward function may call a service by itself"),
    # The run.
    field("trainer.total_training_steps", "trainer.totalSteps", whole),
    field("trainer.save_freq", "checkpoint.everySteps", steps),
    field("trainer.test_freq", "trainer.validateEverySteps", steps),
    field("trainer.val_before_train", "trainer.validateBeforeTraining", truth),
    field("trainer.critic_warmup", "critic.warmupSteps", whole),
    field("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", whole),
    field("trainer.project_name", "telemetry.trackerProject", text),
    field("trainer.device", "device", one_of({"cuda": "CUDA", "cpu": "CPU"}, "roles compute on CUDA or on CPU")),
    Checked(
        "trainer.val_only", only(False, "a job trains; validate a model with trainer.totalSteps 1 and look at step 0")
    ),
    Checked("trainer.v1.trainer_mode", only("sync", "training is on-policy; schedule.mode says what overlaps")),
    Ignored("trainer.max_critic_ckpt_to_keep", "a checkpoint holds actor and critic: see checkpoint.keep"),
    Ignored("trainer.default_local_dir", "checkpoints are in <mountPath>/ppojob/<namespace>/<name>"),
    Ignored("trainer.default_hdfs_dir", "checkpoints are in the storage; for a bucket see checkpoint.path"),
    Ignored("trainer.log_val_generations", "see telemetry.samplesPerStep"),
    Ignored("trainer.balance_batch", "all ranks always get about the same number of tokens"),
    *ignored(
        "trainer",
        "rollout_data_dir validation_data_dir esi_redundant_time checkpoint_callback_class del_local_ckpt_after_load "
        "ray_wait_register_center_timeout use_v1 v1.* use_legacy_worker_impl balance_batch",
        "the job needs no such setting",
    ),
    Ignored("ray_kwargs.*", "the operator starts Ray"),
    Ignored("hydra.*", "there is no Hydra"),
    Checked("model_engine", one_of({"dp": ""}, MEGATRON)),
    Unsupported("*@*", "it chooses another part of verl's configuration, which is not known here"),
    Checked(f"{_R}.qat.enable", only(False, "vLLM computes with the policy's own weights")),
    Ignored(f"{_R}.qat.*", "it belongs to quantization"),
    Unsupported("*.mtp.*", "multi-token prediction is not supported"),
    *unsupported("async_training", "*", "training is on-policy; schedule.mode says what runs at the same time"),
    Ignored("actor_rollout_ref.hybrid_engine", "actor and rollout share a pool or not: see placement"),
    Ignored("actor_rollout_ref.nccl_timeout", "see trainer.phaseTimeoutSeconds"),
    Ignored("global_profiler.*", "see telemetry.profile"),
    Ignored("*.profiler.*", "see telemetry.profile"),
    Ignored("skip.*", "generation is never skipped"),
    Ignored("transfer_queue.*", "rows move from worker to worker"),
    Ignored("distillation.*", "there is no distillation"),
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
