"""The kinds of rows of the `table`, and the rows that actor and critic have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ppojob_trainer.commands.convert.values import (
    AGGREGATIONS,
    SCHEDULES,
    Change,
    number,
    one_of,
    only,
    same,
    truth,
    warmup,
    whole,
)


@dataclass(frozen=True)
class Converted:
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
class Ignored:
    """A setting that has nothing to say here, whatever its value."""

    name: str
    why: str


@dataclass(frozen=True)
class Unsupported:
    """A setting without a counterpart: reported if the user sets it, but not for verl's own default."""

    name: str
    why: str


Row = Converted | Checked | Ignored | Unsupported

_ENGINES = one_of({"fsdp": "", "fsdp2": ""}, "models are trained by FSDP2; for large ones set tensorParallelSize")
MEGATRON = "models are trained by FSDP2; for large ones set tensorParallelSize of the role and its offload"
_NO_R2 = "only the experts that the rollout recorded are replayed (R3): see rollout.routingReplay"
_NO_QUANTIZATION = "models are trained and generate with their own weights"


def field(name: str, target: str, change: Change) -> Converted:
    """Return the row of a setting that becomes one field."""
    return Converted(name, (target,), change)


def ignored(section: str, names: str, why: str) -> list[Row]:
    """Return rows of several settings of a section."""
    return [Ignored(f"{section}.{name}", why) for name in names.split()]


def unsupported(section: str, names: str, why: str) -> list[Row]:
    """Return rows of several settings of a section."""
    return [Unsupported(f"{section}.{name}", why) for name in names.split()]


def rows_of_trained(verl: str, role: str, engine: str) -> list[Row]:
    """Return rows of what actor and critic have in common."""
    return [
        *_rows_of_optimizer(verl, role),
        field(f"{verl}.ppo_mini_batch_size", f"{role}.miniBatchSize", whole),
        field(f"{verl}.ppo_max_token_len_per_gpu", f"{role}.maxTokensPerGPU", whole),
        field(f"{verl}.loss_agg_mode", f"{role}.lossAggregation", AGGREGATIONS),
        field(f"{verl}.grad_clip", f"{role}.gradClip", number),
        field(f"{engine}.param_offload", f"model.{role}.offload.parameters", truth),
        field(f"{engine}.optimizer_offload", f"model.{role}.offload.optimizer", truth),
        field(f"{verl}.megatron.param_offload", f"model.{role}.offload.parameters", truth),
        field(f"{verl}.megatron.optimizer_offload", f"model.{role}.offload.optimizer", truth),
        Ignored(f"{verl}.megatron.grad_offload", "gradients are freed after each update"),
        Unsupported(f"{verl}.megatron.*", MEGATRON),
        *unsupported(verl, "veomni* torchtitan* engine.* model_engine", MEGATRON),
        Checked(f"{engine}.offload_policy", only(False, f"use model.{role}.offload, which moves whole phases")),
        Checked(f"{verl}.strategy", _ENGINES),
        Checked(f"{engine}.strategy", _ENGINES),
        Checked(f"{verl}.shuffle", only(False, "minibatches keep the order of the batch in every epoch")),
        Ignored(f"{verl}.ppo_micro_batch_size*", f"micro-batches are filled up to {role}.maxTokensPerGPU"),
        Ignored(f"{verl}.forward_*", f"micro-batches are filled up to {role}.maxTokensPerGPU"),
        Ignored(f"{verl}.use_fused_kernels", "log-probs never hold all logits"),
        Ignored(f"{verl}.use_remove_padding", "sequences are always packed"),
        Ignored(f"{verl}.use_dynamic_bsz", f"micro-batches are always filled up to {role}.maxTokensPerGPU"),
        Checked(f"{engine}.model_dtype", only("fp32", f"parameters are float32: see model.{role}.offload for memory")),
        Checked(f"{engine}.dtype", only("bfloat16", "roles compute in bfloat16")),
        Checked(f"{engine}.full_determinism", only(False, "seeds are fixed, but kernels are not deterministic")),
        Checked(f"{engine}.qat.enable", only(False, _NO_QUANTIZATION)),
        Checked(f"{verl}.qat.enable", only(False, _NO_QUANTIZATION)),
        Checked(f"{verl}.loss_scale_factor", only(None, "SeqMeanTokenSumNorm divides by data.maxResponseLength")),
        Checked(f"{verl}.router_replay.mode", only("disabled", _NO_R2)),
        Checked(f"{verl}.load_weight", only(True, "a model always starts from its weights")),
        Unsupported(f"{engine}.mixed_precision.*", "roles compute in bfloat16 and sum gradients in float32"),
        *ignored(
            verl,
            "qat.* pad_to_length* data_loader_seed rollout_n nccl_timeout router_replay.*",
            "it changes no numbers",
        ),
        *ignored(
            engine,
            "reshard_after_forward use_no_sync_*",
            f"models stay gathered where the pool has the memory, see model.{role}.reshardAfterForward",
        ),
        *ignored(
            engine,
            "wrap_policy.* grad_offload forward_prefetch use_orig_params seed entropy_* "
            "use_torch_compile pad_to_length* forward_only turbo_config.* qat.*",
            "FSDP2 shards layer by layer, and needs no such setting",
        ),
    ]


