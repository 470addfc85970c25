"""Offloading empties the device between the phases and changes no number."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, FrozenOffload, Offload, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.engines.fsdp_engines import critic_engine, policy_engine, reference_engine

BOTH = Offload(parameters=True, optimizer=True)


def make_policy(parallel: ParallelMesh, path: Path, **model: Any) -> FSDPEngine:
    training = ActorSpec(learning_rate=1e-2, max_tokens_per_gpu=40)
    actor = ActorModel(path=str(path), **model)
    return policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=9, dtype=torch.float32)


def num_bytes(tensors: Any) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.untyped_storage().nbytes() for tensor in local)


def moments(engine: FSDPEngine) -> list[torch.Tensor]:
    return [state[key] for state in engine.optimizer.adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]


def weights(engine: FSDPEngine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in engine.weights().gather()]


@pytest.mark.parametrize(
    "offload", [BOTH, Offload(parameters=True), Offload(optimizer=True)], ids=["both", "parameters", "optimizer"]
)
def test_offloaded_tensors_are_on_the_device_only_in_their_phases_and_unchanged(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path, offload: Offload
) -> None:
    plain, offloaded = make_policy(parallel, model_path), make_policy(parallel, model_path, offload=offload)

    def is_offloaded(tensors: Any) -> bool:
        return num_bytes(tensors) == 0

    for step in range(3):
        assert is_offloaded(offloaded.module.parameters()) == offload.parameters
        found = [engine.forward(batch).padded(Keys.OLD_LOG_PROBS) for engine in (plain, offloaded)]
        assert torch.equal(*found)
        assert offloaded.update(batch) == plain.update(batch)
        assert is_offloaded(moments(offloaded)) == offload.optimizer
        for left, right in zip(weights(offloaded), weights(plain), strict=True):
            assert torch.equal(left, right)
        offloaded.save(tmp_path / f"step-{step}")
    assert is_offloaded(offloaded.module.parameters()) == offload.parameters
    offloaded.export(tmp_path / "export")
    resumed = make_policy(parallel, model_path)
    resumed.restore(tmp_path / "step-2")
    assert resumed.update(batch) == offloaded.update(batch)


def test_a_checkpoint_of_offloaded_tensors_needs_no_memory_on_the_device(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded, plain = make_policy(parallel, model_path, offload=BOTH), make_policy(parallel, model_path)
    offloaded.save(tmp_path / "before-the-first-update")
    assert plain.update(batch) == offloaded.update(batch)

    def refuse(_: object) -> None:
        raise AssertionError("loaded")

    with monkeypatch.context() as patch:
        patch.setattr("ppojob_trainer.engines.train.fsdp.offload._OffloadedStorages.load", refuse)
        offloaded.save(tmp_path / "waited-for")
        offloaded.save(tmp_path / "background", in_background=True)
    expected = plain.update(batch)
    found = offloaded.update(batch)
    assert found.pop("timing_s/checkpoint/wait_actor") >= 0
    assert found == expected, "the next update must not be written into the last save"
    while not offloaded.is_saved():
        time.sleep(0.01)
    for name in ("waited-for", "background"):
        resumed = make_policy(parallel, model_path)
        resumed.restore(tmp_path / name)
        assert resumed.update(batch) == expected


def test_an_offloaded_run_resumes_from_a_checkpoint(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path
) -> None:
    saved, resumed = make_policy(parallel, model_path), make_policy(parallel, model_path, offload=BOTH)
    resumed.update(batch)
    saved.update(batch)
    saved.save(tmp_path / "step")
    resumed.restore(tmp_path / "step")
    assert num_bytes(moments(resumed)) == num_bytes(resumed.module.parameters()) == 0
    assert resumed.update(batch) == saved.update(batch)


def test_a_background_save_has_the_tensors_that_are_offloaded_meanwhile(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path
) -> None:
    saved, resumed = (make_policy(parallel, model_path, offload=BOTH) for _ in range(2))
    saved.update(batch)
    saved.save(tmp_path / "step", in_background=True)
    metrics = saved.update(batch)
    assert metrics.pop("timing_s/checkpoint/wait_actor") >= 0
    deadline = time.monotonic() + 60
    while not saved.is_saved():
        assert time.monotonic() < deadline, "the save did not end"
        time.sleep(0.01)
    resumed.restore(tmp_path / "step")
    assert resumed.update(batch) == metrics


def test_a_critic_and_a_reference(parallel: ParallelMesh, model_path: Path, batch: DataProto) -> None:
    training = CriticSpec(learning_rate=1e-2, max_tokens_per_gpu=40)
    critics = [
        critic_engine(parallel, TrainedModel(offload=offload), str(model_path), training, total_steps=9, seed=1)
        for offload in (Offload(), BOTH)
    ]
    found = [(critic.forward(batch).padded(Keys.VALUES), critic.update(batch)) for critic in critics]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert num_bytes(critics[1].module.parameters()) == num_bytes(moments(critics[1])) == 0
    references = [
        reference_engine(parallel, str(model_path), offload=FrozenOffload(parameters=is_on_host), max_tokens_per_gpu=40)
        for is_on_host in (False, True)
    ]
    assert num_bytes(references[1].module.parameters()) == 0
    assert torch.equal(*(engine.forward(batch).padded(Keys.OLD_LOG_PROBS) for engine in references))


def test_activations_on_the_host_change_nothing(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, offloaded = (make_policy(parallel, model_path, activation_offload=is_asked) for is_asked in (False, True))
    assert offloaded.update(batch) == plain.update(batch)
    shapes: list[tuple[int, ...]] = []
    empty = torch.empty_strided

    def recording(*arguments: Any, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            shapes.append(tuple(arguments[0]))
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty_strided", recording)
    assert offloaded.update(batch) == plain.update(batch)
    # The input of each of the two layers, and none of what lies within them.
    assert sum(len(shape) == 3 and shape[-1] == 48 for shape in shapes) >= 2
    assert not any(shape and shape[-1] == 64 for shape in shapes)
