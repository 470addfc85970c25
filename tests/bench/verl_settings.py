"""The benchmark's workload as settings of verl: the same job, and the settings that make it fast.

Called by `verl_run`. Settings that are in neither table have verl's default, which is ours too: learning rates,
clipping, discounts, float32 weights with bfloat16 computation, AdamW. Names and meanings are those of verl 0.9.1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ppojob_api.v1alpha1.algorithm import KLControllerType, KLEstimator
from ppojob_api.v1alpha1.spec import PPOJobSpec
from tests.bench.workload import SHAPES, Size

TUNED: Final[Mapping[str, Any]] = {
    # FSDP2. Weights stay whole from the forward to the backward pass, and gradients are reduced once for a minibatch:
    # models this small leave the memory for it.
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "critic.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False,
    "critic.fsdp.reshard_after_forward": False,
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": True,
    "critic.fsdp.use_no_sync_for_gradient_accumulation": True,
    # Passes are filled up to a number of tokens; critic, reference and log-probs follow the actor in that.
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    # No work is spent on padding (it wants flash-attn).
    "actor_rollout_ref.model.use_remove_padding": True,
    "critic.model.use_remove_padding": True,
    # The logits of all tokens are never held: the output layer and its loss are one kernel.
    "actor_rollout_ref.model.use_fused_kernels": True,
    # A replica of vLLM on each GPU. Its CUDA graphs and torch.compile are on by default.
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    # Nothing but training steps.
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "disable",
    "trainer.logger": ["console", "file"],
}
# Cores that verl's actors ask Ray for: its queue, and each GPU's workers. With fewer it waits for ever.
_CORES, _CORES_PER_GPU = 12, 3
# verl's Triton kernel takes hidden states of a multiple of this; others have its chunked torch code.
_TRITON_MULTIPLE = 128


@dataclass(frozen=True)
class Schedule:
    """One of verl's ways to train: the name of its column, its program, and the settings that belong to it.

    is_apart: half of the GPUs generate, and the others train.
    """

    name: str
    module: str
    is_apart: bool
    settings: Mapping[str, Any]


COLOCATED: Final = Schedule("", "verl.trainer.main_ppo", False, {})
ONE_STEP_OFF: Final = Schedule(
    ", one step off",
    "verl.experimental.one_step_off_policy.main_ppo",
    True,
    {
        # Its settings name a folder of verl's source for those that they change.
        "hydra.searchpath": ["pkg://verl.trainer.config"],
        "actor_rollout_ref.hybrid_engine": False,
        # It needs them to train without the trainer's old log-probs.
        "actor_rollout_ref.rollout.calculate_log_probs": True,
    },
)
"""verl's "one step off policy": the step's responses come from the weights before the last update."""


def overrides(spec: PPOJobSpec, size: Size, prompts: Path, folder: Path, schedule: Schedule = COLOCATED) -> list[str]:
    """Return the arguments of the schedule's program (Hydra overrides).

    Args:
        spec: the job with all roles in one pool; resolved.
        prompts: in verl's columns.
        folder: where verl may write.
    """
    work = {**_work(spec, prompts), **_budgets(spec, size), **_gpus(spec, schedule)}
    chosen = {**TUNED, **work, **_folders(folder), **schedule.settings}
    return [f"{name}={json.dumps(value)}" for name, value in chosen.items()]


def schedules(spec: PPOJobSpec) -> list[Schedule]:
    """Return the schedules that verl has for a job.

    Without a critic and with at least two GPUs, that is also the one in which generation and training take turns no
    longer.
    """
    may_be_apart = not spec.algorithm.needs_critic and sum(pool.gpus for pool in spec.pools) > 1
    return [COLOCATED, ONE_STEP_OFF] if may_be_apart else [COLOCATED]


def _work(spec: PPOJobSpec, prompts: Path) -> dict[str, Any]:
    """Return what is to be computed."""
    data, rollout, kl = spec.data, spec.rollout, spec.algorithm.kl
    reward = spec.reward.function
    assert reward is not None, "the workload's rewards are of a function"
    assert kl.controller.type is KLControllerType.FIXED, "the workload has a fixed coefficient"
    assert kl.loss_estimator is KLEstimator.K3, "the workload has verl's default"
    steps = spec.trainer.total_steps
    return {
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": steps,
        "actor_rollout_ref.model.path": spec.model.actor.path,
        "critic.model.path": spec.model.actor.path,
        "data.train_files": [str(prompts)],
        # verl wants some, and reads none of them.
        "data.val_files": [str(prompts)],
        "data.shuffle": False,
        "data.train_batch_size": data.train_batch_size,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "reward.custom_reward_function.path": reward.path,
        "reward.num_workers": reward.num_workers,
        "algorithm.adv_estimator": spec.algorithm.advantage_estimator.name.lower(),
        "algorithm.use_kl_in_reward": kl.in_reward,
        "algorithm.kl_ctrl.kl_coef": kl.controller.coefficient,
        "actor_rollout_ref.actor.use_kl_loss": kl.in_loss,
        "actor_rollout_ref.actor.kl_loss_coef": kl.loss_coefficient,
        "actor_rollout_ref.rollout.n": rollout.samples_per_prompt,
        "actor_rollout_ref.actor.ppo_mini_batch_size": spec.actor.mini_batch_size,
        "critic.ppo_mini_batch_size": spec.critic.mini_batch_size,
        "actor_rollout_ref.rollout.ignore_eos": rollout.ignore_eos,
        "actor_rollout_ref.rollout.calculate_log_probs": rollout.log_probs,
    }


def _gpus(spec: PPOJobSpec, schedule: Schedule) -> dict[str, Any]:
    """Return which GPUs there are, and what verl's actors may have of the processors."""
    gpus = sum(pool.gpus for pool in spec.pools)
    found = {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": gpus,
        "ray_kwargs.ray_init.num_cpus": max(os.cpu_count() or 1, _CORES + _CORES_PER_GPU * gpus),
    }
    if not schedule.is_apart:
        return found
    rollout = gpus // 2
    apart = {"trainer.n_gpus_per_node": gpus - rollout, "rollout.nnodes": 1, "rollout.n_gpus_per_node": rollout}
    return found | apart