def _rows_of_optimizer(verl: str, role: str) -> list[Row]:
    return [
        field(f"{verl}.optim.clip_grad", f"{role}.gradClip", number),
        field(f"{verl}.optim.lr", f"{role}.learningRate", number),
        field(f"{verl}.optim.weight_decay", f"{role}.weightDecay", number),
        field(f"{verl}.optim.lr_warmup_steps", f"{role}.learningRateWarmupSteps", warmup),
        field(f"{verl}.optim.lr_scheduler_type", f"{role}.learningRateSchedule", SCHEDULES),
        field(f"{verl}.optim.warmup_style", f"{role}.learningRateSchedule", SCHEDULES),
        field(f"{verl}.optim.lr_decay_style", f"{role}.learningRateSchedule", SCHEDULES),
        Checked(f"{verl}.optim.optimizer", one_of({"AdamW": "", "adamw": "", "adam": ""}, "the optimizer is AdamW")),
        Checked(f"{verl}.optim.min_lr", only(0.0, "schedules end at a learning rate of 0")),
        Checked(f"{verl}.optim.lr_warmup_init", only(0.0, "a warm-up begins at a learning rate of 0")),
        Checked(f"{verl}.optim.weight_decay_incr_style", only("constant", "the weight decay is constant")),
        Checked(f"{verl}.optim.use_precision_aware_optimizer", only(False, "AdamW's state is float32")),
        Unsupported(f"{verl}.optim.override_optimizer_config*", f"the optimizer is AdamW; see model.{role}.offload"),
        *ignored(
            f"{verl}.optim",
            "muon_* *_dtype lr_wsd_decay_style use_checkpoint_opt_param_scheduler use_layer_wise_distributed_optimizer "
            "lr_decay_steps weight_decay_incr_steps lr_min lr_start lr_decay_ratio",
            "it belongs to another optimizer or schedule",
        ),
        Checked(f"{verl}.optim.betas", only([0.9, 0.999], "AdamW's betas are 0.9 and 0.999")),
        Checked(f"{verl}.optim.min_lr_ratio", only(0.0, "schedules end at a learning rate of 0")),
        Checked(f"{verl}.optim.num_cycles", only(0.5, "the cosine is half a period long")),
        Ignored(f"{verl}.optim.total_training_steps", "schedules run over trainer.totalSteps"),
        *ignored(f"{verl}.optim", "optimizer_impl zero_indexed_step", "the optimizer is torch's AdamW"),
    ]


def rows_of_model(verl: str, role: str) -> list[Row]:
    """Return rows of the model of actor and critic."""
    return [
        field(f"{verl}.trust_remote_code", f"model.{role}.trustRemoteCode", truth),
        field(f"{verl}.enable_gradient_checkpointing", f"model.{role}.gradientCheckpointing", truth),
        field(f"{verl}.enable_activation_offload", f"model.{role}.activationOffload", truth),
        *ignored(verl, "use_remove_padding use_rmpad", "sequences are always packed"),
        Ignored(f"{verl}.use_fused_kernels", "log-probs never hold all logits"),
        Checked(f"{verl}.tiled_mlp.enabled", only(False, "layers compute whole rows; see gradientCheckpointing")),
        Ignored(f"{verl}.tiled_mlp.*", "it belongs to tiled layers"),
        Unsupported(f"{verl}.override_config.*", "write the values into the model's config.json"),
        Unsupported(f"{verl}.lora.*", f"see model.{role}.lora for the settings of adapters"),
        Ignored(f"{verl}.fused_kernel_options*", "log-probs never hold all logits"),
        Ignored(f"{verl}.use_shm", "each rank reads its own part of the model"),
        Checked(f"{verl}.use_liger", only(False, "model code is transformers' own")),
        Checked(f"{verl}.external_lib", only(None, "install it in the image; trustRemoteCode runs a model's own code")),
        Checked(f"{verl}.override_config", only({}, "write the values into the model's config.json")),
    ]
