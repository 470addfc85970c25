"""verl's published functions on the inputs of a file. Arguments: INPUTS ANSWERS (npz). Imports nothing of ours."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.utils.reward_score import gsm8k
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

Arrays = dict[str, np.ndarray]
MODES = {"TokenMean": "token-mean", "SeqMeanTokenSum": "seq-mean-token-sum", "SeqMeanTokenMean": "seq-mean-token-mean",
         "SeqMeanTokenSumNorm": "seq-mean-token-sum-norm"}  # fmt: skip
"""Our names of the aggregations, and verl's."""


def advantages(case: dict[str, Any], discounts: np.ndarray) -> dict[str, Any]:
    rewards, mask, groups = case["rewards"], case["mask"], case["groups"].numpy()
    answers = {}
    for number, (gamma, lam) in enumerate(discounts.tolist()):
        found = core_algos.compute_gae_advantage_return(rewards, case["values"], mask, gamma, lam)
        answers[f"GAE/{number}/advantages"], answers[f"GAE/{number}/returns"] = found
        config = SimpleNamespace(gamma=gamma)
        found = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
        answers[f"ReinforcePlusPlus/{number}/advantages"], answers[f"ReinforcePlusPlus/{number}/returns"] = found
    answers["GRPO"], _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, groups)
    answers["DrGRPO"], _ = core_algos.compute_grpo_outcome_advantage(
        rewards, mask, groups, norm_adv_by_std_in_grpo=False
    )
    answers["RLOO"], _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, groups)
    return answers


def kl(case: dict[str, Any], settings: dict[str, float]) -> dict[str, Any]:
    answers = {}
    for estimator in ("K1", "K2", "K3", "Abs"):
        log_prob = case["log_prob"].clone().requires_grad_()
        estimate = core_algos.kl_penalty(log_prob, case["ref_log_prob"], estimator.lower())
        answers[f"kl/{estimator}"] = estimate
        answers[f"kl/{estimator}/gradient"] = torch.autograd.grad(estimate.sum(), log_prob)[0]
    answers["rewards"] = core_algos.compute_rewards(
        case["rewards"], case["old_log_prob"], case["ref_log_prob"], settings["kl_coefficient"]
    )
    return answers


def actor(low: float, high: float, dual: float) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )


def other_losses(case: dict[str, Any], settings: dict[str, float], mode: str) -> dict[str, Any]:
    answers = {}
    for name, (low, high) in {"GSPO": ("gspo_low", "gspo_high"), "CISPO": ("clip_low", "clip_high")}.items():
        config = actor(settings[low], settings[high], settings["clip_dual"])
        log_prob = case["log_prob"].clone().requires_grad_()
        function = core_algos.get_policy_loss_fn(name.lower())
        loss, metrics = function(case["old_log_prob"], log_prob, case["advantages"], case["mask"], mode, config)
        answers |= {name: loss, f"{name}/gradient": torch.autograd.grad(loss, log_prob)[0]}
        answers |= {f"{name}/{key.removeprefix('actor/')}": value for key, value in metrics.items()}
    return answers


def losses(case: dict[str, Any], settings: dict[str, float], mode: str) -> dict[str, Any]:
    config = actor(settings["clip_low"], settings["clip_high"], settings["clip_dual"])
    mask, log_prob = case["mask"], case["log_prob"].clone().requires_grad_()
    policy = core_algos.compute_policy_loss_vanilla
    loss, metrics = policy(case["old_log_prob"], log_prob, case["advantages"], mask, mode, config)
    answers = {"pg_loss": loss, "pg_loss/gradient": torch.autograd.grad(loss, log_prob)[0]}
    answers |= {name.removeprefix("actor/"): value for name, value in metrics.items()}
    # As on two ranks with rows 0-4 and 5-11, whose gradients FSDP averages.
    seen = {"batch_num_tokens": mask.sum().item(), "global_batch_size": mask.any(dim=1).sum().item(), "dp_size": 2}
    for key, value in seen.items():
        config.global_batch_info[key] = value
    for rank, rows in enumerate((slice(0, 5), slice(5, None))):
        part = [case[key][rows] for key in ("old_log_prob", "log_prob", "advantages", "mask")]
        answers[f"pg_loss/rank-{rank}"], _ = policy(*part, mode, config)
    values = case["new_values"].clone().requires_grad_()
    loss, fraction = core_algos.compute_value_loss(
        values, case["returns"], case["values"], mask, settings["clip_value"], mode
    )
    answers |= {"vf_loss": loss, "vf_loss/gradient": torch.autograd.grad(loss, values)[0], "vf_clipfrac": fraction}
    answers |= other_losses(case, settings, mode)
    answers["entropy"] = core_algos.compute_entropy_loss(case["logits"], mask, mode)
    return answers


