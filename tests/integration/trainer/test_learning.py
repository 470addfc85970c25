"""PPO learns: the mean reward of an easy task rises within 25 steps, with the real engines on Ray.

The reward is the share of a response's characters that are small letters, which random weights write by chance. A mean
over 32 responses of 16 characters has a standard error of about 0.02, so chance does not cross MIN_RISE.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.trainer.runs import TASK, finish, reward_of_letters, spec_of

pytestmark = pytest.mark.timeout(1200)

STEPS = 25
MIN_RISE = 0.3
"""It rises from 0.13 to 0.94, and stays between 0.08 and 0.16 where the weights are not pushed."""


def test_the_reward_rises(model: Path, tmp_path: Path) -> None:
    training = {"learningRate": 2e-3, "miniBatchSize": 8}
    raw = spec_of(
        model,
        data={
            "train": {"reasoningGym": {**TASK, "size": 256, "seed": 1}},
            "trainBatchSize": 32,
            "maxPromptLength": 256,
            "maxResponseLength": 16,
        },
        reward=reward_of_letters(),
        algorithm={},
        actor=training,
        critic=training,
        schedule={"mode": "ParallelUpdate"},
        placement={"actor": "actor", "rollout": ["actor"], "critic": "critic", "reward": ["critic"]},
        trainer={"totalSteps": STEPS, "validateEverySteps": 0},
        checkpoint={"everySteps": 0, "export": "Never"},
    )

    records = finish(tmp_path, raw).records

    rewards = [records[step]["critic/score/mean"] for step in range(1, STEPS + 1)]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(f"mean reward of the first three steps {first:.3f}, of the last three {last:.3f}: {rewards}")
    assert last - first > MIN_RISE, rewards
