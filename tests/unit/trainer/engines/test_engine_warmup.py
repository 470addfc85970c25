"""A warm-up runs the code of a step and changes no state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppojob_api.v1alpha1.algorithm import KL, AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA, Offload, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.batch import Segments
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.warmup import Recording, synthetic_batches
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.engines.fsdp_engines import critic_engine, policy_engine, reference_engine

PROMPT, RESPONSE = 12, 9


@pytest.fixture
def make_policy(model_path: Path, parallel: ParallelMesh) -> Callable[..., FSDPEngine]:
    def make(**model: Any) -> FSDPEngine:
        actor = ActorModel(path=str(model_path), **model)
        training = ActorSpec(learning_rate=1e-2, max_tokens_per_gpu=PROMPT + RESPONSE)
        algorithm = AlgorithmSpec(kl=KL(in_loss=True))
        return policy_engine(parallel, actor, training, algorithm, total_steps=9, dtype=torch.float32)

    return make


@pytest.mark.parametrize(
    "model", [{}, {"lora": LoRA(rank=2)}, {"offload": Offload(parameters=True, optimizer=True)}], ids=str
)
def test_a_warmup_does_not_change_the_policys_first_steps(
    make_policy: Callable[..., FSDPEngine], batch: DataProto, model: dict[str, Any]
) -> None:
    plain, warmed_up = make_policy(**model), make_policy(**model)
    random = torch.get_rng_state()
    warmed_up.warm_up(PROMPT, RESPONSE)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in warmed_up.module.parameters())
    assert not warmed_up.optimizer.adamw.state
    log_probs = [engine.forward(batch).padded(Keys.OLD_LOG_PROBS) for engine in (plain, warmed_up)]
    assert torch.equal(*log_probs)
    for _ in range(2):
        assert warmed_up.update(batch) == plain.update(batch)


def test_a_warmup_runs_forward_and_backward(
    make_policy: Callable[..., FSDPEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()
    calls: list[tuple[bool, int]] = []
    forward: Any = policy.module.forward

    def noted(tokens: Any, temperature: float, received: None) -> Any:
        calls.append((torch.is_grad_enabled(), tokens.segments.num_tokens))
        return forward(tokens, temperature, received)

    monkeypatch.setattr(policy.module, "forward", noted)
    policy.warm_up(PROMPT, RESPONSE)
    whole, half = PROMPT + RESPONSE, PROMPT // 2 + RESPONSE // 2
    # The second batch comes in two micro-batches, because three halves are more than a micro-batch may have.
    assert sorted(calls) == sorted((grad, size) for grad in (False, True) for size in (whole, 2 * half, half))


def test_critic_and_reference_warm_up_too(model_path: Path, parallel: ParallelMesh, batch: DataProto) -> None:
    def make() -> FSDPEngine:
        training = CriticSpec(learning_rate=1e-2, max_tokens_per_gpu=1000)
        model = TrainedModel(path=str(model_path))
        return critic_engine(parallel, model, "", training, total_steps=9, seed=0, dtype=torch.float32)

    plain, warmed_up = make(), make()
    warmed_up.warm_up(PROMPT, RESPONSE)
    values = [engine.forward(batch) for engine in (plain, warmed_up)]
    assert torch.equal(*(found.padded(Keys.VALUES) for found in values))
    assert warmed_up.update(batch) == plain.update(batch)
    reference = reference_engine(parallel, str(model_path), max_tokens_per_gpu=1000, dtype=torch.float32)
    reference.warm_up(PROMPT, RESPONSE)


def test_recorded_experts_of_a_warm_up_are_of_all_experts_alike() -> None:
    recording = Recording(num_layers=3, per_token=2, num_experts=5)
    assert recording.of(11).shape == (11, 3, 2)
    for shape in (recording, Recording(24, 4, 32), Recording(48, 8, 128), Recording(2, 2, 2)):
        of_tokens = shape.of(64)
        for layer in range(shape.num_layers):
            found, counts = np.unique(of_tokens[:, layer], return_counts=True)
            assert found.tolist() == list(range(shape.num_experts))
            assert counts.max() - counts.min() <= 1
            assert all(len(set(experts)) == shape.per_token for experts in of_tokens[:, layer].tolist())
    for batch in synthetic_batches(7, 5, recording):
        experts, sequences = batch.ragged(Keys.ROUTED_EXPERTS), batch.ragged(Keys.INPUT_IDS)
        assert experts.lengths.tolist() == [(length - 1) * 6 for length in sequences.lengths.tolist()]
    assert Recording(1, 1, 257).of(1).dtype == np.uint16


@pytest.mark.parametrize(("prompt", "response"), [(7, 5), (130, 127), (130, 512), (100, 2048)])
def test_the_two_batches_differ_in_all_sizes_and_have_the_longest_sequence(prompt: int, response: int) -> None:
    first, second = (
        tuple(int(length) for length in batch.ragged(Keys.INPUT_IDS).lengths)
        for batch in synthetic_batches(prompt, response)
    )
    assert first == (prompt + response,)
    assert second == (prompt // 2 + response // 2,) * 3
    # Up to 256 tokens, all batches of the job have the same one.
    bounds = [Segments(torch.empty(0), lengths).bound for lengths in (first, second)]
    assert bounds[0] != bounds[1] or first[0] <= 256
