"""A vLLM engine of two workers follows pushed weights. Each worker gets its part only: of each layer, or layers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.divided_engine import SLICES, STAGES, divided
from tests.integration.trainer.separate_process import LIMIT_S
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(LIMIT_S + 60)]

ROUNDING = 1e-4
"""float32 on both sides; sums in another order differ by about 2e-6 on this model."""
MODELS: dict[str, dict[str, Any]] = {
    # 257 tokens; one KV head on both workers.
    "llama": {"num_attention_heads": 4, "head_dim": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
}
CASES = [(model, kind) for model in MODELS for kind in (SLICES, STAGES)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    family, kind = request.param
    model = write_tiny_model(tmp_path_factory.mktemp("model"), family, **MODELS[family])
    found: dict[str, Any] = divided(model, "CPU", "gloo", limit=LIMIT_S, kind=kind)["gloo"]
    return found


def test_the_engine_follows_the_weights(seen: dict[str, Any]) -> None:
    for push in ("first", "new", "old", "new again"):
        assert seen[push]["apart"] < ROUNDING, push
    assert seen["stale"] > 100 * ROUNDING


def test_each_worker_gets_its_part_after_the_first_push(seen: dict[str, Any]) -> None:
    assert seen["first"]["bytes"] == [seen["num_bytes"]] * 2
    for push in ("new", "old", "new again"):
        # Of this small model, norms and the shared KV head are a few percent.
        assert all(number < 0.65 * seen["num_bytes"] for number in seen[push]["bytes"])
        assert sum(seen[push]["bytes"]) >= seen["num_bytes"]


def test_each_worker_follows_partial_pushes(seen: dict[str, Any]) -> None:
    for push in ("partial", "partial again", "partial later"):
        assert seen[push]["apart"] < ROUNDING, push
        assert all(0 < number < 0.5 * seen["new"]["bytes"][0] for number in seen[push]["bytes"])
    assert seen["stale attention"] > 100 * ROUNDING


@pytest.mark.parametrize("seen", [case for case in CASES if SLICES in case], ids="-".join, indirect=True)
def test_parts_of_the_other_worker_are_refused(seen: dict[str, Any]) -> None:
    assert "parts of version 11 are not those of the trainer's weights" in seen["refusal"]
