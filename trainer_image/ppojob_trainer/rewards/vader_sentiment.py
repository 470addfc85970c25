"""Positive sentiment as reward, PPO's classic demonstration: `module: ppojob_trainer.rewards.vader_sentiment`.

VADER (Hutto and Gilbert 2014) sums a lexicon's valences, so nothing is downloaded and a response takes microseconds.
"""

from __future__ import annotations

import functools
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # type: ignore[import-untyped]


def compute_score(
    *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score one response by VADER's compound value, from -1 (negative) to 1 (positive); an empty one has 0.

    Returns:
        `score`, and the shares `positive`, `neutral`, `negative` of the text.
    """
    polarity = _analyzer().polarity_scores(solution_str)
    return {
        "score": polarity["compound"],
        "positive": polarity["pos"],
        "neutral": polarity["neu"],
        "negative": polarity["neg"],
    }


@functools.lru_cache(maxsize=1)
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()
