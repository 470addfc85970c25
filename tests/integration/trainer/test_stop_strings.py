"""A string ends the same response whether the trainer's scheduler or vLLM's front end looks for it, in real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.drafts import write_repeating_model
from tests.integration.trainer.separate_process import LIMIT_S
from tests.integration.trainer.stop_strings import NUM_TOKENS, generated
from tests.integration.trainer.vllm_agreement import FEW, MOST, share_of_equal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


def test_a_string_ends_the_same_responses_as_in_vllm(tmp_path: Path) -> None:
    seen: dict[str, Any] = generated(write_repeating_model(tmp_path), LIMIT_S)

    assert {name: found["finds_stops"] for name, found in seen.items()} == {
        "ours": True,
        "vLLM's": False,
        "drafts": True,
    }
    for name in ("ours", "drafts"):
        ours, theirs = seen[name], seen["vLLM's"]
        assert share_of_equal(ours["tokens"], theirs["tokens"]) >= MOST
        assert share_of_equal(ours["with other seeds"], theirs["tokens"]) <= FEW
        for row, tokens in enumerate(ours["tokens"]):
            if tokens == theirs["tokens"][row]:
                assert ours["ends"][row] == theirs["ends"][row]
                # Drafts are computed together, and rounded otherwise.
                assert ours["log_probs"][row] == pytest.approx(theirs["log_probs"][row], abs=0.05)
    ended = [reason for reason in seen["ours"]["ends"] if reason == "stop"]
    assert 3 < len(ended) < len(seen["ours"]["ends"])
    assert min(map(len, seen["ours"]["tokens"])) < NUM_TOKENS / 2
