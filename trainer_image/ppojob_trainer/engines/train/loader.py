"""Creates the training engine of a role, and the reward model's. Roles know no engine by its class.

Called by the roles' workers. Imports are inside the functions, because an engine imports transformers, which takes
seconds and which the driver and the other roles do not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppojob_trainer.engines.train.engine import EngineSetup, ScoringEngine, TrainEngine

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from ppojob_api.v1alpha1.model import RewardModel
    from ppojob_trainer.engines.train.mesh import ParallelMesh

__all__ = ["check_reward_model", "load_reward_model", "make_engine"]


def make_engine(setup: EngineSetup) -> TrainEngine:
    """Create an engine, which loads nothing yet."""
    from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine

    return FSDPEngine(setup)


def check_reward_model(model: RewardModel) -> PretrainedConfig:
    """Read a reward model's configuration, seconds before its weights are loaded.

    Raises:
        ModelNotFoundError: there is none.
        ModelUnsupportedError: it is not a sequence classifier, or has no such label.
    """
    from ppojob_trainer.engines.train.fsdp import reward

    return reward.check_reward_model(model.path, model.label, model.trust_remote_code)


def load_reward_model(model: RewardModel, parallel: ParallelMesh, dtype: torch.dtype) -> ScoringEngine:
    """Load and shard the reward model. Collective; raises what `check_reward_model` raises."""
    from ppojob_trainer.engines.train.fsdp.reward import RewardModelEngine

    return RewardModelEngine(
        parallel,
        model.path,
        label=model.label,
        trust_remote_code=model.trust_remote_code,
        max_tokens_per_gpu=model.max_tokens_per_gpu,
        dtype=dtype,
    )
