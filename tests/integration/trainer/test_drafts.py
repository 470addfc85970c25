"""Responses are the same with and without `rollout.speculative`: a real vLLM engine and a model that repeats itself.

A model that is given several tokens at once rounds otherwise, so a log-prob differs in its last digits.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.drafts import SAMPLINGS, generated, write_repeating_model
from tests.integration.trainer.separate_process import LIMIT_S
from tests.integration.trainer.vllm_agreement import FEW, MOST, share_of_equal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return generated(write_repeating_model(tmp_path_factory.mktemp("model")), "CPU", LIMIT_S)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_seed_samples_the_same_response_with_and_without_drafts(seen: dict[str, Any], sampling: str) -> None:
    without, found = seen["without"][sampling], seen["with"][sampling]

    assert share_of_equal(found["tokens"], without["tokens"]) >= MOST
    # Others finish at other times then. There are three.
    assert share_of_equal(found["again"], without["again"]) > 0.5
    if SAMPLINGS[sampling].temperature:
        assert share_of_equal(found["with other seeds"], without["tokens"]) <= FEW
    # Greedy responses repeat the prompt's last token, of which there are three.
    assert len({tuple(tokens) for tokens in found["tokens"]}) >= 3


@pytest.mark.parametrize("sampling", [name for name, sampling in SAMPLINGS.items() if sampling.log_probs])
def test_log_probs_are_those_of_the_tokens(seen: dict[str, Any], sampling: str) -> None:
    without, found = seen["without"][sampling], seen["with"][sampling]

    for row, tokens in enumerate(found["tokens"]):
        if tokens == without["tokens"][row]:
            # bfloat16 keeps three digits of a logit.
            assert found["log_probs"][row] == pytest.approx(without["log_probs"][row], abs=0.05)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_are_checked_and_kept(seen: dict[str, Any], sampling: str) -> None:
    num_steps, num_drafted, num_accepted = seen["with"][sampling]["drafts"]

    assert seen["without"][sampling]["drafts"] == [0, 0, 0]
    assert 50 < num_drafted < num_steps
    assert num_accepted > num_drafted / 10
