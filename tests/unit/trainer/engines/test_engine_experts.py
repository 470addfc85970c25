"""Mixtures of experts: the same numbers as transformers on one rank and on two, and what is counted of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.training import ActorSpec, LossAggregation
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.experts import COUNTS, expert_modules, imbalance_metrics
from ppojob_trainer.engines.train.fsdp.flops import model_flops
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import active_intermediate
from ppojob_trainer.engines.train.objectives import UpdateResult
from ppojob_trainer.maths.losses import Denominators
from ppojob_trainer.protocol import DataProto, Keys
from ppojob_trainer.worker_groups.roles.trained import ModelSource, size_of
from tests.unit.trainer.engines import gradient_ranks
from tests.unit.trainer.engines.fsdp_engines import policy_engine, reference_engine
from tests.unit.trainer.engines.gradient_ranks import Way
from tests.unit.trainer.engines.test_engine_invariance import padded_loss
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.test_engine_routing import random_recording
from tests.unit.trainer.engines.tiny_experts import (
    EXPERT_SIZE,
    MIXTURES,
    NUM_EXPERTS,
    PER_TOKEN,
    save_starved_experts,
    save_tiny_experts,
    saved,
    tiny_experts,
)
from tests.unit.trainer.engines.tiny_llama import assert_same_updates, make_batch

Results = dict[str, Any]
AGGREGATION = LossAggregation.TOKEN_MEAN
# Each rank has several micro-batches.
WAY = Way(33)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_experts(tmp_path_factory.mktemp("experts") / "qwen3_moe")


@pytest.fixture(scope="module", params=MIXTURES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def of_family(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_experts(tmp_path_factory.mktemp("experts") / family, family=family)


@pytest.fixture(scope="module")
def of_one(parallel: ParallelMesh, path: Path) -> Results:
    return gradient_ranks.one_step(parallel, path, "actor", WAY, AGGREGATION)


def make_policy(parallel: ParallelMesh, path: Path, dtype: torch.dtype = torch.float32, **model: Any) -> FSDPEngine:
    training = ActorSpec(learning_rate=1e-3, max_tokens_per_gpu=1000)
    actor = ActorModel(path=str(path), **model)
    return policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=9, dtype=dtype)


def plain_step(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients, and the weights after one step, of plain transformers and torch's AdamW, padded."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    batch = gradient_ranks.whole_batch()
    counts = Denominators.of(batch.padded(Keys.RESPONSE_MASK))
    padded_loss(model, batch, counts, AGGREGATION.value).backward()
    gradients = {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}
    training = ActorSpec(learning_rate=1e-3)
    first, second = training.betas
    torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(first, second), weight_decay=training.weight_decay).step()
    return gradients, {name: part.detach() for name, part in model.named_parameters()}


def assert_same_step_as_transformers(found: Results, path: Path) -> None:
    gradients, weights = plain_step(path)
    prefix = "language_model."
    assert {name.removeprefix(prefix) for name in found["gradients"]} == gradients.keys()
    assert any(".experts.gate_up_proj" in name for name in gradients)
    for name, gradient in gradients.items():
        scale = gradient.abs().max()
        assert scale > 0, f"{name} has no gradient"
        ours = found["gradients"][prefix + name]
        # Float32 sums in another order, as on another processor, differ; a missing part makes more than 0.1.
        torch.testing.assert_close(ours / scale, gradient / scale, atol=1e-3, rtol=0, msg=name)
    after, before = (
        {name.removeprefix(prefix): part for name, part in found[key].items()} for key in ("weights", "before")
    )
    assert_same_updates(after, weights, before)


def test_a_step_on_one_rank_is_that_of_transformers(parallel: ParallelMesh, of_family: Path) -> None:
    found = gradient_ranks.one_step(parallel, of_family, "actor", WAY, AGGREGATION)
    assert_same_step_as_transformers(found, of_family)


@pytest.mark.slow
@pytest.mark.timeout(300)
# Tokens that fill up the slices of a sequence-parallel group are counted too.
@pytest.mark.parametrize(
    ("dims", "padding"), [(ParallelDims(shard=2), 1e-4), (ParallelDims(sequence=2), 0.05)], ids=str
)
def test_a_step_on_two_ranks_is_that_of_transformers(
    of_one: Results, path: Path, dims: ParallelDims, padding: float, tmp_path: Path
) -> None:
    run_ranks(dims, path, tmp_path, step_of_a_rank)

    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        assert_same_step_as_transformers(found, path)
        for name, expected in of_one["metrics"].items():
            tolerance = padding if "expert_imbalance" in name else 1e-4
            assert found["metrics"][name] == pytest.approx(expected, rel=tolerance, abs=1e-6), name
        assert "actor/expert_imbalance/max" in found["metrics"]
        assert found["most_gathered"] == 1, "more than one layer with experts was gathered at a time"


def step_of_a_rank(parallel: ParallelMesh, model: Path, _batch: DataProto, _folder: Path) -> Results:
    """One step; beside it, how many layers were gathered at the same time at most while it computed log-probs."""
    policy = make_policy(parallel, model)
    layers = [layer for layer in policy.module.backbone.get_submodule("layers").children()]
    most = 0

    def count(layer: Any, *_: object) -> None:
        nonlocal most
        most = max(most, sum(is_gathered(one) for one in layers))

    for layer in layers:
        # Inside the layer: FSDP's own hook comes after it.
        layer.get_submodule("mlp").register_forward_hook(count)
    policy.forward(gradient_ranks.whole_batch())
    return {**gradient_ranks.one_step(parallel, model, "actor", WAY, AGGREGATION), "most_gathered": most}


def is_gathered(layer: torch.nn.Module) -> bool:
    assert isinstance(layer, FSDPModule)
    group = layer._get_fsdp_state()._fsdp_param_group
    assert group is not None
    return bool(group.is_unsharded)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
# torch's tracer makes one of each of ours.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("gradient_checkpointing", [pytest.param(False, marks=pytest.mark.long), True])
def test_compiled_and_recomputed_layers_compute_the_same(
    parallel: ParallelMesh, path: Path, gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Recomputed routers must choose the recorded experts again.
    batch = make_batch(4, num_mini_batches=1)
    batch = random_recording(batch) if gradient_checkpointing else batch
    expected = make_policy(parallel, path, gradient_checkpointing=False).update(batch)
    # As in test_engine_compile: torch's tracing and partitioning without Inductor's code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", dynamic=True))
    torch.compiler.reset()
    compiled = make_policy(parallel, path, compile=True, gradient_checkpointing=gradient_checkpointing)
    assert compiled.update(batch) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_export_is_the_checkpoint(
    parallel: ParallelMesh, family: str, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Byte for byte in bfloat16, which exports have; the configuration says nothing of how this program computes."""
    source = save_tiny_experts(tmp_path / "source", dtype, family)
    policy = make_policy(parallel, source)
    policy.export(tmp_path / "export")
    stored, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "source"))
    assert any(MIXTURES[family].of_hub in name for name in expected), "the experts are not in the hub's form"
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        rounded = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert stored[name].dtype == rounded.dtype, name
        assert torch.equal(stored[name].view(torch.uint8), rounded.view(torch.uint8)), name
    weights = policy.weights()
    sent = {spec.name: tensor.clone() for spec, tensor in zip(weights.specs(), weights.gather(), strict=True)}
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(sent[name], tensor.float()), name
    assert "ppojob" not in (tmp_path / "export" / "config.json").read_text()
    if dtype is torch.bfloat16:
        config, of_source = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("export", "source"))
        assert config == of_source


