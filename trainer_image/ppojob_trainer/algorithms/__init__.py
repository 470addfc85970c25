"""The estimator of advantages and the policy loss that a PPOJob chooses: ours by name, or the user's own function.

A user's module imports the types of its functions from here: docs/algorithms.md.
"""

from ppojob_trainer.algorithms.interface import (
    AdvantageFunction,
    AdvantageInputs,
    PolicyLossFunction,
    PolicyLossInputs,
)
from ppojob_trainer.algorithms.loader import AlgorithmFunctionError, estimator_of, policy_loss_of, try_functions

__all__ = [
    "AdvantageFunction",
    "AdvantageInputs",
    "AlgorithmFunctionError",
    "PolicyLossFunction",
    "PolicyLossInputs",
    "estimator_of",
    "policy_loss_of",
    "try_functions",
]
