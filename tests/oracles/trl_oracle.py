"""TRL's published functions on the inputs of a file. Arguments: INPUTS ANSWERS (npz). Imports nothing of ours.

TRL 0.11 is the last version whose PPO consists of methods that take tensors. They read only the trainer's
configuration and its KL controller, so a namespace replaces the trainer.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import core
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.utils import AdaptiveKLController

KL_NAMES = {"K1": "kl", "K2": "mse", "Abs": "abs"}


def trainer(settings: dict[str, float], **config: Any) -> Any:
    """Whatever the methods read."""
    defaults = {
        "gamma": 1.0,
        "lam": 1.0,
        "whiten_rewards": False,
        "kl_penalty": "kl",
        # TRL has one bound for both sides.
        "cliprange": settings["clip_low"],
        "cliprange_value": settings["clip_value"],
        "vf_coef": 1.0,
        "ratio_threshold": float("inf"),
    }
    controller = SimpleNamespace(value=settings["kl_coefficient"])
    me = SimpleNamespace(config=SimpleNamespace(**{**defaults, **config}), kl_ctl=controller)
    me._kl_penalty = lambda *args: PPOTrainer._kl_penalty(me, *args)
    return me


def advantages(case: dict[str, Any], settings: dict[str, float], discounts: np.ndarray) -> dict[str, Any]:
    answers = {}
    for number, (gamma, lam) in enumerate(discounts.tolist()):
        me = trainer(settings, gamma=gamma, lam=lam)
        _, found, returns = PPOTrainer.compute_advantages(me, case["values"], case["rewards"], case["mask"])
        answers[f"GAE/{number}/advantages"], answers[f"GAE/{number}/returns"] = found, returns
    return answers


def kl(case: dict[str, Any], settings: dict[str, float]) -> dict[str, Any]:
    answers = {}
    for estimator, name in KL_NAMES.items():
        me = trainer(settings, kl_penalty=name)
        answers[f"kl/{estimator}"] = me._kl_penalty(case["log_prob"], case["ref_log_prob"])
        rewards, _, _ = PPOTrainer.compute_rewards(
            me, case["score"], case["old_log_prob"], case["ref_log_prob"], case["mask"]
        )
        answers[f"rewards/{estimator}"] = rewards
    return answers


def losses(case: dict[str, Any], settings: dict[str, float]) -> dict[str, Any]:
    log_prob, values = (case[key].clone().requires_grad_() for key in ("log_prob", "new_values"))
    old, others = case["old_log_prob"], (case["mask"], case["advantages"], case["returns"])
    policy, value, stats = PPOTrainer.loss(
        trainer(settings), old, case["values"], case["logits"], values, log_prob, *others
    )
    return {
        "pg_loss": policy,
        "pg_loss/gradient": torch.autograd.grad(policy, log_prob)[0],
        "vf_loss": value,
        "vf_loss/gradient": torch.autograd.grad(value, values)[0],
        "pg_clipfrac": stats["policy/clipfrac"],
        "ppo_kl": stats["policy/policykl"],
        "entropy": stats["policy/entropy"],
        "vf_clipfrac": stats["val/clipfrac"],
        "vpred_mean": stats["val/vpred"],
    }


def words(case: dict[str, Any]) -> dict[str, Any]:
    logits = case["logits"].clone().requires_grad_()
    log_probs, entropy = core.logprobs_from_logits(logits, case["labels"]), core.entropy_from_logits(logits)
    return {
        "log_probs": log_probs,
        "log_probs/gradient": torch.autograd.grad(log_probs.sum(), logits)[0],
        "entropies": entropy,
        "entropies/gradient": torch.autograd.grad(entropy.sum(), logits)[0],
    }


def masked(case: dict[str, Any]) -> dict[str, Any]:
    values, mask = case["returns"], case["mask"]
    return {
        "mean": core.masked_mean(values, mask),
        "variance": core.masked_var(values, mask),
        "whitened": core.masked_whiten(values, mask),
        "whitened/unshifted": core.masked_whiten(values, mask, shift_mean=False),
    }


def kl_coefficients(settings: dict[str, float], history: np.ndarray) -> list[float]:
    controller = AdaptiveKLController(settings["kl_coefficient"], settings["kl_target"], settings["kl_horizon"])
    found = []
    for current, number in history.tolist():
        controller.update(current, number)
        found.append(controller.value)
    return found


def main(given: str, answered: str) -> None:
    with np.load(given) as file:
        arrays = dict(file)
    settings = {key.split("/")[1]: float(value) for key, value in arrays.items() if key.startswith("settings/")}
    answers: dict[str, Any] = {"kl_coefficients": kl_coefficients(settings, arrays["kl_history"])}
    for name in dict.fromkeys(key.split("/")[0] for key in arrays if key.endswith("/mask")):
        case = {key.split("/")[1]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith(f"{name}/")}
        found = advantages(case, settings, arrays["discounts"]) | kl(case, settings) | losses(case, settings)
        answers |= {f"{name}/{key}": value for key, value in (found | words(case) | masked(case)).items()}
    plain = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in answers.items()}
    np.savez(answered, **{key: np.asarray(value) for key, value in plain.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
