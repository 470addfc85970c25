"""The same minibatch gives the same gradient, weights and metrics, however it is gone through.

One rank or two, any micro-batches, rows in any order; packed without padding by the engine, or padded and in fixed
micro-batches by plain transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppojob_api.v1alpha1.training import LossAggregation
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.maths.kl import kl_estimate
from ppojob_trainer.maths.log_probs import plain_log_probs
from ppojob_trainer.maths.losses import Denominators, entropy_bonus, kl_loss, policy_loss
from ppojob_trainer.maths.policy_losses import PolicyLossInputs
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.engines import gradient_ranks
from tests.unit.trainer.engines.gradient_ranks import ENTROPY_COEFFICIENT, KL_IN_LOSS, ROLES, TEMPERATURE, WAYS
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH, assert_same_updates
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Results = dict[str, Any]
REFERENCE = "one micro-batch"


@pytest.fixture(scope="module")
def of_one(parallel: ParallelMesh, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return gradient_ranks.all_ways(parallel, model_path, gradient_ranks.whole_batch(), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def of_two(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(ParallelDims(shard=2), model_path, folder, gradient_ranks.all_ways)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


def assert_same_step(found: Results, expected: Results) -> None:
    """Compare the gradients, to 1e-4 of the largest entry, and what was added to the weights.

    Float32 sums in another order, as on another processor, differ; a missing part makes more than 0.1.
    """
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = gradient.abs().max()
        assert scale > 0, f"{name} has no gradient"
        torch.testing.assert_close(found["gradients"][name] / scale, gradient / scale, atol=1e-4, rtol=0, msg=name)
    assert_same_updates(found["weights"], expected["weights"], expected["before"])
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("way", [name for name in WAYS if name != REFERENCE])
@pytest.mark.parametrize("aggregation", list(LossAggregation))
@pytest.mark.parametrize("role", ROLES)
def test_on_one_rank(of_one: Results, role: str, aggregation: LossAggregation, way: str) -> None:
    key = f"{role} {aggregation.value}"
    assert_same_step(of_one[f"{key} {way}"], of_one[f"{key} {REFERENCE}"])


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("aggregation", list(LossAggregation))
@pytest.mark.parametrize("role", ROLES)
def test_on_two_ranks(
    of_two: list[Results], of_one: Results, role: str, aggregation: LossAggregation, way: str
) -> None:
    key = f"{role} {aggregation.value}"
    for of_rank in of_two:
        assert_same_step(of_rank[f"{key} {way}"], of_one[f"{key} {REFERENCE}"])


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_plain_transformers_with_padding_and_fixed_micro_batches(
    of_one: Results, model_path: Path, aggregation: LossAggregation, rows: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    batch = gradient_ranks.whole_batch()
    counts = Denominators.of(batch.padded(Keys.RESPONSE_MASK))
    for start in range(0, len(batch), rows):
        part = batch[list(range(start, min(start + rows, len(batch))))]
        padded_loss(model, part, counts, aggregation.value).backward()

    packed = of_one[f"actor {aggregation.value} micro-batches by tokens"]["gradients"]
    padded = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert len(packed) == len(padded)
    for name, gradient in packed.items():
        theirs = next(value for key, value in padded.items() if name.endswith(key))
        scale = gradient.abs().max()
        torch.testing.assert_close(gradient / scale, theirs / scale, atol=1e-3, rtol=0, msg=name)


def padded_loss(model: torch.nn.Module, batch: DataProto, counts: Denominators, aggregation: str) -> Tensor:
    mask, old, advantages, reference = (
        batch.padded(key, RESPONSE_LENGTH)
        for key in (Keys.RESPONSE_MASK, Keys.OLD_LOG_PROBS, Keys.ADVANTAGES, Keys.REF_LOG_PROB)
    )
    logits = response_part(model(**padded_inputs(batch, RESPONSE_LENGTH)).logits, RESPONSE_LENGTH)
    responses = padded_responses(batch, RESPONSE_LENGTH)
    flat = plain_log_probs(logits.flatten(0, 1), responses.flatten(), TEMPERATURE)
    log_prob, entropy = (values.view(mask.shape) for values in flat)
    loss, _ = policy_loss(PolicyLossInputs(log_prob, old, advantages, mask), counts, aggregation=aggregation)
    bonus, _ = entropy_bonus(entropy, mask, counts, ENTROPY_COEFFICIENT, aggregation)
    kl = kl_estimate(log_prob, reference, KL_IN_LOSS.kl.loss_estimator.value)
    penalty, _ = kl_loss(kl, mask, counts, KL_IN_LOSS.kl.loss_coefficient, aggregation)
    return loss + bonus + penalty
