"""The critic: its value head, its values, its update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from ppojob_api.v1alpha1.model import TrainedModel
from ppojob_api.v1alpha1.training import CriticSpec
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.engines.fsdp_engines import critic_engine
from tests.unit.trainer.engines.tiny_llama import save_tiny_model
from tests.unit.trainer.padded import padded_inputs, response_part


def make_critic(parallel: ParallelMesh, model_path: Path, seed: int = 1, **training: object) -> FSDPEngine:
    settings = {"learning_rate": 1e-2, "max_tokens_per_gpu": 1000, "clip_range_value": 10.0, **training}
    return critic_engine(
        parallel,
        TrainedModel(gradient_checkpointing=False),
        str(model_path),
        CriticSpec(**settings),
        total_steps=10,
        seed=seed,
        dtype=torch.float32,
    )


def test_a_new_value_head_follows_the_seed(parallel: ParallelMesh, model_path: Path, batch: DataProto) -> None:
    first, again, other = (
        make_critic(parallel, model_path, seed).forward(batch).padded(Keys.VALUES) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.abs().max() < 0.5
    assert (first[batch.padded(Keys.RESPONSE_MASK) == 0] == 0).all()


def test_the_value_of_a_token_is_read_before_it(parallel: ParallelMesh, tmp_path: Path, batch: DataProto) -> None:
    path = save_tiny_model(tmp_path / "with-head")
    weight, bias = torch.randn(1, 48, generator=torch.Generator().manual_seed(5)), torch.tensor([0.25])
    save_file({"score.weight": weight, "score.bias": bias}, path / "value_head.safetensors")
    values = make_critic(parallel, path, max_tokens_per_gpu=20).forward(batch).padded(Keys.VALUES)

    backbone = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        hidden = backbone(**padded_inputs(batch)).last_hidden_state
    expected = response_part(hidden @ weight.T + bias, values.shape[1]).squeeze(-1) * batch.padded(Keys.RESPONSE_MASK)
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-4)


def test_updates_bring_values_to_the_returns(parallel: ParallelMesh, model_path: Path, batch: DataProto) -> None:
    critic = make_critic(parallel, model_path)
    mask = batch.ragged(Keys.RESPONSE_MASK)
    wanted = batch.with_fields({Keys.RETURNS: mask.with_values(0.8 * mask.values)})
    metrics = [critic.update(wanted.with_fields(critic.forward(batch).columns)) for _ in range(6)]
    assert metrics[-1]["critic/vf_loss"] < 0.2 * metrics[0]["critic/vf_loss"]
    assert metrics[-1]["critic/vpred_mean"] == pytest.approx(0.8, abs=0.3)
    assert {"critic/vf_clipfrac", "critic/grad_norm", "critic/lr"} <= metrics[0].keys()


def test_explained_variance_is_of_the_values_before_the_update(
    parallel: ParallelMesh, model_path: Path, batch: DataProto
) -> None:
    returns = batch.ragged(Keys.RETURNS)
    perfect = batch.with_fields({Keys.VALUES: returns})
    assert make_critic(parallel, model_path).update(perfect)["critic/vf_explained_var"] == pytest.approx(1.0)
    constant = batch.with_fields({Keys.VALUES: returns.with_values(torch.zeros_like(returns.values))})
    assert make_critic(parallel, model_path).update(constant)["critic/vf_explained_var"] == pytest.approx(0.0)


def test_micro_batches_do_not_change_an_update(parallel: ParallelMesh, model_path: Path, batch: DataProto) -> None:
    whole, cut = make_critic(parallel, model_path), make_critic(parallel, model_path, max_tokens_per_gpu=16)
    assert cut.update(batch) == pytest.approx(whole.update(batch), rel=1e-4, abs=1e-6)
    values, values_of_cut = (engine.forward(batch).padded(Keys.VALUES) for engine in (whole, cut))
    torch.testing.assert_close(values_of_cut, values, atol=1e-4, rtol=1e-3)
