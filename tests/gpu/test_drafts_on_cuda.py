"""Drafts on CUDA: the second model runner samples the same tokens with and without them, but for rounding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.drafts import NUM_PROMPTS, SAMPLINGS, generated, write_repeating_model
from tests.integration.trainer.vllm_agreement import FEW, share_of_equal

pytestmark = pytest.mark.gpu

LIMIT_SECONDS = 500


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return generated(write_repeating_model(tmp_path_factory.mktemp("model")), "CUDA", LIMIT_SECONDS)


def num_equal(first: list[int], second: list[int]) -> int:
    """Return how many tokens two responses have in common from the start."""
    pairs = zip(first, second, strict=False)
    return next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(first), len(second)))


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_seed_samples_the_same_response_with_and_without_drafts(seen: dict[str, Any], sampling: str) -> None:
    without, found = seen["without"][sampling], seen["with"][sampling]
    pairs = list(zip(found["tokens"], without["tokens"], strict=True))

    # Kernels of several tokens round otherwise than those of one, so a few responses continue with another token.
    assert sum(mine == theirs for mine, theirs in pairs) >= NUM_PROMPTS - 3
    num_tokens = sum(len(theirs) for _, theirs in pairs)
    assert sum(num_equal(mine, theirs) for mine, theirs in pairs) > 0.85 * num_tokens
    if SAMPLINGS[sampling].temperature:
        assert share_of_equal(found["with other seeds"], without["tokens"]) <= FEW


@pytest.mark.parametrize("sampling", [name for name, sampling in SAMPLINGS.items() if sampling.log_probs])
def test_log_probs_are_those_of_the_tokens(seen: dict[str, Any], sampling: str) -> None:
    without, found = seen["without"][sampling], seen["with"][sampling]

    for row, (mine, theirs) in enumerate(zip(found["tokens"], without["tokens"], strict=True)):
        number = num_equal(mine, theirs)
        assert found["log_probs"][row][:number] == pytest.approx(without["log_probs"][row][:number], abs=0.05)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_are_checked_and_kept(seen: dict[str, Any], sampling: str) -> None:
    num_steps, num_drafted, num_accepted = seen["with"][sampling]["drafts"]

    assert seen["without"][sampling]["drafts"] == [0, 0, 0]
    assert 50 < num_drafted <= num_steps
    assert num_accepted > num_drafted / 10
