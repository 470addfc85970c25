"""Each rank reads its own part of a checkpoint's files, and what it reads is what transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from ppojob_trainer.engines.errors import ModelNotFoundError, ModelUnsupportedError
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, load_critic, load_policy
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines.loading_ranks import FLOAT32, NUM_EXPERTS, whole_and_read
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_llama import VOCABULARY, save_tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
}
REMOTE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class ScaledLlamaConfig(LlamaConfig):
    model_type = "scaled_llama"


class ScaledLlamaForCausalLM(LlamaForCausalLM):
    config_class = ScaledLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        # No checkpoint has it, and no method of transformers initializes it.
        self.register_buffer("scale", torch.arange(4.0), persistent=False)
"""


def from_pretrained(path: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def loaded(path: Path, parallel: ParallelMesh) -> dict[str, Tensor]:
    return whole_and_read(parallel, path, FLOAT32)["tensors"]


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "qwen3_moe"
    torch.manual_seed(7)
    config = Qwen3MoeConfig(**SHAPE, num_experts=NUM_EXPERTS, moe_intermediate_size=32, head_dim=12)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    names = load_file(folder / "model.safetensors")
    assert any(".experts.0." in name for name in names), "the experts are not in the checkpoint's form"
    return folder


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_and_buffers_are_those_that_transformers_loads(
    parallel: ParallelMesh, tmp_path: Path, is_tied: bool
) -> None:
    path = save_tiny_model(tmp_path / "tiny", tie_word_embeddings=is_tied)

    expected = from_pretrained(path)

    assert any(name.endswith("inv_freq") for name in expected)
    torch.testing.assert_close(loaded(path, parallel), expected, atol=0, rtol=0)


def test_a_checkpoint_of_several_files_and_one_of_pytorch_are_read(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny")
    expected = from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "several", max_shard_size="50KB")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 1
    (tmp_path / "pytorch").mkdir()
    shutil.copy(path / "config.json", tmp_path / "pytorch")
    shutil.copytree(tmp_path / "pytorch", tmp_path / "older")
    torch.save(model.state_dict(), tmp_path / "pytorch" / "pytorch_model.bin")
    older = tmp_path / "older" / "pytorch_model.bin"
    torch.save(model.state_dict(), older, _use_new_zipfile_serialization=False)

    for folder in ("several", "pytorch", "older"):
        torch.testing.assert_close(loaded(tmp_path / folder, parallel), expected, atol=0, rtol=0)


def test_experts_are_fused_as_transformers_does(with_experts: Path, parallel: ParallelMesh) -> None:
    torch.testing.assert_close(loaded(with_experts, parallel), from_pretrained(with_experts), atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dims", "num_experts"),
    [
        (ParallelDims(shard=2), [3, 3]),
        (ParallelDims(shard=4), [2, 2, 2, 0]),
        (ParallelDims(replicate=2, shard=2), [3, 3, 3, 3]),
        # Each of two ranks owns three experts, of which FSDP gives it two and another rank one.
        (ParallelDims(shard=4, expert=2), [2, 2, 1, 1]),
    ],
    ids=str,
)
def test_a_rank_reads_its_own_experts_and_rows_alone(
    with_experts: Path, dims: ParallelDims, num_experts: list[int], tmp_path: Path
) -> None:
    run_ranks(dims, with_experts, tmp_path, whole_and_read_without_batch)

    expected = from_pretrained(with_experts)
    size = (with_experts / "model.safetensors").stat().st_size
    for rank in range(dims.world_size):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        torch.testing.assert_close(found["tensors"], expected, atol=0, rtol=0)
        # Each expert has three matrices in each layer.
        assert found["experts"] == 3 * SHAPE["num_hidden_layers"] * num_experts[rank]
        assert found["bytes"] < 1.1 * size * max(num_experts) / NUM_EXPERTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tensor_that_becomes_several_is_split_before_it_is_sharded(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny")
    expected = from_pretrained(path)
    stored = load_file(path / "model.safetensors")
    for layer in range(2):
        parts = [stored.pop(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        stored[f"model.layers.{layer}.mlp.gate_up.weight"] = torch.cat(parts)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    run_ranks(ParallelDims(shard=2), path, tmp_path, with_fused_gates)

    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"rank-{rank}.pt")["tensors"], expected, atol=0, rtol=0)


def with_fused_gates(parallel: ParallelMesh, model: Path, batch: object, out: Path) -> dict[str, Any]:
    split = WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    # For this process alone.
    register_checkpoint_conversion_mapping("llama", [split], overwrite=True)
    return whole_and_read(parallel, model, FLOAT32)


def whole_and_read_without_batch(parallel: ParallelMesh, model: Path, batch: object, out: Path) -> dict[str, Any]:
    return whole_and_read(parallel, model, FLOAT32)


def test_buffers_of_remote_code_are_computed(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny")
    (path / "modeling_scaled.py").write_text(REMOTE)
    config = json.loads((path / "config.json").read_text())
    classes = {"AutoConfig": "ScaledLlamaConfig", "AutoModelForCausalLM": "ScaledLlamaForCausalLM"}
    names = {auto: f"modeling_scaled.{name}" for auto, name in classes.items()}
    (path / "config.json").write_text(json.dumps({**config, "model_type": "scaled_llama", "auto_map": names}))

    options = LoadOptions(dtype=torch.float32, trust_remote_code=True)
    found = whole_and_read(parallel, path, options)["tensors"]

    assert found.pop("scale").tolist() == [0.0, 1.0, 2.0, 3.0]
    stored = load_file(path / "model.safetensors")
    torch.testing.assert_close({name: found[name] for name in stored}, stored, atol=0, rtol=0)


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_a_parameter_that_the_checkpoint_lacks_is_named(load: Any, parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny")
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    says = r"^model path \S+ has no weights for \S*layers\.1\.mlp\.up_proj\.weight: use the checkpoint of a llama"
    with pytest.raises(ModelNotFoundError, match=says):
        load(str(path), FLOAT32, parallel, seed=1)


def test_a_tensor_of_another_shape_is_named(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny")
    stored = load_file(path / "model.safetensors")
    stored["model.norm.weight"] = torch.ones(47)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelNotFoundError, match=r"model\.norm\.weight has the shape \[47\], and .* \[48\]"):
        load_policy(str(path), FLOAT32, parallel)


def test_experts_that_the_checkpoint_lacks_are_counted(
    with_experts: Path, parallel: ParallelMesh, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(with_experts, tmp_path / "fewer"))
    stored = load_file(path / "model.safetensors")
    last = f".experts.{NUM_EXPERTS - 1}."
    save_file(
        {name: tensor for name, tensor in stored.items() if last not in name},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )

    with pytest.raises(ModelNotFoundError, match=f"has {NUM_EXPERTS} experts, and the checkpoint {NUM_EXPERTS - 1}"):
        load_policy(str(path), FLOAT32, parallel)


def test_a_quantized_checkpoint_is_refused(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "fp8"}}
    (path / "config.json").write_text(json.dumps(quantized))

    with pytest.raises(ModelUnsupportedError, match=r"is quantized \(fp8\).*use the checkpoint in bfloat16"):
        load_policy(str(path), FLOAT32, parallel)
