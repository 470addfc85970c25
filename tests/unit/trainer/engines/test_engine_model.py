"""What cannot be loaded is refused by name, with the path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ppojob_trainer.engines.errors import ModelNotFoundError, ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, load_policy
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines.tiny_llama import save_tiny_model

FLOAT32 = LoadOptions(dtype=torch.float32)


def test_a_path_that_does_not_exist(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = str(tmp_path / "nothing")
    with pytest.raises(ModelNotFoundError, match=f"{path} is not a folder"):
        load_policy(path, FLOAT32, parallel)


def test_a_folder_without_a_model(parallel: ParallelMesh, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        load_policy(str(tmp_path), FLOAT32, parallel)


def test_a_configuration_that_is_none(parallel: ParallelMesh, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match=r"no usable config\.json"):
        load_policy(str(tmp_path), FLOAT32, parallel)


def test_a_model_without_weights(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotFoundError, match="holds no weights that can be read"):
        load_policy(str(path), FLOAT32, parallel)


def test_logits_that_are_more_than_a_linear_layer(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny", final_logit_softcapping=30.0)
    with pytest.raises(ModelUnsupportedError, match=r"final_logit_softcapping=30\.0"):
        load_policy(str(path), FLOAT32, parallel)


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_those_of_the_file(parallel: ParallelMesh, tmp_path: Path, is_tied: bool) -> None:
    path = save_tiny_model(tmp_path / "tiny", tie_word_embeddings=is_tied)
    module = load_policy(str(path), FLOAT32, parallel)
    names = [name for name, _ in module.named_parameters()]
    assert ("language_model.lm_head.weight" in names) is not is_tied
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    assert (module.output_layer.weight is module.backbone.get_submodule("embed_tokens").weight) is is_tied
