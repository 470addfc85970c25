"""A string ends the same response whether the trainer's scheduler or vLLM's front end looks for it, in real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.drafts import write_repeating_model
from tests.integration.trainer.stop_strings import NUM_TOKENS, generated

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 400


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_a_string_ends_the_same_responses_as_in_vllm(tmp_path: Path) -> None:
    seen: dict[str, Any] = generated(write_repeating_model(tmp_path), LIMIT_SECONDS)

    assert {name: found["finds_stops"] for name, found in seen.items()} == {
        "ours": True,
        "vLLM's": False,
        "drafts": True,
    }
    for name in ("ours", "drafts"):
        assert seen[name]["tokens"] == seen["vLLM's"]["tokens"]
        assert seen[name]["ends"] == seen["vLLM's"]["ends"]
        for mine, theirs in zip(seen[name]["log_probs"], seen["vLLM's"]["log_probs"], strict=True):
            # Drafts are computed together, and rounded otherwise.
            assert mine == pytest.approx(theirs, abs=0.05)
    ended = [reason for reason in seen["ours"]["ends"] if reason == "stop"]
    assert 3 < len(ended) < len(seen["ours"]["ends"])
    assert min(map(len, seen["ours"]["tokens"])) < NUM_TOKENS / 2
