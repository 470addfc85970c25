"""Real vLLM engines follow a policy that is trained with adapters, though later pushes leave out what never changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.adapter_pushes import adapters_pushed
from tests.integration.trainer.separate_process import LIMIT_S
from tests.integration.trainer.tiny_mixtures import EXPERTS, FAMILIES
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

HEALTHY = 1e-4
"""float32 on both sides, in another order: the mean of the differences between probabilities."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODELS: dict[str, tuple[str, list[str]]] = {
    # The engine fuses the queries with keys and values, which have no adapters.
    "llama": ("llama", ["q_proj"]),
    "qwen3_moe": ("qwen3_moe", ATTENTION),
    # The engine fuses all projections of all experts.
    "qwen3_moe, experts": ("qwen3_moe", ["gate_proj", "down_proj"]),
    "mixtral, experts": ("mixtral", ["q_proj", "w3"]),
    # The engine's loader of fused experts is no part of vLLM's own reload (`fused_experts`).
    "gpt_oss, experts": ("gpt_oss", ["gate_up_proj"]),
    # Its routers have biases that are not sent again, and shared experts have adapters, too.
    "deepseek_v3, experts": ("deepseek_v3", ["gate_proj", "up_proj", "down_proj"]),
}
LONG = ("llama", "qwen3_moe", "mixtral, experts", "gpt_oss, experts", "deepseek_v3, experts")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in MODELS],
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    family, targets = MODELS[request.param]
    settings = EXPERTS | FAMILIES[family] if family in FAMILIES else {"head_dim": 32}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), family, **settings)
    return adapters_pushed(model, targets, LIMIT_S) | {"targets": targets}


@pytest.mark.parametrize("moment", ["at start", "after a partial push", "after another one"])
def test_the_engine_computes_the_merged_model(seen: dict[str, Any], moment: str) -> None:
    assert seen[moment] < HEALTHY
    assert seen["stale"] > 20 * HEALTHY


def test_a_partial_push_has_fewer_bytes(seen: dict[str, Any]) -> None:
    # Of these models, attention is between a tenth and a third, and experts are more.
    is_of_attention = set(seen["targets"]) <= set(ATTENTION)
    assert seen["bytes of a partial push"] < (0.35 if is_of_attention else 0.9) * seen["bytes of all"]


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
