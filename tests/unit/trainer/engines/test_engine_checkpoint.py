"""A run that resumes from a checkpoint continues as if it had not stopped; the export is a HuggingFace folder."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.training import ActorSpec, LearningRateSchedule
from ppojob_trainer.engines.errors import CheckpointUnreadableError, CheckpointUnwritableError
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys
from tests.bench.bench_host_memory import compare_export
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.engines.tiny_llama import save_tiny_model


def make_policy(parallel: ParallelMesh, path: Path) -> FSDPEngine:
    training = ActorSpec(
        learning_rate=1e-3, max_tokens_per_gpu=1000, learning_rate_schedule=LearningRateSchedule.LINEAR
    )
    return policy_engine(
        parallel, ActorModel(path=str(path)), training, AlgorithmSpec(), total_steps=5, dtype=torch.float32
    )


def test_an_update_after_loading_equals_the_one_after_saving(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path
) -> None:
    saved = make_policy(parallel, model_path)
    saved.update(batch)
    torch.manual_seed(11)
    saved.save(tmp_path / "step")
    drawn = torch.rand(3)
    resumed = make_policy(parallel, model_path)
    resumed.restore(tmp_path / "step")
    assert torch.equal(torch.rand(3), drawn)
    metrics = saved.update(batch)
    assert metrics["actor/lr"] == pytest.approx(0.8e-3)
    assert resumed.update(batch) == metrics
    log_probs = [engine.forward(batch).padded(Keys.OLD_LOG_PROBS) for engine in (saved, resumed)]
    assert torch.equal(*log_probs)


def test_a_save_before_the_first_update_changes_nothing(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path
) -> None:
    plain, saved, resumed = (make_policy(parallel, model_path) for _ in range(3))
    saved.save(tmp_path / "step-0")
    resumed.restore(tmp_path / "step-0")
    expected = plain.update(batch)
    assert saved.update(batch) == expected
    assert resumed.update(batch) == expected


def test_a_save_in_the_background_holds_the_models_of_its_start(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path
) -> None:
    engine = make_policy(parallel, model_path)
    engine.update(batch)
    assert engine.is_saved(), "nothing was begun"
    engine.save(tmp_path / "now")
    engine.save(tmp_path / "meanwhile", in_background=True)
    metrics = engine.update(batch)
    assert metrics.pop("timing_s/checkpoint/wait_actor") >= 0
    wait_for(engine)
    for name in ("now", "meanwhile"):
        resumed = make_policy(parallel, model_path)
        resumed.restore(tmp_path / name)
        assert resumed.update(batch) == metrics, name


def test_a_save_that_fails_in_the_background_is_reported_once_by_name(
    parallel: ParallelMesh, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    engine = make_policy(parallel, model_path)
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", refuse)
    engine.save(tmp_path / "step", in_background=True)
    with pytest.raises(CheckpointUnwritableError, match=r"step cannot be written: .*No space left on device"):
        wait_for(engine)
    assert engine.is_saved()
    with pytest.raises(CheckpointUnwritableError, match=r"other cannot be written: .*No space left on device"):
        engine.save(tmp_path / "other")


def wait_for(engine: FSDPEngine) -> None:
    deadline = time.monotonic() + 60
    while not engine.is_saved():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_folder_that_exists_is_not_written_into(parallel: ParallelMesh, model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "stale").touch()
    engine = make_policy(parallel, model_path)
    for write in (engine.save, engine.export):
        with pytest.raises(FileExistsError, match="need a new folder"):
            write(tmp_path)


def test_what_cannot_be_read_is_refused_by_name(parallel: ParallelMesh, model_path: Path, tmp_path: Path) -> None:
    engine = make_policy(parallel, model_path)
    with pytest.raises(CheckpointUnreadableError, match=r"nothing is not complete: it has no \.metadata"):
        engine.restore(tmp_path / "nothing")
    engine.save(tmp_path / "whole")
    other = make_policy(parallel, save_tiny_model(tmp_path / "other", hidden_size=64))
    with pytest.raises(CheckpointUnreadableError, match="whole cannot be read into this model"):
        other.restore(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (shard,) = (tmp_path / "cut").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(CheckpointUnreadableError, match="cut cannot be read into this model"):
        engine.restore(tmp_path / "cut")


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_export_is_the_policy_in_bfloat16_with_its_tokenizer(
    parallel: ParallelMesh, batch: DataProto, tmp_path: Path, is_tied: bool
) -> None:
    source = save_tiny_model(tmp_path / "source", tie_word_embeddings=is_tied)
    engine = make_policy(parallel, source)
    engine.update(batch)
    engine.export(tmp_path / "export")
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    # Who serves it may be another user.
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in (tmp_path / "export").iterdir())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert model.dtype == torch.bfloat16
    exported = dict(model.named_parameters())
    weights = engine.weights()
    for spec, tensor in zip(weights.specs(), weights.gather(), strict=True):
        assert torch.equal(exported.pop(spec.name), tensor.bfloat16())
    assert not exported


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_large_model_is_exported_in_files_with_an_index(
    parallel: ParallelMesh, batch: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    monkeypatch.setattr("ppojob_trainer.engines.train.fsdp.export.SHARD_BYTES", 30_000)
    engine = make_policy(parallel, save_tiny_model(tmp_path / "source", tie_word_embeddings=is_tied))
    engine.update(batch)
    engine.export(tmp_path / "export")
    files = sorted(file.name for file in (tmp_path / "export").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    whole = whole_state(engine)
    assert index["metadata"] == {
        "total_parameters": sum(tensor.numel() for tensor in whole.values()),
        "total_size": 2 * sum(tensor.numel() for tensor in whole.values()),
    }
    stored = {}
    for file in files:
        tensors = load_file(tmp_path / "export" / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 30_000
        stored |= tensors
    assert stored.keys() == whole.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in whole.items())
    engine.save(tmp_path / "checkpoint" / "actor")
    assert compare_export(tmp_path / "export", tmp_path / "checkpoint" / "actor") == len(whole)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert all(torch.equal(parameter, whole[name]) for name, parameter in model.named_parameters())


def whole_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Return the model in bfloat16, tied weights once, by torch's own means."""
    model = engine.module.language_model
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: dict[str, Any] = get_model_state_dict(model, options=options)
    return {name: full[name].bfloat16() for name, _ in model.named_parameters()}
