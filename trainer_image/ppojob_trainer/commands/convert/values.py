"""How one of verl's values becomes ours, for the rows of `table`. A value that has no counterpart is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class NotConvertibleError(ValueError):
    """The value cannot be converted; the message says why, and what to do instead."""


Change = Callable[[Any], Any]


def same(value: Any) -> Any:
    """Return the value."""
    return value


def number(value: Any) -> Any:
    """Return a number; 1 for 1.0 where that is what it says."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotConvertibleError(f"{value!r} is not a number that can be read here: set it by hand")
    return value


def whole(value: Any) -> int:
    """Return a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise NotConvertibleError(f"{value!r} is not a whole number that can be read here: set it by hand")
    return int(value)


def truth(value: Any) -> bool:
    """Return a boolean."""
    if isinstance(value, bool):
        return value
    raise NotConvertibleError(f"{value!r} is neither True nor False: set it by hand")


def text(value: Any) -> str:
    """Return a text."""
    return str(value)


def steps(value: Any) -> int:
    """Return a number of steps; verl's -1 for never is 0."""
    return max(0, whole(value))


def warmup(value: Any) -> int:
    """Return a number of warm-up steps; verl's -1 leaves it to the ratio, which another row converts."""
    return max(0, whole(value))


def one_of(names: Mapping[str, str], instead: str) -> Change:
    """Return a change from verl's words to ours.

    Args:
        instead: what to do about any other word.
    """

    def change(value: Any) -> str:
        found = names.get(str(value))
        if found is None:
            raise NotConvertibleError(f"{value!r} has no counterpart (there are {', '.join(names)}): {instead}")
        return found

    return change


def only(expected: Any, why: str) -> Change:
    """Return a change that takes nothing over: the expected value is how things are here, any other is refused."""

    def change(value: Any) -> None:
        if value != expected and str(value).lower() != str(expected).lower():
            raise NotConvertibleError(why)

    return change


_OWN = "write your own function, see docs/algorithms.md"
ESTIMATORS = one_of(
    {"gae": "GAE", "grpo": "GRPO", "rloo": "RLOO", "reinforce_plus_plus": "ReinforcePlusPlus"},
    f"choose one of them for algorithm.advantageEstimator, or {_OWN}",
)
LOSSES = one_of({"vanilla": "PPO", "gspo": "GSPO", "cispo": "CISPO"}, f"choose one for algorithm.policyLoss, or {_OWN}")
KL_ESTIMATORS = one_of(
    {"kl": "K1", "k1": "K1", "mse": "K2", "k2": "K2", "low_var_kl": "K3", "k3": "K3", "abs": "Abs"},
    "the estimators with another gradient (k1+, k3+, full) are not computed: choose one of them",
)
SCHEDULES = one_of(
    {"constant": "Constant", "cosine": "Cosine", "linear": "Linear"}, "choose one of them for learningRateSchedule"
)
AGGREGATIONS = one_of(
    {
        "token-mean": "TokenMean",
        "seq-mean-token-sum": "SeqMeanTokenSum",
        "seq-mean-token-sum-norm": "SeqMeanTokenSumNorm",
        "seq-mean-token-mean": "SeqMeanTokenMean",
    },
    "choose one of them for lossAggregation",
)
