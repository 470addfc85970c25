"""What engines in FP8 have in common on the CPU and on GPUs: checks of what `quantized_rollout` has seen."""

from __future__ import annotations

import math
from typing import Any


def check_log_probs(seen: dict[str, Any], largest_gap: float) -> None:
    """Check that log-probs follow two pushes; `largest_gap` is of the mean difference of probabilities."""
    assert seen["diff_at_start"] < largest_gap
    assert seen["diff_of_stale_weights"] > 2 * seen["diff_after_push"]
    assert seen["diff_after_push"] < largest_gap
    assert seen["weights_version"] == 2


def check_read_back(seen: dict[str, Any]) -> None:
    """Check that the first push was compared, and the second one was not."""
    assert (seen["first_is_read_back"], seen["second_is_read_back"]) == (True, False)


def check_correction(seen: dict[str, Any]) -> float:
    """Check the statistics of the importance weights; return the effective sample size."""
    found = {name: value for name, value in seen["metrics"].items() if name.startswith("rollout_corr/")}
    assert {
        "rollout_corr/kl",
        "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_is_eff_sample_size",
    } <= found.keys()
    assert all(map(math.isfinite, found.values()))
    size: float = found["rollout_corr/rollout_is_eff_sample_size"]
    assert 0.5 < size <= 1
    return size
