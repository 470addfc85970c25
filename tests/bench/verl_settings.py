"""The benchmark's workload as settings of verl: the same job, and the settings that make it fast.

Called by `verl_run`. Settings that are in neither table have verl's default, which is ours too: learning rates,
clipping, discounts, float32 weights with bfloat16 computation, AdamW. Names and meanings are those of verl 0.9.1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ppojob_api.v1alpha1.algorithm import KLControllerType
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


def overrides(spec: PPOJobSpec, size: Size, prompts: Path, folder: Path) -> list[str]:
    """Return the arguments of `verl.trainer.main_ppo` (Hydra overrides).

    Args:
        spec: the job with all roles in one pool, which is the one placement that verl has; resolved.
        prompts: in verl's columns.
        folder: where verl may write.
    """
    chosen = {**TUNED, **_work(spec, prompts), **_budgets(spec, size), **_folders(folder)}
    return [f"{name}={json.dumps(value)}" for name, value in chosen.items()]


def _work(spec: PPOJobSpec, prompts: Path) -> dict[str, Any]:
    """Return what is to be computed."""
    data, rollout, kl = spec.data, spec.rollout, spec.algorithm.kl
    reward = spec.reward.function
    assert reward is not None, "the workload's rewards are of a function"
    assert kl.controller.type is KLControllerType.FIXED, "the workload has a fixed coefficient"
    steps, gpus = spec.trainer.total_steps, sum(pool.gpus for pool in spec.pools)
    return {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": gpus,
        "ray_kwargs.ray_init.num_cpus": max(os.cpu_count() or 1, _CORES + _CORES_PER_GPU * gpus),
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
        "actor_rollout_ref.actor.ppo_mini_batch_size": spec.actor.mini_batch_size,
        "critic.ppo_mini_batch_size": spec.critic.mini_batch_size,
        "actor_rollout_ref.rollout.ignore_eos": rollout.ignore_eos,
        "actor_rollout_ref.rollout.calculate_log_probs": rollout.log_probs,
    }


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
