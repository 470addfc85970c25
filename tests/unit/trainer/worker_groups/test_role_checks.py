"""Each role compares its model with the job before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.engines.errors import ModelMismatchError, ModelNotFoundError
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.protocol import DataProto, Keys, ProtocolError, rollout_batch
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.critic import CriticWorker
from ppojob_trainer.worker_groups.roles.ref import RefWorker, unread_by_reference
from ppojob_trainer.worker_groups.roles.reward_model import RewardModelWorker
from ppojob_trainer.worker_groups.roles.trained import dims_of
from ppojob_trainer.worker_groups.worker_process import WorkerContext
from tests.bad_specs import with_changes
from tests.unit.trainer.engines.tiny_experts import save_tiny_experts
from tests.unit.trainer.engines.tiny_llama import save_tiny_model

CONTEXT = WorkerContext("role", rank=0, world_size=1, local_world_size=1, log_file=Path("role-0.log"), timeout_s=1.0)
Changes = dict[tuple[str | int, ...], Any]


def spec_of(model: Path, prompt: int = 32, response: int = 32, **others: Changes) -> PPOJobSpec:
    changes: Changes = {
        ("spec", "model", "actor", "path"): str(model),
        ("spec", "data", "maxPromptLength"): prompt,
        ("spec", "data", "maxResponseLength"): response,
        ("spec", "algorithm"): {"kl": {"inReward": True}},
    }
    for more in others.values():
        changes |= more
    return resolve(parse_manifest(with_changes(changes))[2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


@pytest.mark.parametrize("worker", [ActorWorker, CriticWorker, RefWorker])
def test_lengths_above_the_models_context_are_refused_by_name(model: Path, worker: Any) -> None:
    worker(CONTEXT, spec_of(model, 32, 32)).check()
    with pytest.raises(ModelMismatchError, match=r"takes at most 64 tokens, and data\.maxPromptLength 32 \+ .* are 65"):
        worker(CONTEXT, spec_of(model, 32, 33)).check()


@pytest.mark.parametrize("worker", [ActorWorker, CriticWorker, RefWorker])
def test_a_model_that_is_not_there_is_named(tmp_path: Path, worker: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=str(tmp_path / "nothing")):
        worker(CONTEXT, spec_of(tmp_path / "nothing")).check()


def test_a_reward_model_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    reward: Changes = {
        ("spec", "model", "reward"): {"path": str(tmp_path / "nothing")},
        ("spec", "reward"): {"type": "Model"},
    }
    with pytest.raises(ModelNotFoundError, match=str(tmp_path / "nothing")):
        RewardModelWorker(CONTEXT, spec_of(model, reward=reward)).check()


@pytest.mark.parametrize("worker", [ActorWorker, RefWorker])
def test_a_model_that_cannot_be_divided_is_refused_by_the_field(model: Path, worker: Any) -> None:
    divided: Changes = {
        ("spec", "pools"): [{"name": "actor", "gpusPerNode": 3}, {"name": "critic", "gpusPerNode": 3}],
        ("spec", "data", "trainBatchSize"): 3,
        ("spec", "actor"): {"tensorParallelSize": 3, "miniBatchSize": 3},
        ("spec", "critic"): {"miniBatchSize": 3},
    }
    with pytest.raises(ModelMismatchError, match=r"actor\.tensorParallelSize 3 does not divide this llama's"):
        worker(CONTEXT, spec_of(model, divided=divided)).check()


@pytest.mark.parametrize("section", ["actor", "critic"])
def test_a_role_divides_heads_inside_a_node_and_gathers_keys_over_nodes(model: Path, section: str) -> None:
    divided: Changes = {
        ("spec", "pools"): [{"name": name, "nodes": 4, "gpusPerNode": 1} for name in ("actor", "critic")],
        ("spec", section, "sequenceParallelSize"): 4,
    }
    if section == "actor":
        divided[("spec", "critic", "sequenceParallelSize")] = 1
    spec = spec_of(model, divided=divided)
    worker = (ActorWorker if section == "actor" else CriticWorker)(replace(CONTEXT, world_size=4), spec)
    worker.check()
    assert dims_of(worker.training, 4, 1, worker._config_of_split()) == ParallelDims(context=4)
    assert dims_of(worker.training, 4, 2, worker._config_of_split()) == ParallelDims(sequence=2, context=2)


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        # The model has 4 query heads and 2 key heads.
        ({"sequenceParallelSize": 2}, ParallelDims(shard=4, sequence=2)),
        ({"sequenceParallelSize": 8}, ParallelDims(sequence=2, context=4)),
        ({"sequenceParallelSize": 4, "tensorParallelSize": 2}, ParallelDims(context=4, tensor=2)),
        ({"tensorParallelSize": 2}, ParallelDims(shard=4, tensor=2)),
    ],
)
def test_a_role_splits_its_sequence_parallel_size_for_its_model(
    model: Path, sizes: dict[str, int], dims: ParallelDims
) -> None:
    divided: Changes = {
        ("spec", "pools"): [{"name": "actor", "gpusPerNode": 8}, {"name": "critic", "gpusPerNode": 8}],
        ("spec", "data", "trainBatchSize"): 8,
        ("spec", "actor"): {"miniBatchSize": 8, **sizes},
        ("spec", "critic"): {"miniBatchSize": 8},
    }
    worker = ActorWorker(CONTEXT, spec_of(model, divided=divided))
    worker.check()
    assert dims_of(worker.training, 8, 8, worker._config_of_split()) == dims


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("spec", "rollout"), {"routingReplay": True}, "rollout.routingReplay true: llama is no .*: set it to false"),
        (
            ("spec", "rollout"),
            {"tensorParallelSize": 2, "enableExpertParallel": True},
            "rollout.enableExpertParallel true: llama is no mixture of experts: set it to false",
        ),
        (
            ("spec", "actor", "routerAuxLossCoefficient"),
            0.5,
            "actor.routerAuxLossCoefficient 0.5: llama is no mixture of experts: set it to 0",
        ),
    ],
)
def test_fields_of_mixtures_are_refused_for_other_models(
    model: Path, where: tuple[str, ...], value: Any, says: str
) -> None:
    with pytest.raises(ModelMismatchError, match=says):
        ActorWorker(CONTEXT, spec_of(model, given={where: value})).check()


def test_mixtures_are_refused_for_engines_in_fp8(tmp_path: Path) -> None:
    fp8: Changes = {
        ("spec", "rollout"): {"quantization": "FP8"},
        ("spec", "algorithm"): {"rolloutCorrection": {"method": "Truncate"}},
    }
    mixture = save_tiny_experts(tmp_path)
    with pytest.raises(ModelMismatchError, match=r"rollout\.quantization FP8: qwen3_moe is a mixture of .*: remove"):
        ActorWorker(CONTEXT, spec_of(mixture, given=fp8)).check()


def test_engines_whose_gpus_would_have_different_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    divided: Changes = {
        ("spec", "pools"): [{"name": "actor", "gpusPerNode": 4}, {"name": "critic", "gpusPerNode": 1}],
        ("spec", "rollout"): {"tensorParallelSize": 4, "enableExpertParallel": True},
    }
    worker = ActorWorker(CONTEXT, spec_of(save_tiny_experts(tmp_path), given=divided))
    with pytest.raises(
        ModelMismatchError, match=r"rollout\.tensorParallelSize 4 .* number of experts 6: use a divisor"
    ):
        worker.check()


def test_a_loss_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    path = save_tiny_experts(tmp_path / "deepseek", family="deepseek_v3")
    says = "actor.routerAuxLossCoefficient 0.5: transformers has no .* for deepseek_v3, .*: set it to 0"
    coefficient: Changes = {("spec", "actor", "routerAuxLossCoefficient"): 0.5}
    with pytest.raises(ModelMismatchError, match=says):
        ActorWorker(CONTEXT, spec_of(path, given=coefficient)).check()


def test_responses_without_recorded_experts_are_refused(model: Path) -> None:
    replayed: Changes = {("spec", "rollout"): {"routingReplay": True}}
    worker = ActorWorker(CONTEXT, spec_of(model, replayed=replayed))
    batch = DataProto.from_dict(rollout_batch([[1]], [[2]]))
    reference = RefWorker(CONTEXT, spec_of(model, replayed=replayed))
    for method in (
        worker.compute_log_prob,
        worker.compute_ref_log_prob,
        worker.update_actor,
        reference.compute_ref_log_prob,
    ):
        with pytest.raises(ProtocolError, match="no column 'routed_experts'"):
            method(batch)


def test_a_reference_of_another_checkpoint_has_other_experts(model: Path, tmp_path: Path) -> None:
    def spec(**ref: str) -> PPOJobSpec:
        changes: Changes = {("spec", "rollout"): {"routingReplay": True}, ("spec", "model", "ref"): ref}
        return spec_of(model, changes=changes)

    other = spec(path=str(tmp_path))
    assert unread_by_reference(other) == {Keys.ROUTED_EXPERTS}
    assert not RefWorker(CONTEXT, other).setup.replays_experts
    for same in (spec(), spec(path=str(model))):
        assert unread_by_reference(same) == frozenset()
        assert RefWorker(CONTEXT, same).setup.replays_experts
