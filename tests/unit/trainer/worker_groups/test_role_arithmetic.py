"""What roles compute beside their engines: seeds, samples, the distance between two engines."""

import pytest
import torch

from ppojob_trainer.protocol import DataProto, Keys, Ragged
from ppojob_trainer.worker_groups.roles.actor import rollout_difference
from ppojob_trainer.worker_groups.roles.data import with_samples
from ppojob_trainer.worker_groups.roles.rollout import sample_seed
from ppojob_trainer.worker_groups.worker_process import num_threads


class OneRank:
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_a_seed_depends_on_run_step_prompt_and_sample() -> None:
    seeds = {
        sample_seed(run, step, uid, sample)
        for run in (1, 2)
        for step in (1, 2)
        for uid in ("0-1", "0-2")
        for sample in (0, 1)
    }

    assert len(seeds) == 16
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_is_the_same_in_every_process() -> None:
    assert sample_seed(1, 2, "0-3", 4) == 677_923_050


def test_samples_of_a_prompt_lie_side_by_side_and_are_numbered() -> None:
    prompts = DataProto.from_dict(non_tensors={Keys.UID: ["a", "b"]})

    repeated = with_samples(prompts, 3)

    assert repeated.array(Keys.UID).tolist() == ["a", "a", "a", "b", "b", "b"]
    assert repeated.array(Keys.SAMPLE_INDEX).tolist() == [0, 1, 2, 0, 1, 2]


def test_the_distance_between_engines_is_of_probabilities_on_response_tokens() -> None:
    batch = DataProto.from_dict(
        {
            Keys.RESPONSE_MASK: Ragged.from_rows([[True, True, False]], torch.bool),
            Keys.ROLLOUT_LOG_PROBS: Ragged(torch.tensor([0.5, 0.2, 1.0]).log(), torch.tensor([3])),
            Keys.OLD_LOG_PROBS: Ragged(torch.tensor([0.4, 0.4, 0.1]).log(), torch.tensor([3])),
        }
    )

    metrics = rollout_difference(batch, OneRank())

    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.15)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.0707, abs=1e-4)


def test_processes_of_a_role_share_the_cores_of_a_node() -> None:
    assert num_threads(1) >= num_threads(2) >= 1
    assert num_threads(10_000) == 1
    assert num_threads(1, has_gpu=True) == min(num_threads(1), 4)
