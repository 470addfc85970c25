"""What to change in a pool that does not fit, or only without the plan's known error: fields with values. Called by
`plan`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ppojob_api.v1alpha1.pools import REWARD_MODEL, Role, base_role
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.main.memory_remedies import has_large_adapters, larger_engine
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.pool import PoolPlan, RolePlan

__all__ = ["remedies"]

_GB: Final = 1e9


def remedies(spec: PPOJobSpec, pool: PoolPlan, gpu: Gpu) -> list[str]:
    """Return the changes, those of the largest parts first. Plan again with them: they are not added up here."""
    found = [change for role in pool.roles for change in _of_role(spec, role)]
    found += _of_engine(spec, pool, gpu)
    found.append((0.0, f"pools.{pool.name}: more GPUs, which divide models and batches"))
    # The reference has the budget of the actor, so both may name it.
    return list(dict.fromkeys(words for _, words in sorted(found, reverse=True)))


def _of_role(spec: PPOJobSpec, found: RolePlan) -> Iterator[tuple[float, str]]:
    role, need = found.role, found.need
    if role.trained is not None:
        name = role.name
        if not role.trained.gradient_checkpointing:
            yield need.activations, f"model.{name}.gradientCheckpointing: true"
        lora, measured = role.trained.lora, found.measured
        is_notable = lora is None or has_large_adapters(measured.num_adapters, measured.num_sent)
        if not role.offloads_moments and is_notable:
            words = f"model.{name}.offload.optimizer: true (frees {need.optimizer / _GB:.1f} GB outside its updates)"
            yield need.optimizer, words
        if lora is not None and is_notable and lora.rank > 1:
            # Their float32 parameters take as much memory as their gradients.
            freed = (2 * need.gradients + need.optimizer) / 2
            fewer = ", or fewer lora.targetModules" if len(lora.target_modules) != 1 else ""
            words = f"model.{name}.lora.rank: {lora.rank // 2} (now {lora.rank}){fewer}"
            yield freed, f"{words} (half of the adapters: {freed / _GB:.1f} GB)"
        if found.stays_gathered:
            yield need.activations / 2, f"model.{name}.reshardAfterForward: true"
    section = {Role.CRITIC.value: "critic", REWARD_MODEL: "model.reward"}.get(base_role(role.name), "actor")
    halved = max(role.fewest_tokens(spec), role.max_tokens // 2)
    if halved < role.max_tokens:
        yield need.activations / 2, f"{section}.maxTokensPerGPU: {halved} (now {role.max_tokens})"


def _of_engine(spec: PPOJobSpec, pool: PoolPlan, gpu: Gpu) -> Iterator[tuple[float, str]]:
    engine, share = pool.engine, spec.rollout.gpu_memory_utilization
    if engine is None:
        return
    if not engine.fits:
        yield (
            0.0,
            f"{larger_engine(spec.rollout)}, or rollout.gpuMemoryUtilization (now {share:g}): a larger one; the share "
            f"of {engine.share / _GB:.1f} GB does not hold the weights of {engine.weights / _GB:.1f} GB and the cache "
            "of one sequence",
        )
    trains = pool.name in (spec.placement.actor, spec.placement.critic)
    if not spec.rollout.sleep and trains and pool.memory.training > pool.memory.generation - engine.share:
        yield engine.share, f"rollout.sleep: true (frees {engine.share / _GB:.1f} GB while roles compute)"
    # Engines that sleep have their share only while they generate.
    with_share = pool.memory.generation if spec.engines_sleep_in(pool.name) else pool.memory.most
    excess = with_share + pool.memory.processes - pool.most_planned
    lower = round(share - excess / gpu.memory - 0.005, 2)
    length = spec.data.max_prompt_length + spec.data.max_response_length
    least = (engine.weights + engine.working + engine.cache_per_token * length) / gpu.memory
    if excess > 0 and lower > least:
        yield engine.share, f"rollout.gpuMemoryUtilization: {lower:.2f} (now {share:g})"