def overlong(case: dict[str, Any], settings: dict[str, float]) -> torch.Tensor:
    """What the reward manager dapo gives a response whose score is 0."""
    mask = case["mask"]
    num_rows, width = mask.shape
    data = DataProto.from_dict(
        {
            "prompts": torch.zeros(num_rows, 1, dtype=torch.long),
            "responses": torch.zeros_like(mask),
            "attention_mask": torch.cat([torch.ones(num_rows, 1, dtype=torch.long), mask], dim=1),
        },
        {
            "reward_model": np.array([{"ground_truth": ""}] * num_rows, dtype=object),
            "data_source": np.array(["d"] * num_rows, dtype=object),
        },
    )
    buffer = SimpleNamespace(
        enable=True, len=int(settings["overlong_buffer"]), penalty_factor=settings["overlong_factor"], log=False
    )
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "", eos_token="<end>")
    manager = DAPORewardManager(tokenizer, 0, lambda **_: 0.0, max_resp_len=width, overlong_buffer_cfg=buffer)
    return manager(data).sum(dim=1)


CORRECTIONS = (("token", "2.0"), ("sequence", "2.0"), ("token", "0.5_2.0"), ("sequence", "0.5_1e9"))
"""Level and bounds of importance weights: truncated at one bound, masked outside of two. verl fails if it masks all."""


def corrections(case: dict[str, Any]) -> dict[str, Any]:
    """The engine is the policy of log_prob, the trainer that of old_log_prob."""
    log_ratio, mask = case["old_log_prob"] - case["log_prob"], case["mask"]
    answers = {}
    for level, threshold in CORRECTIONS:
        name = f"{level}/{threshold}"
        compute = rollout_corr_helper.compute_rollout_correction_weights
        weights, metrics = compute(log_ratio, mask, level, threshold)
        answers[f"correction/{name}"] = weights
        answers |= {f"correction/{name}/{metric}": value for metric, value in metrics.items()}
    metrics = rollout_corr_helper.compute_offpolicy_metrics(case["old_log_prob"], case["log_prob"], mask)
    return answers | {f"correction/{metric}": metrics[metric] for metric in ("kl", "k3_kl")}


def words(case: dict[str, Any]) -> dict[str, Any]:
    logits, labels = case["logits"].clone().requires_grad_(), case["labels"]
    log_probs = torch_functional.logprobs_from_logits_v2(logits, labels)
    entropy = torch_functional.entropy_from_logits(logits)
    return {
        "log_probs": log_probs,
        "log_probs/naive": torch_functional.logprobs_from_logits_naive(logits, labels),
        "log_probs/gradient": torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)[0],
        "entropies": entropy,
        "entropies/gradient": torch.autograd.grad(entropy.sum(), logits)[0],
    }


def masked(case: dict[str, Any]) -> dict[str, Any]:
    values, mask = case["returns"], case["mask"]
    return {
        "mean": torch_functional.masked_mean(values, mask),
        "variance": torch_functional.masked_var(values, mask),
        "whitened": torch_functional.masked_whiten(values, mask),
        "whitened/unshifted": torch_functional.masked_whiten(values, mask, shift_mean=False),
    }


def kl_coefficients(settings: dict[str, float], history: np.ndarray) -> list[float]:
    controller = core_algos.AdaptiveKLController(
        settings["kl_coefficient"], settings["kl_target"], settings["kl_horizon"]
    )
    found = []
    for current, number in history.tolist():
        controller.update(current, number)
        found.append(controller.value)
    return found


def gsm8k_scores(arrays: Arrays) -> dict[str, list[float]]:
    truth, responses = str(arrays["gsm8k/truth"]), [str(response) for response in arrays["gsm8k/responses"]]
    return {
        f"gsm8k/{method}": [float(gsm8k.compute_score(text, truth, method, 0.25, 1.0)) for text in responses]
        for method in ("strict", "flexible")
    }


def main(given: str, answered: str) -> None:
    with np.load(given) as file:
        arrays: Arrays = dict(file)
    settings = {key.split("/")[1]: float(value) for key, value in arrays.items() if key.startswith("settings/")}
    answers: dict[str, Any] = {"kl_coefficients": kl_coefficients(settings, arrays["kl_history"])}
    answers |= gsm8k_scores(arrays)
    for name in dict.fromkeys(key.split("/")[0] for key in arrays if key.endswith("/mask")):
        case = {key.split("/")[1]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith(f"{name}/")}
        found = (
            advantages(case, arrays["discounts"]) | kl(case, settings) | words(case) | masked(case) | corrections(case)
        )
        found["overlong"] = overlong(case, settings)
        for name_of_mode, mode in MODES.items():
            found |= {f"{name_of_mode}/{key}": value for key, value in losses(case, settings, mode).items()}
        answers |= {f"{name}/{key}": value for key, value in found.items()}
    plain = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in answers.items()}
    np.savez(answered, **{key: np.asarray(value) for key, value in plain.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
