"""The weights of a real vLLM engine change while it generates: which weights sample which token, and what is cached."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.drafts import write_repeating_model
from tests.integration.trainer.in_flight_updates import NUM_SAMPLES, NUM_TOKENS, seen_of
from tests.integration.trainer.separate_process import LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

ROUNDING = 1e-4
"""float32 on both sides; sums in another order differ by about 2e-6 on this model."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="plain"), pytest.param(True, id="drafts", marks=pytest.mark.long)],
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_repeating_model(tmp_path_factory.mktemp("model"))
    found = seen_of(model, LIMIT_S, drafts=request.param)
    assert (found["accepted drafts"] > 0) is request.param
    return found


def assert_equal(ours: list[float], theirs: list[float]) -> None:
    """Compare log-probs. The engine rounds otherwise with other sequences or other numbers of tokens at a time."""
    assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) < ROUNDING


def test_no_response_is_lost_or_cut(seen: dict[str, Any]) -> None:
    for name in ("alone", "same weights", "other weights", "after"):
        assert [len(one["tokens"]) for one in seen[name]] == [NUM_TOKENS] * NUM_SAMPLES, name
        assert [len(one["log_probs"]) for one in seen[name]] == [NUM_TOKENS] * NUM_SAMPLES, name
        assert {one["reason"] for one in seen[name]} == {"length"}, name


def test_each_token_has_the_version_of_the_weights_that_sampled_it(seen: dict[str, Any]) -> None:
    assert {version for one in seen["alone"] for version in one["versions"]} == {0}
    for name in ("same weights", "other weights"):
        for one in seen[name]:
            versions = one["versions"]
            assert len(versions) == NUM_TOKENS
            assert versions == sorted(versions)
            # Of two pushes of the same step, the second one counts.
            assert sorted(set(versions)) == seen["pushed"][name]
    assert len({version for one in seen["after"] for version in one["versions"]}) == 1


def test_equal_weights_change_nothing(seen: dict[str, Any]) -> None:
    for one, alone in zip(seen["same weights"], seen["alone"], strict=True):
        assert one["tokens"] == alone["tokens"]
        assert_equal(one["log_probs"], alone["log_probs"])


def test_tokens_before_the_push_are_those_of_the_old_weights(seen: dict[str, Any]) -> None:
    for one, alone in zip(seen["other weights"], seen["alone"], strict=True):
        num_old = one["versions"].count(one["versions"][0])
        assert one["tokens"][:num_old] == alone["tokens"][:num_old]
        assert_equal(one["log_probs"][:num_old], alone["log_probs"][:num_old])
        assert one["tokens"][num_old:] != alone["tokens"][num_old:]


def test_tokens_after_the_push_are_those_of_the_new_weights_on_the_cache_of_the_old_ones(seen: dict[str, Any]) -> None:
    for differences in seen["differences"]:
        assert differences["kept cache"] < ROUNDING
        assert differences["computed again"] > 100 * ROUNDING
        assert differences["old"] > 100 * ROUNDING


def test_a_new_request_finds_nothing_that_old_weights_cached(seen: dict[str, Any]) -> None:
    assert seen["difference after"] < ROUNDING
    assert [one["tokens"] for one in seen["after"]] == [one["tokens"] for one in seen["alone with new"]]


def test_a_push_after_one_that_broke_off_is_whole(seen: dict[str, Any]) -> None:
    sender, engine = seen["broken off"]
    assert sender == "the trainer exited"
    assert "vLLM's worker 0 failed in ppojob_receive_weights" in engine
    assert seen["waits"]
    for one, other in zip(seen["after a broken push"], seen["alone with new"], strict=True):
        assert one["tokens"] == other["tokens"]
        assert_equal(one["log_probs"], other["log_probs"])


def test_an_engine_that_exits_while_it_waits_for_weights_is_lost_at_once(seen: dict[str, Any]) -> None:
    in_the_push, after_it = seen["lost"]
    assert in_the_push.startswith("vLLM's engine exited before it finished ppojob_receive_weights")
    assert after_it.startswith("vLLM's engine exited before it cleared its cache")
