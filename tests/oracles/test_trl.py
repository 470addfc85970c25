"""Same inputs, same numbers as TRL's published functions, and where its conventions differ, how they map onto ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppojob_trainer.maths.kl import kl_estimate, penalize_rewards
from ppojob_trainer.maths.losses import Denominators, entropy_bonus
from ppojob_trainer.maths.masked import masked_mean, masked_var, masked_whiten
from ppojob_trainer.maths.policy_losses import Clipping
from tests.oracles import ours
from tests.oracles.ours import Case, assert_equal
from tests.oracles.random_cases import DISCOUNTS, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

Answers = dict[str, Tensor]
# TRL knows no dual clip.
CLIPPING = Clipping(SETTINGS["clip_low"], SETTINGS["clip_low"], dual=float("inf"))


@pytest.fixture(scope="module")
def all_answers(answers_of: Callable[[str], Answers]) -> Answers:
    return answers_of("trl")


@pytest.fixture(params=["padded", "gaps"])
def name(request: pytest.FixtureRequest) -> str:
    """Not `extreme`: TRL does not bound the log-ratio."""
    return str(request.param)


@pytest.fixture
def trl(all_answers: Answers, name: str) -> Answers:
    return {key.removeprefix(f"{name}/"): value for key, value in all_answers.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("number", range(len(DISCOUNTS)))
def test_gae_and_its_whitening(cases: dict[str, Case], all_answers: Answers, number: int) -> None:
    """Without gaps: TRL takes a token that the mask hides for one of value and reward 0, we step over it."""
    case = cases["padded"]
    advantages, returns = ours.advantages(case, "GAE", *DISCOUNTS[number])

    assert_equal(advantages, all_answers[f"padded/GAE/{number}/advantages"], case["mask"])
    assert_equal(returns, all_answers[f"padded/GAE/{number}/returns"], case["mask"])


@pytest.mark.parametrize("estimator", ["K1", "K2", "Abs"])
def test_kl_and_the_reward_with_it(case: Case, trl: Answers, estimator: str) -> None:
    kl = kl_estimate(case["log_prob"], case["ref_log_prob"], estimator)
    assert_equal(kl, trl[f"kl/{estimator}"])

    scores = torch.zeros_like(case["rewards"])
    places = torch.arange(scores.shape[1]) * case["mask"]
    scores[torch.arange(len(scores)), places.argmax(dim=1)] = case["score"]
    kl = kl_estimate(case["old_log_prob"], case["ref_log_prob"], estimator)
    rewards, _ = penalize_rewards(scores, kl, case["mask"], SETTINGS["kl_coefficient"])
    assert_equal(rewards, trl[f"rewards/{estimator}"], case["mask"])


def test_policy_loss(case: Case, trl: Answers) -> None:
    loss, metrics, gradient = ours.policy(case, CLIPPING, "TokenMean")

    assert_equal(loss, trl["pg_loss"])
    assert_equal(gradient, trl["pg_loss/gradient"])
    assert_equal(metrics["pg_clipfrac"], trl["pg_clipfrac"])
    assert_equal(metrics["ppo_kl"], trl["ppo_kl"])


def test_value_loss(case: Case, trl: Answers) -> None:
    loss, metrics, gradient = ours.value(case, "TokenMean")

    assert_equal(loss, trl["vf_loss"])
    assert_equal(gradient, trl["vf_loss/gradient"])
    assert_equal(metrics["vf_clipfrac"], trl["vf_clipfrac"])
    assert_equal(metrics["vpred_mean"], trl["vpred_mean"])


def test_mean_entropy(case: Case, trl: Answers) -> None:
    entropies, _ = ours.words(case, 1)
    _, metrics = entropy_bonus(entropies, case["mask"], Denominators.of(case["mask"]), 0.01)

    assert_equal(metrics["entropy"], trl["entropy"])


@pytest.mark.parametrize(("which", "key"), [(0, "log_probs"), (1, "entropies")])
def test_log_probs_and_entropies_from_logits(case: Case, trl: Answers, which: int, key: str) -> None:
    found, gradient = ours.words(case, which)

    assert_equal(found, trl[key])
    # Theirs is the gradient by the logits, one layer further.
    assert_equal(gradient, trl[f"{key}/gradient"] @ case["output_layer"])


def test_masked_statistics(case: Case, trl: Answers) -> None:
    values, mask = case["returns"], case["mask"]

    assert_equal(masked_mean(values, mask), trl["mean"])
    assert_equal(masked_var(values, mask), trl["variance"])
    assert_equal(masked_whiten(values, mask), trl["whitened"], mask)
    assert_equal(masked_whiten(values, mask, shift_mean=False), trl["whitened/unshifted"], mask)


def test_the_adaptive_kl_coefficient(all_answers: Answers) -> None:
    assert_equal(ours.kl_coefficients(), all_answers["kl_coefficients"])
