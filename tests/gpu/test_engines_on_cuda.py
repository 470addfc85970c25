"""The engines on one GPU: the same numbers as on the CPU, and weights to a vLLM engine that shares the GPU.

PPOJOB_TEST_MODEL names a folder with SmolLM2-135M-Instruct; without it the packaged model is converted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.models.smollm2 import prepare
from ppojob_trainer.protocol import Keys
from tests.gpu.one_gpu import difference_from_transformers, make_batch
from tests.integration.trainer.separate_process import seen_by
from tests.integration.trainer.vllm_agreement import MODULE
from tests.unit.trainer.engines.fsdp_engines import policy_engine

pytestmark = pytest.mark.gpu

LIMIT_SECONDS = 400
VOCABULARY = 49152


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("PPOJOB_TEST_MODEL")
    return Path(given) if given else prepare(tmp_path_factory.mktemp("models") / "smollm2")


def make_policy(parallel: ParallelMesh, path: Path, dtype: torch.dtype, **model: Any) -> FSDPEngine:
    training = ActorSpec(learning_rate=1e-4, max_tokens_per_gpu=model.pop("max_tokens", 4096))
    actor = ActorModel(path=str(path), **model)
    return policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=10, dtype=dtype)


def test_log_probs_equal_those_of_plain_transformers(parallel: ParallelMesh, model_path: Path) -> None:
    engine = make_policy(parallel, model_path, torch.bfloat16)
    # Random tokens have log-probs near -15, where bfloat16's logits are 0.06 apart.
    assert difference_from_transformers(engine, model_path, make_batch(VOCABULARY)) < 0.1


@pytest.mark.parametrize("model", [{"max_tokens": 80}, {"gradient_checkpointing": False}, {"compile": True}])
def test_how_it_is_computed_hardly_changes_an_update(
    parallel: ParallelMesh, model_path: Path, model: dict[str, Any]
) -> None:
    batch = make_batch(VOCABULARY)
    plain, other = (make_policy(parallel, model_path, torch.bfloat16, **options) for options in ({}, dict(model)))
    old = plain.forward(batch)
    metrics, others = (engine.update(batch.with_fields(old.columns)) for engine in (plain, other))
    assert others["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=0.05)
    assert others["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], abs=0.02)
    assert 0 < metrics["perf/mfu/actor"] < 1


def test_a_step_that_is_not_finite_is_skipped(parallel: ParallelMesh, model_path: Path) -> None:
    policy = make_policy(parallel, model_path, torch.bfloat16)
    batch = make_batch(VOCABULARY)
    batch = batch.with_fields(policy.forward(batch).columns)
    before = [tensor.clone() for tensor in policy.weights().gather()]
    batch.ragged(Keys.ADVANTAGES).values[0] = float("nan")
    batch.meta_info["num_mini_batches"] = 1
    assert policy.update(batch)["actor/non_finite_steps"] == 1
    assert all(map(torch.equal, before, policy.weights().gather()))


def test_a_checkpoint_is_read_back(parallel: ParallelMesh, model_path: Path, tmp_path: Path) -> None:
    batch = make_batch(VOCABULARY)
    saved, resumed = (make_policy(parallel, model_path, torch.bfloat16) for _ in range(2))
    batch = batch.with_fields(saved.forward(batch).columns)
    saved.update(batch)
    saved.save(tmp_path / "step")
    resumed.restore(tmp_path / "step")
    for left, right in zip(saved.weights().gather(), resumed.weights().gather(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize(
    "backend",
    [
        "cuda_ipc",
        # NCCL wants a GPU for each process.
        pytest.param("nccl", marks=pytest.mark.gpu(2)),
    ],
)
def test_vllm_follows_the_weights(model_path: Path, backend: str) -> None:
    seen = seen_by(MODULE, str(model_path), "CUDA", backend, limit=LIMIT_SECONDS)
    print(json.dumps(seen))
    assert seen["diff_at_start"] < 0.012
    assert seen["diff_of_stale_weights"] > 0.024
    assert seen["diff_after_push"] < 0.012
    assert seen["weights_version"] == 2
    assert (seen["first_is_read_back"], seen["second_is_read_back"]) == (True, False)
