"""Reward functions: what a response is worth.

The interface is verl's: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`. Users
name a module or a file; `loader` turns that into a function, `scoring` runs it over a batch in separate processes,
`batch` puts the scores where the trainer wants them. No ray here; importing the package is cheap and loads neither
torch nor a task. The modules that users name are `by_data_source`, `gsm8k`, `math`, `exact_match`, `numeric_match`,
`weighted`, `reasoning_gym` and `vader_sentiment`.
"""

from ppojob_trainer.rewards.errors import (
    RewardError,
    RewardFunctionError,
    RewardImportError,
    RewardProcessError,
    RewardRefusedError,
    RewardTimeoutError,
)
from ppojob_trainer.rewards.interface import ComputeScore, ScoreItem, ScoreResult
from ppojob_trainer.rewards.loader import FunctionSource, load_reward_function
from ppojob_trainer.rewards.scoring import Scorer

__all__ = [
    "ComputeScore",
    "FunctionSource",
    "RewardError",
    "RewardFunctionError",
    "RewardImportError",
    "RewardProcessError",
    "RewardRefusedError",
    "RewardTimeoutError",
    "ScoreItem",
    "ScoreResult",
    "Scorer",
    "load_reward_function",
]
