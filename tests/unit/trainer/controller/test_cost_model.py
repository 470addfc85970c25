"""What observations say about a phase on another number of GPUs, and what they cannot say."""

import pytest

from ppojob_trainer.controller.cost_model import FIXED_SHARE, Observation, fit, fit_phase


@pytest.mark.parametrize(
    ("phase", "gpus", "seconds", "on", "expected"),
    [
        # Amdahl: on one GPU 2 s, of which a tenth stays.
        ("update_actor", 1, 2.0, 2, 0.2 + 1.8 / 2),
        ("update_actor", 2, 1.1, 1, 2.0),
        ("update_actor", 2, 1.1, 2, 1.1),
        ("update_actor", 2, 1.1, 4, 0.2 + 1.8 / 4),
        ("gen", 1, 3.0, 2, 1.5 + 1.5 / 2),
        ("update_weights", 1, 0.1, 8, 0.1),
        ("hook_shaper", 4, 0.5, 1, 0.5),
    ],
)
def test_one_layout_gives_the_assumed_share(phase: str, gpus: int, seconds: float, on: int, expected: float) -> None:
    cost = fit_phase(phase, [Observation(gpus, seconds)])

    assert cost.is_assumed
    assert cost.seconds(on) == pytest.approx(expected)


def test_the_assumed_share_is_of_the_median_of_the_steps() -> None:
    cost = fit_phase("values", [Observation(1, seconds) for seconds in (1.0, 1.1, 9.0)])

    assert cost.seconds(1) == pytest.approx(1.1)


def test_two_layouts_distinguish_what_stays_from_what_is_divided() -> None:
    cost = fit_phase("gen", [Observation(1, 3.0), Observation(2, 2.5)])

    assert not cost.is_assumed
    assert (cost.fixed_s, cost.divided_gpu_s) == (pytest.approx(2.0), pytest.approx(1.0))
    assert cost.seconds(4) == pytest.approx(2.25)


def test_batches_of_different_lengths_distinguish_it_for_what_computes_all_tokens_at_once() -> None:
    seen = [Observation(2, 0.5 + tokens / 2, tokens) for tokens in (1.0, 2.0, 3.0)]

    cost = fit_phase("update_critic", seen)

    assert not cost.is_assumed
    assert cost.fixed_s == pytest.approx(0.5)
    assert cost.seconds(2) == pytest.approx(1.5), "for the median batch"
    assert cost.seconds(1) == pytest.approx(2.5)


def test_longer_responses_say_nothing_of_generation_on_more_gpus() -> None:
    cost = fit_phase("gen", [Observation(1, tokens, tokens) for tokens in (1.0, 2.0, 3.0)])

    assert cost.is_assumed
    assert cost.seconds(1) == pytest.approx(2.0)


def test_the_longest_response_stays_however_many_gpus_write_the_others() -> None:
    equal, uneven = (fit_phase("gen", [Observation(1, 2.0, evenness=evenness)]) for evenness in (1.0, 0.25))

    assert (equal.fixed_s, equal.divided_gpu_s) == (1.0, 1.0)
    # Steps of the engine as before; the others' are a quarter of the work.
    assert (uneven.fixed_s, uneven.divided_gpu_s) == (pytest.approx(1.6), pytest.approx(0.4))


@pytest.mark.parametrize("phase", ["update_weights", "adv", "data", "reward", "hook_shaper"])
def test_what_is_not_divided_is_not_fitted_however_much_the_batches_differ(phase: str) -> None:
    cost = fit_phase(phase, [Observation(2, 0.10, 1.0), Observation(2, 0.11, 2.0), Observation(2, 0.12, 3.0)])

    assert cost.is_assumed
    assert cost.divided_gpu_s == 0
    assert cost.seconds(1) == cost.seconds(8) == pytest.approx(0.11)


def test_batches_of_nearly_the_same_length_say_nothing() -> None:
    assert fit_phase("ref", [Observation(1, 1.0, 10.0), Observation(1, 0.9, 12.0)]).is_assumed


@pytest.mark.parametrize(
    ("seconds", "fixed", "divided"),
    [
        # More GPUs were slower: it is not divided at all.
        ((1.0, 1.2), 1.1, 0.0),
        # More than twice as fast on two: nothing stays.
        ((4.0, 1.0), 0.0, (4 * 1 + 1 * 0.5) / 1.25),
    ],
)
def test_no_part_is_negative(seconds: tuple[float, float], fixed: float, divided: float) -> None:
    cost = fit_phase("ref", [Observation(1, seconds[0]), Observation(2, seconds[1])])

    assert (cost.fixed_s, cost.divided_gpu_s) == (pytest.approx(fixed), pytest.approx(divided))


def test_what_was_not_observed_has_no_cost() -> None:
    assert set(fit({"gen": [Observation(1, 1.0)], "ref": []})) == {"gen"}


def test_assumed_shares_are_shares() -> None:
    assert all(0 < share < 1 for share in FIXED_SHARE.values())
