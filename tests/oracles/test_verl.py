"""Same inputs, same numbers as verl's published functions, and where its conventions differ, how they map onto ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppojob_trainer.maths.importance import Bounds, correction_metrics, effective_share, importance_weights
from ppojob_trainer.maths.kl import KL_ESTIMATORS, kl_estimate, penalize_rewards
from ppojob_trainer.maths.losses import AGGREGATIONS, Denominators, entropy_bonus
from ppojob_trainer.maths.masked import masked_mean, masked_var, masked_whiten
from ppojob_trainer.maths.overlong import Overlong
from ppojob_trainer.maths.policy_losses import Clipping
from ppojob_trainer.rewards import gsm8k
from tests.oracles import ours
from tests.oracles.ours import Case, assert_equal
from tests.oracles.random_cases import CASES, DISCOUNTS, GSM8K_RESPONSES, GSM8K_TRUTH, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

CLIPPING = Clipping(SETTINGS["clip_low"], SETTINGS["clip_high"], SETTINGS["clip_dual"])
Answers = dict[str, Tensor]


@pytest.fixture(scope="module")
def all_answers(answers_of: Callable[[str], Answers]) -> Answers:
    return answers_of("verl")


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def verl(all_answers: Answers, name: str) -> Answers:
    return {key.removeprefix(f"{name}/"): value for key, value in all_answers.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("number", range(len(DISCOUNTS)))
@pytest.mark.parametrize("estimator", ["GAE", "ReinforcePlusPlus"])
def test_discounted_advantages_and_their_whitening(case: Case, verl: Answers, estimator: str, number: int) -> None:
    advantages, returns = ours.advantages(case, estimator, *DISCOUNTS[number])

    assert_equal(advantages, verl[f"{estimator}/{number}/advantages"], case["mask"])
    assert_equal(returns, verl[f"{estimator}/{number}/returns"], case["mask"])


@pytest.mark.parametrize("estimator", ["GRPO", "DrGRPO", "RLOO"])
def test_advantages_within_a_group(case: Case, verl: Answers, estimator: str) -> None:
    assert_equal(ours.advantages(case, estimator)[0], verl[estimator])


@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_kl_estimators_and_their_gradients(case: Case, verl: Answers, estimator: str) -> None:
    log_prob = case["log_prob"].clone().requires_grad_()
    estimate = kl_estimate(log_prob, case["ref_log_prob"], estimator)

    assert_equal(estimate, verl[f"kl/{estimator}"])
    assert_equal(torch.autograd.grad(estimate.sum(), log_prob)[0], verl[f"kl/{estimator}/gradient"])


def test_kl_in_the_reward(case: Case, verl: Answers) -> None:
    kl = kl_estimate(case["old_log_prob"], case["ref_log_prob"], "K1")
    rewards, _ = penalize_rewards(case["rewards"], kl, case["mask"], SETTINGS["kl_coefficient"])

    assert_equal(rewards, verl["rewards"], case["mask"])


def test_the_penalty_of_overlong_responses(case: Case, verl: Answers) -> None:
    rewards, mask = torch.zeros_like(case["rewards"]), case["mask"]
    overlong = Overlong(mask.shape[1], int(SETTINGS["overlong_buffer"]), SETTINGS["overlong_factor"])
    penalized, penalty = overlong.penalized(rewards, mask)

    assert_equal(penalized.sum(dim=1), verl["overlong"])
    assert_equal(-penalty, verl["overlong"])
    assert 0 < (penalty > 0).sum() < len(mask), "some responses must be overlong, and others not"


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_policy_loss(case: Case, verl: Answers, mode: str) -> None:
    loss, metrics, gradient = ours.policy(case, CLIPPING, mode)

    assert_equal(loss, verl[f"{mode}/pg_loss"])
    assert_equal(gradient, verl[f"{mode}/pg_loss/gradient"])
    for metric in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        assert_equal(metrics[metric], verl[f"{mode}/{metric}"])
    assert verl[f"{mode}/pg_clipfrac"] > 0.2, "the inputs must reach the clipping"
    assert verl[f"{mode}/pg_clipfrac_lower"] > 0, "and the dual clip"


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("loss_name", ["GSPO", "CISPO"])
def test_other_policy_losses(case: Case, verl: Answers, name: str, loss_name: str, mode: str) -> None:
    clipping = Clipping(SETTINGS["gspo_low"], SETTINGS["gspo_high"]) if loss_name == "GSPO" else CLIPPING
    loss, metrics, gradient = ours.policy(case, clipping, mode, name=loss_name)

    assert_equal(loss, verl[f"{mode}/{loss_name}"])
    assert_equal(gradient, verl[f"{mode}/{loss_name}/gradient"])
    assert_equal(metrics["pg_clipfrac"], verl[f"{mode}/{loss_name}/pg_clipfrac"])
    assert verl[f"{mode}/{loss_name}/pg_clipfrac"] > 0.2, "the inputs must reach the clipping"
    if not (name == "extreme" and loss_name == "GSPO"):
        # verl bounds the log-ratio there after this metric.
        assert_equal(metrics["ppo_kl"], verl[f"{mode}/{loss_name}/ppo_kl"])


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_a_rank_of_verl_holds_its_share_times_the_number_of_ranks(case: Case, verl: Answers, mode: str) -> None:
    """verl's loss of a rank is made to be averaged by FSDP, ours is a share to be added."""
    for rank, rows in enumerate((slice(0, 5), slice(5, None))):
        share, _, _ = ours.policy(case, CLIPPING, mode, rows)

        assert_equal(share * 2, verl[f"{mode}/pg_loss/rank-{rank}"])


