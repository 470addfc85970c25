"""The functions of `parts` for the algorithm: clipping, estimator, dynamic sampling, experts, FP8, long responses,
older weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ppojob_trainer.commands.convert.draft import Draft
from ppojob_trainer.commands.convert.values import number, whole


def clipping(draft: Draft) -> None:
    """Say that verl reads other settings, whose default is 0.2, where it has them."""
    both = draft.given.get("actor_rollout_ref.actor.clip_ratio")
    if both is not None and "actor_rollout_ref.actor.clip_ratio_low" not in draft.given:
        why = f"clip_ratio={both} is both bounds here; verl 0.9 reads clip_ratio_low and clip_ratio_high, which are 0.2"
        draft.to_fill.append(("actor.clipRatioLow", why))


def estimator(draft: Draft) -> None:
    """grpo without the deviation is Dr.GRPO, whose constant length is that of the longest response."""
    name = "algorithm.adv_estimator"
    if draft.take("algorithm.norm_adv_by_std_in_grpo") is False and draft.given.get(name) == "grpo":
        draft.take(name)
        draft.values["algorithm.advantageEstimator"] = "DrGRPO"
    for role in ("actor_rollout_ref.actor", "critic"):
        scale = f"{role}.loss_scale_factor"
        if draft.given.get(scale) == draft.given.get("data.max_response_length", 512):
            draft.take(scale)
    low = "actor_rollout_ref.actor.clip_ratio_low"
    is_cispo = draft.given.get("actor_rollout_ref.actor.policy_loss.loss_mode") == "cispo"
    if is_cispo and number(draft.given.get(low, 0)) > 1:
        # A ratio is above 0, so every bound below 0 is none.
        draft.given[low] = 1


def dynamic_sampling(draft: Draft) -> None:
    """Prompts whose responses are all as good as each other are replaced."""
    at = "algorithm.filter_groups"
    is_on = draft.take(f"{at}.enable", default=False)
    metric, limit = draft.take(f"{at}.metric"), draft.take(f"{at}.max_num_gen_batches", default=0)
    if is_on is not True:
        return
    generated, trained = draft.take("data.gen_batch_size"), draft.given.get("data.train_batch_size", 1024)
    # Ours are batches of trainBatchSize. 0 is no limit.
    ratio = max(1.0, number(generated) / number(trained)) if generated else 1.0
    draft.values["algorithm.dynamicSampling.maxGenerationBatches"] = min(1000, math.ceil(whole(limit) * ratio) or 1000)
    if metric not in (None, "acc", "score"):
        why = f"verl compares {metric}; here the scores are compared, without KL and the penalty of length"
        draft.to_fill.append(("algorithm.dynamicSampling", why))


def routing_replay(draft: Draft) -> None:
    """The experts of a mixture that the rollout recorded (R3). verl needs vLLM's prefix cache off for it, ours on."""
    rollout, mode = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.router_replay.mode"
    if draft.take(f"{rollout}.enable_rollout_routing_replay") is not True:
        return
    draft.values["rollout.routingReplay"] = True
    draft.take(f"{rollout}.enable_prefix_caching")
    if draft.given.get(mode) == "R3":
        draft.take(mode)


def divided_experts(draft: Draft) -> None:
    """The GPUs of an engine divide its experts: all of its GPUs, or none. Another size is left for the table."""
    rollout = "actor_rollout_ref.rollout"
    experts, engine = (draft.given.get(f"{rollout}.{name}_parallel_size") for name in ("expert", "tensor_model"))
    if experts is not None and engine is not None and whole(experts) == whole(engine) > 1:
        draft.take(f"{rollout}.expert_parallel_size")
        draft.values["rollout.enableExpertParallel"] = True


def quantized_rollout(draft: Draft) -> None:
    """FP8 rollouts. Ours need importance weights and log-probs; verl's do without, unless the user asks for them."""
    rollout, correction = "actor_rollout_ref.rollout", "algorithm.rolloutCorrection"
    if draft.given.get(f"{rollout}.quantization") != "fp8":
        return
    draft.take(f"{rollout}.quantization", f"{rollout}.calculate_log_probs")
    draft.values["rollout.quantization"] = "FP8"
    if draft.given.get("algorithm.rollout_correction.rollout_is") not in _LEVELS:
        draft.values[f"{correction}.method"] = "Truncate"
        why = "FP8 rollouts need importance weights here; verl's run had none, so results differ"
        draft.to_fill.append((correction, why))


def overlong_responses(draft: Draft) -> None:
    """The penalty of overlong responses, which verl's reward manager dapo computes."""
    managers = ("reward_model.reward_manager", "reward.reward_manager.name")
    is_dapo = "dapo" in [draft.given.get(manager) for manager in managers]
    if is_dapo:
        draft.take(*managers)
    kwargs = ("reward_model.reward_kwargs", "reward.reward_kwargs")
    places = ("reward_model.overlong_buffer", *(f"{at}.overlong_buffer_cfg" for at in kwargs))

    def setting(name: str, default: Any) -> Any:
        return draft.take(*(f"{at}.{name}" for at in places), default=default)

    is_on, buffer, factor = setting("enable", False), setting("len", 0), setting("penalty_factor", 1.0)
    setting("log", None)
    longest = draft.take(*(f"{at}.max_resp_len" for at in kwargs))
    if is_on is not True:
        return
    draft.values["reward.overlongPenalty.buffer"] = whole(buffer)
    draft.values["reward.overlongPenalty.factor"] = number(factor)
    if longest not in (None, draft.given.get("data.max_response_length")):
        why = "the penalty is that of responses up to data.maxResponseLength"
        draft.unconverted.append((f"{kwargs[1]}.max_resp_len", longest, why))
    if not is_dapo:
        why = "verl computes the penalty with reward manager dapo alone: remove it if it had no effect"
        draft.to_fill.append(("reward.overlongPenalty", why))


def older_weights(draft: Draft) -> None:
    """The schedule of verl's one-step-off-policy, and the importance weights of the rollout."""
    where, target = "algorithm.rollout_correction", "algorithm.rolloutCorrection"
    if draft.given.get(f"{where}.bypass_mode") is True:
        # The weights are 1 then: verl's old log-probs are the engine's.
        draft.take(*(f"{where}.{name}" for name in ("bypass_mode", "rollout_is", "rollout_is_threshold")))
        draft.values[f"{target}.method"] = "Bypass"
    level, bounds = draft.given.get(f"{where}.rollout_is"), draft.given.get(f"{where}.rollout_is_threshold")
    if level in _LEVELS:
        draft.take(f"{where}.rollout_is", f"{where}.rollout_is_threshold")
        lower, _, upper = str(bounds if bounds is not None else 2.0).rpartition("_")
        draft.values |= {f"{target}.method": "Mask" if lower else "Truncate", f"{target}.level": _LEVELS[level]}
        draft.values[f"{target}.upper"] = float(upper)
        if lower:
            draft.values[f"{target}.lower"] = float(lower)
    if draft.is_one_step_off:
        draft.values |= {"schedule.mode": "OneStepOff", "schedule.maxStaleness": 1}
        draft.values.setdefault(f"{target}.method", "None")
        # The defaults of that program; `pools` makes the rollout's of them.
        draft.given = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8, **draft.given}


_LEVELS: Mapping[str | None, str] = {"token": "Token", "sequence": "Sequence"}
