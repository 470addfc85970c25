"""Reloaded weights of mixtures and of latent attention are read back on GPUs, in layouts that keep their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.engines.test_reloaded_weights import LIMIT_SECONDS, found_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_SECONDS + 60)]

MIXTURES = ("qwen3 moe", "mixtral", "deepseek v3", "gpt oss")
OTHERS = "vLLM's parameters are not version 7 of the weights"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the pushes to each model have found."""
    return found_by("compared_reloads", tmp_path_factory.mktemp("compared"), MIXTURES)


@pytest.mark.parametrize("model", MIXTURES)
@pytest.mark.parametrize("push", ["first", "others", "partial", "after it"])
def test_experts_in_the_layout_of_a_kernel_are_read_back(found: dict[str, Any], model: str, push: str) -> None:
    assert found[model][push] is True


@pytest.mark.parametrize("model", MIXTURES)
def test_experts_that_vllm_changes_after_a_push_that_was_read_back_are_refused(
    found: dict[str, Any], model: str
) -> None:
    assert OTHERS in found[model]["changed"]


@pytest.mark.parametrize("model", MIXTURES)
def test_a_layout_that_changes_numbers_from_the_first_push_on_is_not_compared(
    found: dict[str, Any], model: str
) -> None:
    assert found[model]["changing layout"] == [False, False]
    [warning] = found[model]["warnings"]
    assert warning.startswith("vLLM's layout changes weights, so they are counted and not read back: ")


def test_matrices_of_latent_attention_from_other_weights_are_refused(found: dict[str, Any]) -> None:
    assert found["deepseek v3"]["latent attention"] == (
        "vLLM computes model.layers.0.self_attn.attn with other weights than DeepseekV3ForCausalLM got for its "
        "kv_b_proj"
    )
