"""Reward functions: what a response is worth.

The interface is verl's: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`. Users
name a module or a file; `loader` turns that into a function, `scorer` runs it over a batch, `batch` puts the scores
where the trainer wants them. No ray here; importing the package is cheap and loads neither torch nor a task.
"""

from ppojob_trainer.rewards.errors import RewardError, RewardFunctionError, RewardImportError, RewardTimeoutError
from ppojob_trainer.rewards.interface import ComputeScore, ScoreItem, ScoreResult
from ppojob_trainer.rewards.loader import load_reward_function
from ppojob_trainer.rewards.scorer import Scorer

__all__ = [
    "ComputeScore",
    "RewardError",
    "RewardFunctionError",
    "RewardImportError",
    "RewardTimeoutError",
    "ScoreItem",
    "ScoreResult",
    "Scorer",
    "load_reward_function",
]