@pytest.mark.parametrize(
    ("name_of_weights", "bounds"),
    [
        ("token/2.0", Bounds(upper=2.0)),
        ("sequence/2.0", Bounds(is_of_sequence=True, upper=2.0)),
        ("token/0.5_2.0", Bounds(upper=2.0, lower=0.5)),
        ("sequence/0.5_1e9", Bounds(is_of_sequence=True, upper=1e9, lower=0.5)),
    ],
)
def test_importance_weights_of_the_rollout(
    case: Case, verl: Answers, name: str, name_of_weights: str, bounds: Bounds
) -> None:
    inputs = case["old_log_prob"], case["log_prob"], case["mask"], bounds
    theirs = f"correction/{name_of_weights}"
    metrics = correction_metrics(*inputs, Denominators.of(case["mask"]))

    assert_equal(importance_weights(*inputs), verl[theirs])
    assert_equal(metrics["rollout_is_mean"], verl[f"{theirs}/rollout_is_mean"])
    share = effective_share(float(metrics["rollout_is_mean"]), float(metrics["rollout_is_square"]))
    assert share == pytest.approx(float(verl[f"{theirs}/rollout_is_eff_sample_size"]), rel=1e-4)
    if not bounds.is_of_sequence:
        # verl counts sequences at the other level.
        high = verl[f"{theirs}/rollout_is_ratio_fraction_high"]
        assert_equal(metrics["rollout_is_ratio_fraction_high"], high)
        assert high > 0.05, "the inputs must reach the bound"
    assert_equal(metrics["kl"], verl["correction/kl"])
    if name != "extreme":
        # verl does not clamp the exponent of this one.
        torch.testing.assert_close(metrics["k3_kl"].double(), verl["correction/k3_kl"].double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_value_loss(case: Case, verl: Answers, mode: str) -> None:
    loss, metrics, gradient = ours.value(case, mode)

    assert_equal(loss, verl[f"{mode}/vf_loss"])
    assert_equal(gradient, verl[f"{mode}/vf_loss/gradient"])
    assert_equal(metrics["vf_clipfrac"], verl[f"{mode}/vf_clipfrac"])
    assert verl[f"{mode}/vf_clipfrac"] > 0.05


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_mean_entropy(case: Case, verl: Answers, mode: str) -> None:
    entropies, _ = ours.words(case, 1)
    _, metrics = entropy_bonus(entropies, case["mask"], Denominators.of(case["mask"]), 0.01, mode)

    assert_equal(metrics["entropy"], verl[f"{mode}/entropy"])


@pytest.mark.parametrize(("which", "key"), [(0, "log_probs"), (1, "entropies")])
def test_log_probs_and_entropies_from_logits(case: Case, verl: Answers, which: int, key: str) -> None:
    found, gradient = ours.words(case, which)

    assert_equal(found, verl[key])
    # Theirs is the gradient by the logits, one layer further.
    assert_equal(gradient, verl[f"{key}/gradient"] @ case["output_layer"])


def test_two_ways_of_verl_to_the_log_probs_agree(case: Case, verl: Answers) -> None:
    assert_equal(ours.words(case, 0)[0], verl["log_probs/naive"])


def test_masked_statistics(case: Case, verl: Answers) -> None:
    values, mask = case["returns"], case["mask"]

    assert_equal(masked_mean(values, mask), verl["mean"])
    assert_equal(masked_var(values, mask), verl["variance"])
    assert_equal(masked_whiten(values, mask), verl["whitened"], mask)
    assert_equal(masked_whiten(values, mask, shift_mean=False), verl["whitened/unshifted"], mask)


def test_the_adaptive_kl_coefficient(all_answers: Answers) -> None:
    assert_equal(ours.kl_coefficients(), all_answers["kl_coefficients"])


@pytest.mark.parametrize("method", gsm8k.METHODS)
def test_scores_of_gsm8k(all_answers: Answers, method: str) -> None:
    scores = [
        gsm8k.compute_score(
            data_source="openai/gsm8k",
            solution_str=response,
            ground_truth=GSM8K_TRUTH,
            extra_info={},
            method=method,
            format_score=0.25,
        )["score"]
        for response in GSM8K_RESPONSES
    ]

    assert scores == all_answers[f"gsm8k/{method}"].tolist()
    assert set(scores) == {0.0, 0.25, 1.0}, "the responses must reach all cases"
