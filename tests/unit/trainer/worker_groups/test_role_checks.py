"""Each role compares its model with the job before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.critic import CriticWorker
from ppojob_trainer.worker_groups.roles.ref import RefWorker
from ppojob_trainer.worker_groups.worker_process import Seat
from tests.bad_specs import with_changes
from tests.unit.trainer.engines.tiny_llama import save_tiny_model

SEAT = Seat("role", rank=0, world_size=1, local_ranks=1, log_file=Path("role-0.log"), timeout_s=1.0)


def spec_of(model: Path, prompt: int, response: int) -> PPOJobSpec:
    changes: dict[tuple[str | int, ...], Any] = {
        ("spec", "model", "actor", "path"): str(model),
        ("spec", "data", "maxPromptLength"): prompt,
        ("spec", "data", "maxResponseLength"): response,
        ("spec", "algorithm"): {"kl": {"inReward": True}},
    }
    return resolve(parse_manifest(with_changes(changes))[2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


@pytest.mark.parametrize("worker", [ActorWorker, CriticWorker, RefWorker])
def test_lengths_above_the_models_context_are_refused_by_name(model: Path, worker: Any) -> None:
    worker(SEAT, spec_of(model, 32, 32)).check()
    with pytest.raises(ModelMismatchError, match=r"takes at most 64 tokens, and data\.maxPromptLength 32 \+ .* are 65"):
        worker(SEAT, spec_of(model, 32, 33)).check()