def test_the_bias_of_a_router_is_neither_rounded_nor_trained(parallel: ParallelMesh, tmp_path: Path) -> None:
    source = save_tiny_experts(tmp_path / "source", torch.bfloat16, "deepseek_v3")
    stored = load_file(source / "model.safetensors")
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert not torch.equal(stored[bias], stored[bias].bfloat16().float())
    reference = reference_engine(parallel, str(source), max_tokens_per_gpu=1000, dtype=torch.bfloat16)
    policy = make_policy(parallel, source, dtype=torch.bfloat16)
    policy.update(make_batch(4))
    for engine in (reference, policy):
        assert torch.equal(engine.module.language_model.get_buffer(bias), stored[bias])
    weights = policy.weights()
    sent = dict(zip((spec.name for spec in weights.specs()), weights.gather(), strict=True))
    assert torch.equal(sent[bias], stored[bias])
    assert sent["model.layers.2.mlp.gate.weight"].dtype == torch.bfloat16

    policy.save(tmp_path / "saved")
    policy.module.language_model.get_buffer(bias).zero_()
    policy.restore(tmp_path / "saved")
    assert torch.equal(policy.module.language_model.get_buffer(bias), stored[bias])


def test_an_export_has_no_layers_that_are_not_trained(parallel: ParallelMesh, tmp_path: Path) -> None:
    """A checkpoint of DeepSeek-V3 has one layer more, for the prediction of further tokens."""
    model = tiny_experts(family="deepseek_v3", num_nextn_predict_layers=1)
    make_policy(parallel, saved(model, tmp_path / "source")).export(tmp_path / "export")
    assert json.loads((tmp_path / "source" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def operations_of_layers(family: str) -> tuple[int, int]:
    """Matrices of all layers that compute for a token, and the numbers of attention for a pair of tokens."""
    router, expert, dense, norms = NUM_EXPERTS * 48, 3 * EXPERT_SIZE * 48, 3 * 64 * 48, 2 * 48
    # Queries, keys, values and output.
    attention = 48 * 48 + 2 * 24 * 48 + 48 * 48
    if family == "qwen3_moe":
        # It has norms of single heads, and a dense layer.
        return 3 * (attention + norms + 2 * 12) + 2 * (router + PER_TOKEN * expert) + dense, 3 * 48
    if family == "gpt_oss":
        # Linear layers and experts have biases, and each head has a sink.
        attention += 48 + 2 * 24 + 48 + 4
        expert += 2 * EXPERT_SIZE + 48
        return 3 * (attention + norms + router + NUM_EXPERTS + PER_TOKEN * expert), 3 * 48
    if family == "deepseek_v3":
        # Queries and keys with values by way of latent vectors of 20 and 16 numbers, which have norms. Queries and keys
        # of a head have 12 numbers, of which the heads share 4 of the keys; values have 10.
        queries, keys = 48 * 20 + 20 + 20 * 4 * 12, 48 * (16 + 4) + 16 + 16 * 4 * (8 + 10)
        attention = queries + keys + 4 * 10 * 48
        # Two of the experts are shared.
        return 3 * (attention + norms) + 2 * (router + (PER_TOKEN + 2) * expert) + dense, 3 * 4 * (12 + 10) // 2
    return 3 * (attention + norms + router + PER_TOKEN * expert), 3 * 48


def test_operations_are_those_of_the_experts_that_a_token_uses(
    parallel: ParallelMesh, family: str, of_family: Path
) -> None:
    policy = make_policy(parallel, of_family)
    result = UpdateResult(1, 0, 0.0, num_tokens=10.0, num_policy_tokens=5.0, num_token_pairs=40.0)
    matrices, scores = operations_of_layers(family)
    output = 97 * 48

    found = model_flops(policy.module.backbone, result, policy.module.num_outputs)

    assert found == pytest.approx(6 * (10 * matrices + 5 * output + 40 * scores), rel=1e-12)
    everything = MIXTURES[family].num_sparse * (NUM_EXPERTS - PER_TOKEN) * 3 * EXPERT_SIZE * 48
    assert found < 0.7 * 6 * (10 * (matrices + everything) + 5 * output + 40 * scores), "all experts were counted"


def test_the_memory_of_activations_is_that_of_the_experts_that_a_token_uses(path: Path) -> None:
    assert active_intermediate(AutoConfig.from_pretrained(path)) == PER_TOKEN * EXPERT_SIZE
    mixtral = AutoConfig.for_model("mixtral", intermediate_size=100, num_experts_per_tok=3)
    assert active_intermediate(mixtral) == 300
    latent = AutoConfig.for_model("deepseek_v3", intermediate_size=9, moe_intermediate_size=100, n_shared_experts=2)
    assert active_intermediate(latent) == (8 + 2) * 100
    assert active_intermediate(AutoConfig.for_model("llama", intermediate_size=100)) == 100


def test_the_size_of_a_model_says_what_is_in_its_experts(path: Path) -> None:
    size = size_of(AutoConfig.from_pretrained(path), ModelSource(str(path), False), 1, None)
    assert size.in_experts == 2 * NUM_EXPERTS * 3 * EXPERT_SIZE * 48
    assert size.in_experts < size.num_parameters


def test_imbalance_is_the_busiest_experts_share_over_the_mean(parallel: ParallelMesh, path: Path) -> None:
    policy = make_policy(parallel, path)
    backbone = policy.module.backbone
    policy.forward(make_batch(4))
    first, last = (experts.get_buffer(COUNTS) for _, experts in expert_modules(backbone))
    assert not first.any(), "only updates are counted"
    first.copy_(torch.tensor([2, 2, 2, 2, 2, 2]))
    last.copy_(torch.tensor([9, 3, 0, 0, 0, 0]))

    metrics = imbalance_metrics("actor", backbone, parallel)

    assert metrics == {
        "actor/expert_imbalance/mean": 2.75,
        "actor/expert_imbalance/max": 4.5,
        "actor/expert_idle_share": 4 / 12,
    }
    assert not first.any()


def counts_of_update(
    parallel: ParallelMesh, path: Path, batch: DataProto, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, dict[str, float]]:
    """Return how many tokens of an update each expert of each layer got, and the update's metrics."""
    counted: list[Tensor] = []

    def seen(values: Tensor) -> Tensor:
        if values.ndim == 2:
            counted.append(values.clone())
        return values

    monkeypatch.setattr(type(parallel), "sum_of_ranks", lambda _, values: seen(values))
    metrics = make_policy(parallel, path, gradient_checkpointing=False).update(batch)
    (loads,) = counted
    # One of the three layers is dense.
    assert loads.any(dim=1).tolist() == [True, False, True]
    return loads[loads.any(dim=1)], metrics


def test_each_token_of_an_update_is_counted_once_for_each_of_its_experts(
    parallel: ParallelMesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(8, num_mini_batches=2)
    loads, metrics = counts_of_update(parallel, path, batch, monkeypatch)
    num_tokens = int(batch.ragged(Keys.INPUT_IDS).lengths.sum())
    assert loads.sum(dim=1).tolist() == [PER_TOKEN * num_tokens] * 2
    assert (
        1 < metrics["actor/expert_imbalance/mean"] <= metrics["actor/expert_imbalance/max"] <= NUM_EXPERTS / PER_TOKEN
    )


def test_half_of_the_starved_experts_get_no_token(
    parallel: ParallelMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one of two ranks that divide them receives nothing: `test_engine_peer_options` trains this model."""
    loads, _ = counts_of_update(parallel, save_starved_experts(tmp_path), make_batch(4, 1), monkeypatch)
    assert loads[:, :4].all()
    assert not loads[:, 4:].any()


def test_a_model_without_experts_has_no_imbalance(parallel: ParallelMesh, model_path: Path) -> None:
    assert not any("expert" in name for name in make_policy(parallel, model_path).update(make_batch(4)))
