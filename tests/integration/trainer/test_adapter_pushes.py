"""Real vLLM engines follow a policy that is trained with adapters, though later pushes leave out what never changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.adapter_pushes import adapters_pushed
from tests.integration.trainer.separate_process import LIMIT_S
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

HEALTHY = 1e-4
"""float32 on both sides, in another order: the mean of the differences between probabilities."""
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    # The engine fuses the queries with keys and values, which have no adapters.
    "llama": ({"head_dim": 32}, ["q_proj"]),
    "qwen3_moe": (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
        ["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings, targets = MODELS[request.param]
    model = write_tiny_model(tmp_path_factory.mktemp("model"), request.param, **settings)
    return adapters_pushed(model, targets, LIMIT_S)


@pytest.mark.parametrize("moment", ["at start", "after a partial push", "after another one"])
def test_the_engine_computes_the_merged_model(seen: dict[str, Any], moment: str) -> None:
    assert seen[moment] < HEALTHY
    assert seen["stale"] > 20 * HEALTHY


def test_a_partial_push_has_fewer_bytes(seen: dict[str, Any]) -> None:
    # Of these models, attention is between a tenth and a third.
    assert seen["bytes of a partial push"] < 0.35 * seen["bytes of all"]


def test_a_broken_push_is_followed_by_a_complete_one(seen: dict[str, Any]) -> None:
    actor, engine, generation = seen["broken"]
    assert actor == "the trainer exited"
    assert "vLLM's worker 0 failed in ppojob_receive_weights" in engine
    assert "the engine has no weights" in generation
    assert seen["bytes after a broken push"] == seen["bytes of all"]
    assert seen["after a broken push"] < HEALTHY


def test_an_engine_that_joins_gets_everything(seen: dict[str, Any]) -> None:
    assert seen["bytes with a late engine"] == seen["bytes of all"]
    assert seen["with a late engine"] < HEALTHY
    assert seen["after its partial push"] < HEALTHY


def test_an_engine_without_weights_refuses_a_partial_push(seen: dict[str, Any]) -> None:
    assert (
        "has only the tensors that training changes, and this engine does not have the others"
        in seen["without weights"]
    )
