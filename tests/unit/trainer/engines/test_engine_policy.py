"""The policy on one rank: equal to plain transformers, and the same however a minibatch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import KL, AlgorithmSpec, RolloutCorrection
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.training import ActorSpec, LossAggregation
from ppojob_trainer.engines.errors import NonFiniteError
from ppojob_trainer.engines.train.batch import split_minibatches
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys, ProtocolError
from ppojob_trainer.worker_groups.roles.actor import READ_BY_UPDATE, unread_by_update
from tests.unit.trainer.engines.fsdp_engines import policy_engine, reference_engine
from tests.unit.trainer.engines.tiny_llama import assert_same_updates
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part, unpadded

Parameters = dict[str, torch.Tensor]


@pytest.fixture
def make_policy(model_path: Path, parallel: ParallelMesh) -> Callable[..., FSDPEngine]:
    def make(algorithm: AlgorithmSpec | None = None, checkpointing: bool = False, **training: object) -> FSDPEngine:
        settings = {"learning_rate": 1e-3, "max_tokens_per_gpu": 1000, **training}
        return policy_engine(
            parallel,
            ActorModel(path=str(model_path), gradient_checkpointing=checkpointing),
            ActorSpec(**settings),
            algorithm or AlgorithmSpec(),
            total_steps=10,
            dtype=torch.float32,
        )

    return make


def parameters(engine: FSDPEngine) -> Parameters:
    return {
        spec.name: tensor.clone()
        for spec, tensor in zip(engine.weights().specs(), engine.weights().gather(), strict=True)
    }


def plain_log_probs(model_path: Path, batch: DataProto, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**padded_inputs(batch)).logits
    responses = padded_responses(batch)
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]) / temperature, dim=-1)
    chosen = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    mask = batch.padded(Keys.RESPONSE_MASK)
    return chosen * mask, -(log_p.exp() * log_p).sum(-1) * mask


def test_log_probs_and_entropies_equal_those_of_plain_transformers(
    make_policy: Callable[..., FSDPEngine], model_path: Path, batch: DataProto
) -> None:
    computed = make_policy(max_tokens_per_gpu=30).forward(batch)
    log_probs, entropies = plain_log_probs(model_path, batch, temperature=0.7)
    torch.testing.assert_close(computed.padded(Keys.OLD_LOG_PROBS), log_probs, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(computed.padded(Keys.ENTROPYS), entropies, atol=2e-5, rtol=1e-4)


def test_the_reference_equals_the_policy_before_training(
    make_policy: Callable[..., FSDPEngine], model_path: Path, parallel: ParallelMesh, batch: DataProto
) -> None:
    reference = reference_engine(parallel, str(model_path), max_tokens_per_gpu=1000, dtype=torch.float32)
    computed = reference.forward(batch)
    expected = make_policy().forward(batch).padded(Keys.OLD_LOG_PROBS)
    assert torch.equal(computed.padded(Keys.OLD_LOG_PROBS), expected)


OWN_LOSS = {
    "policyLoss": "Function",
    "policyLossFunction": {"path": str(Path("examples/12-own-algorithm/algorithm.py").absolute())},
}


@pytest.mark.parametrize("aggregation", list(LossAggregation))
@pytest.mark.parametrize("loss", [{}, {"policyLoss": "GSPO"}, {"policyLoss": "CISPO"}, OWN_LOSS], ids=str)
def test_neither_micro_batches_nor_checkpointing_change_an_update(
    make_policy: Callable[..., FSDPEngine], batch: DataProto, aggregation: LossAggregation, loss: dict[str, Any]
) -> None:
    kl, correction = KL(in_loss=True, loss_coefficient=0.1), RolloutCorrection()
    algorithm = AlgorithmSpec.model_validate({"kl": kl, "rolloutCorrection": correction, **loss})
    old = batch.ragged(Keys.OLD_LOG_PROBS)
    batch = batch.with_fields({Keys.ROLLOUT_LOG_PROBS: old.with_values(old.values - 0.3)})
    # With only the columns that a rank gets; reading another one is an error.
    # This model has no experts.
    batch = batch.select(sorted(set(READ_BY_UPDATE) - unread_by_update(algorithm) - {Keys.ROUTED_EXPERTS}))
    settings = {"loss_aggregation": aggregation, "entropy_coefficient": 0.01}
    whole, cut = make_policy(algorithm, **settings), make_policy(algorithm, True, max_tokens_per_gpu=16, **settings)
    before = parameters(whole)
    metrics, metrics_of_cut = whole.update(batch), cut.update(batch)
    assert metrics_of_cut == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"] > 0.01
    assert_same_updates(parameters(cut), parameters(whole), before)


def test_padding_rows_weigh_nothing(make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto]) -> None:
    batch = batch_of(7, num_mini_batches=1)
    padded = batch[[*range(7), 0]]
    mask = padded.ragged(Keys.RESPONSE_MASK)
    padded = padded.with_fields({Keys.RESPONSE_MASK: mask.with_values(mask.values & (mask.row_of < 7))})
    plain, with_padding = make_policy(), make_policy()
    before = parameters(plain)
    assert with_padding.update(padded) == pytest.approx(plain.update(batch), rel=1e-4, abs=1e-6)
    assert_same_updates(parameters(with_padding), parameters(plain), before)


def test_an_update_follows_the_advantages(make_policy: Callable[..., FSDPEngine], batch: DataProto) -> None:
    engine = make_policy()
    before = engine.forward(batch).ragged(Keys.OLD_LOG_PROBS)
    mask = batch.ragged(Keys.RESPONSE_MASK)
    wanted = batch.with_fields({Keys.OLD_LOG_PROBS: before, Keys.ADVANTAGES: mask.with_values(mask.values.float())})
    metrics = engine.update(wanted)
    after = engine.forward(batch).ragged(Keys.OLD_LOG_PROBS)
    assert after.values.sum() > before.values.sum()
    assert metrics["actor/lr"] == pytest.approx(1e-3)
    assert metrics["actor/non_finite_steps"] == 0
    assert "perf/mfu/actor" not in metrics


CORRECTED = AlgorithmSpec(rollout_correction=RolloutCorrection(upper=2.0))


def test_the_correction_multiplies_the_advantages_by_the_weights(
    make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto]
) -> None:
    corrected, by_hand = make_policy(CORRECTED), make_policy()
    before = parameters(by_hand)
    batch = batch_of(8)
    mask, old = batch.padded(Keys.RESPONSE_MASK), batch.padded(Keys.OLD_LOG_PROBS)
    # Half of the tokens have the weight exp(0.5), the others, above the bound, 2.
    apart = torch.full(old.shape, 0.5)
    apart[::2] = 1.5
    weights = apart.exp().clamp(max=2.0)
    advantages = batch.padded(Keys.ADVANTAGES) * weights

    metrics = corrected.update(batch.with_fields({Keys.ROLLOUT_LOG_PROBS: unpadded(batch, old - apart)}))
    by_hand.update(batch.with_fields({Keys.ADVANTAGES: unpadded(batch, advantages)}))

    assert_same_updates(parameters(corrected), parameters(by_hand), before)
    high = mask[::2].sum() / mask.sum()
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(
        float((weights * mask).sum() / mask.sum()), rel=0.05
    )
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(float(high), abs=0.1)
    assert metrics["rollout_corr/kl"] < 0
    assert 0.9 < metrics["rollout_corr/rollout_is_eff_sample_size"] < 1
    assert "rollout_corr/rollout_is_square" not in metrics


def test_without_old_log_probs_the_weights_are_those_of_the_policy_before_its_only_update(
    make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto]
) -> None:
    left_out, computed = make_policy(CORRECTED), make_policy(CORRECTED)
    batch = batch_of(8, num_mini_batches=1)
    old = computed.forward(batch).ragged(Keys.OLD_LOG_PROBS)
    batch = batch.with_fields({Keys.ROLLOUT_LOG_PROBS: old.with_values(old.values - 0.3), Keys.OLD_LOG_PROBS: old})
    without = batch.select([name for name in batch.columns if name != Keys.OLD_LOG_PROBS])

    metrics, expected = left_out.update(without), computed.update(batch)

    assert expected.pop("training/update_probs_diff_mean") < 1e-6
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.3, abs=1e-4)


def test_the_first_step_of_an_update_is_compared_with_the_pass_before_it(
    make_policy: Callable[..., FSDPEngine], batch: DataProto
) -> None:
    """Its weights are equal; those of later steps are not, which `ppo_kl` shows."""
    policy = make_policy(max_tokens_per_gpu=40)
    computed = batch.with_fields({Keys.OLD_LOG_PROBS: policy.forward(batch).ragged(Keys.OLD_LOG_PROBS)})
    metrics = policy.update(computed)
    assert metrics["training/update_probs_diff_mean"] < 1e-6
    assert abs(metrics["actor/ppo_kl"]) > 1e-4
    assert metrics["actor/grad_norm_max"] > metrics["actor/grad_norm"]

    log_probs = computed.ragged(Keys.OLD_LOG_PROBS)
    halved = computed.with_fields({Keys.OLD_LOG_PROBS: log_probs.with_values(log_probs.values - math.log(2))})
    other = make_policy(max_tokens_per_gpu=40)
    first, *_ = split_minibatches(halved, 2)
    probs = first.ragged(Keys.OLD_LOG_PROBS).values.exp()
    assert other.update(halved)["training/update_probs_diff_mean"] == pytest.approx(float(probs.mean()), rel=1e-4)

    # The engine computed them, with the same weights or with older ones.
    bypassed = make_policy(AlgorithmSpec(rollout_correction=RolloutCorrection(method="Bypass")))
    given = computed.with_fields({Keys.ROLLOUT_LOG_PROBS: log_probs})
    assert "training/update_probs_diff_mean" not in bypassed.update(given)
    # The loss takes those of the update's own pass.
    without = computed.select([name for name in computed.columns if name != Keys.OLD_LOG_PROBS])
    assert "training/update_probs_diff_mean" not in make_policy().update(without)


def test_epochs_are_passes_over_the_same_minibatches(
    make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto]
) -> None:
    twice, by_hand = make_policy(), make_policy()
    twice.update(batch_of(8, epochs=2))
    by_hand.update(batch_of(8))
    by_hand.update(batch_of(8))
    torch.testing.assert_close(parameters(twice), parameters(by_hand), atol=0, rtol=0)


def test_a_gradient_that_is_not_finite_skips_the_step_and_fails_by_name_after_some(
    make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto]
) -> None:
    engine = make_policy(max_non_finite_steps=2)
    before = parameters(engine)
    bad = batch_of(8, num_mini_batches=1)
    bad.ragged(Keys.ADVANTAGES).values[0] = float("nan")
    metrics = engine.update(bad)
    assert metrics["actor/non_finite_steps"] == 1
    torch.testing.assert_close(parameters(engine), before, atol=0, rtol=0)
    with pytest.raises(NonFiniteError, match="nan in 2 optimizer steps in a row"):
        engine.update(bad)


def test_a_skipped_step_leaves_moments_and_their_count_of_steps(
    make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto]
) -> None:
    skipping, without = make_policy(max_non_finite_steps=9), make_policy()
    bad, good = batch_of(8, num_mini_batches=1), batch_of(8, num_mini_batches=1)
    bad.ragged(Keys.ADVANTAGES).values[0] = float("inf")
    # Also before there are any moments, and between two steps that have some.
    for batch in (bad, good, bad, good):
        skipping.update(batch)
    for _ in range(2):
        without.update(good)
    torch.testing.assert_close(parameters(skipping), parameters(without), atol=0, rtol=0)
    (steps,) = {float(state["step"]) for state in skipping.optimizer.adamw.state.values()}
    assert steps == 2


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads from tensors, for which it would wait for a device."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_passes_and_optimizer_steps_read_nothing_from_the_device(
    make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_policy()
    read: dict[str, list[int]] = {}

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            with Reads() as reads:
                answer = method(*arguments)
            read.setdefault(name, []).append(reads.number)
            return answer

        monkeypatch.setattr(owner, name, call)

    parts = [
        (engine, "_compute"),
        (engine.objective, "loss"),
        (torch.autograd, "backward"),
        (engine.optimizer, "clip"),
        (engine.optimizer, "step"),
    ]
    for owner, name in parts:
        watch(owner, name)
    engine.update(batch_of(8, num_mini_batches=4))
    assert read == {name: [0] * 4 for _, name in parts}
    with Reads() as seen:
        float(torch.ones(1).sum())
    assert seen.number == 1


def test_a_good_step_in_between_forgives_the_bad_one(
    make_policy: Callable[..., FSDPEngine], batch_of: Callable[..., DataProto]
) -> None:
    engine = make_policy(max_non_finite_steps=2)
    good, bad = batch_of(8, num_mini_batches=1), batch_of(8, num_mini_batches=1)
    bad.ragged(Keys.ADVANTAGES).values[0] = float("inf")
    for batch in (bad, good, bad):
        engine.update(batch)


@pytest.mark.parametrize("missing", ["temperature", "num_mini_batches", "epochs", "response_length"])
def test_a_batch_that_does_not_say_how_is_refused_by_name(
    make_policy: Callable[..., FSDPEngine], batch: DataProto, missing: str
) -> None:
    del batch.meta_info[missing]
    with pytest.raises(ProtocolError, match=f"no meta_info entry '{missing}'"):
        make_policy().update(batch)
