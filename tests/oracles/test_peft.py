"""peft reads our adapters, computes with them what we compute, and merges them to the same weights.

Of Mixtral and gpt-oss, also the adapters of the experts. Families with dense layers or shared experts are missing: peft
gives their dense layers the rank and the factor of fused experts (docs/support-matrix.md, "Adapters on experts").
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.lora import initial_adapters
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.protocol import Keys
from tests.oracles.environments import Oracle
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.engines.tiny_experts import save_tiny_experts
from tests.unit.trainer.engines.tiny_llama import make_batch, save_tiny_model
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

BATCH = make_batch(8)


@pytest.fixture(scope="module")
def parallel() -> Iterator[ParallelMesh]:
    group = init_process_group(Device.CPU, 0, ParallelDims(), listen("127.0.0.1", 60), 60)
    yield group
    group.destroy()


@pytest.fixture(scope="module", params=["llama", "mixtral", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model of a family in `tiny`."""
    folder = tmp_path_factory.mktemp("peft")
    if request.param == "llama":
        save_tiny_model(folder / "tiny")
    else:
        save_tiny_experts(folder / "tiny", family=request.param)
    return folder


@pytest.fixture(scope="module")
def engine(parallel: ParallelMesh, folder: Path) -> FSDPEngine:
    """With adapters that two updates have moved."""
    actor = ActorModel(path=str(folder / "tiny"), lora=LoRA(rank=4, alpha=12.0))
    training = ActorSpec(learning_rate=1e-2, max_tokens_per_gpu=1000)
    policy = policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=9, seed=5, dtype=torch.float32)
    policy.update(BATCH)
    policy.update(BATCH)
    return policy


@pytest.fixture(scope="module")
def answers(engine: FSDPEngine, folder: Path) -> dict[str, Tensor]:
    engine.export(folder / "export")
    merged = folder / "merged"
    inputs = {name: tensor.numpy() for name, tensor in padded_inputs(BATCH).items()}
    paths = {"model": np.array(str(folder / "tiny")), "adapter": np.array(str(folder / "export" / "adapter"))}
    found = Oracle("peft").answers({**inputs, **paths, "merged": np.array(str(merged))}, folder)
    of_merged = {f"merged/{name}": value for name, value in load_file(merged / "model.safetensors").items()}
    return {name: torch.from_numpy(value) for name, value in found.items()} | of_merged


def test_it_computes_the_same_log_probs(engine: FSDPEngine, answers: dict[str, Tensor]) -> None:
    responses = padded_responses(BATCH)
    log_p = torch.log_softmax(response_part(answers["logits"], responses.shape[1]) / 0.7, dim=-1)
    expected = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * BATCH.padded(Keys.RESPONSE_MASK)
    computed = engine.forward(BATCH).padded(Keys.OLD_LOG_PROBS)
    torch.testing.assert_close(computed, expected, atol=2e-5, rtol=1e-5)


def test_it_merges_to_the_weights_that_the_rollout_gets(engine: FSDPEngine, answers: dict[str, Tensor]) -> None:
    weights = ShardedWeights(engine.module.language_model, torch.float32)
    ours = {spec.name: tensor.clone() for spec, tensor in zip(weights.specs(), weights.gather(), strict=True)}
    merged = {name.removeprefix("merged/"): value for name, value in answers.items() if name.startswith("merged/")}
    torch.testing.assert_close(ours, merged, atol=1e-6, rtol=1e-5)


def test_new_adapters_are_drawn_alike(engine: FSDPEngine, answers: dict[str, Tensor]) -> None:
    fresh = {name.removeprefix("fresh/"): value for name, value in answers.items() if name.startswith("fresh/")}
    ours = {
        f"base_model.model.{name.removeprefix('language_model.')}.weight": value
        for name, value in initial_adapters(engine.module, seed=1)
    }
    if ".mlp.experts." in str(list(ours)):
        # peft's new adapters are on routers, too, and on fused parameters of experts, with one A for gate and up.
        ours, fresh = ({name: part for name, part in each.items() if ".mlp." not in name} for each in (ours, fresh))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in fresh.items()}
    for name, value in ours.items():
        if "lora_B" in name:
            assert value.eq(0).all()
            assert fresh[name].eq(0).all()
        else:
            # Uniform in the same interval: the largest of 192 or 256 numbers is close to its end.
            assert value.abs().max() == pytest.approx(float(fresh[name].abs().max()), rel=0.1)
            assert float(value.std()) == pytest.approx(float(fresh[name].std()), rel=0.25)
