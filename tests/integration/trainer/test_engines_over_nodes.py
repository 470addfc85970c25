"""A whole run whose engine is divided over two nodes of a real Ray, until one of these nodes is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.engines_over_nodes import ENGINE, Pods, pods_of, run_until_a_node_is_gone
from tests.integration.trainer.runs import SAME_MODEL, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 2
"""Steps before the loss."""


@pytest.fixture
def pods() -> Iterator[Pods]:
    with pods_of({"actor": [None], ENGINE: [None, None]}) as found:
        yield found


def spec_over_nodes(model: Path, size: str) -> dict[str, Any]:
    return spec_of(
        model,
        algorithm={"advantageEstimator": "GRPO"},
        rollout={"samplesPerPrompt": 2, size: 2},
        pools=[{"name": "actor", "gpusPerNode": 1}, {"name": ENGINE, "nodes": 2, "gpusPerNode": 1}],
        placement={"actor": "actor", "rollout": [ENGINE]},
        trainer={"totalSteps": 10_000, "validateEverySteps": 0},
    )


@pytest.mark.parametrize("size", ["tensorParallelSize", "pipelineParallelSize"])
def test_an_engine_over_two_nodes_follows_the_weights_until_one_node_is_gone(
    model: Path, tmp_path: Path, pods: Pods, size: str
) -> None:
    records = run_until_a_node_is_gone(tmp_path, spec_over_nodes(model, size), pods, NUM_STEPS)

    for record in (records[step] for step in range(1, NUM_STEPS + 1)):
        assert record["training/rollout_probs_diff_mean"] < SAME_MODEL
        assert record["comm_receivers/update_weights"] == 2
        assert record["rollout/engines"] == 1