def _budgets(spec: PPOJobSpec, size: Size) -> dict[str, Any]:
    """Return what it may take: tokens of a pass, memory, and what is kept or computed again."""
    data, rollout, model = spec.data, spec.rollout, spec.model
    hidden = SHAPES[size.shape]["hidden_size"]
    return {
        "actor_rollout_ref.model.fused_kernel_options.impl_backend": "torch" if hidden % _TRITON_MULTIPLE else "triton",
        "actor_rollout_ref.model.enable_gradient_checkpointing": model.actor.gradient_checkpointing,
        "critic.model.enable_gradient_checkpointing": model.critic.gradient_checkpointing,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": spec.actor.max_tokens_per_gpu,
        "critic.ppo_max_token_len_per_gpu": spec.critic.max_tokens_per_gpu,
        # The one that verl reads; its files do not have it, so it is added.
        "+critic.ppo_infer_max_token_len_per_gpu": spec.critic.max_tokens_per_gpu,
        "actor_rollout_ref.rollout.gpu_memory_utilization": rollout.gpu_memory_utilization,
        "actor_rollout_ref.rollout.free_cache_engine": rollout.sleep,
        "actor_rollout_ref.rollout.enforce_eager": rollout.enforce_eager,
        "actor_rollout_ref.rollout.max_num_seqs": rollout.max_num_seqs,
        "actor_rollout_ref.rollout.max_num_batched_tokens": rollout.max_num_batched_tokens,
        "actor_rollout_ref.rollout.max_model_len": data.max_prompt_length + data.max_response_length,
    }


def _folders(folder: Path) -> dict[str, Any]:
    return {
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "hydra.run.dir": str(folder / "hydra"),
        "hydra.output_subdir": None,
    }
