"""Whole runs whose engine is divided over two nodes with one GPU each. Both nodes are Ray nodes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.whole_runs import NUM_STEPS, ROLLOUT, lossy_spec, write_inputs
from tests.integration.trainer.engines_over_nodes import ENGINE, pods_of, run_until_a_node_is_gone
from tests.integration.trainer.runs import finish

pytestmark = [pytest.mark.timeout(300)]

OVER_NODES = {**ROLLOUT, "samplesPerPrompt": 2}
LARGEST_DIFFERENCE = 0.05
"""Mean difference of the probabilities of trainer and engine, both in bfloat16: twice that of transformers in bfloat16
and in float32 (0.025; the probabilities of two tokens differ by 0.23)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(params=["tensorParallelSize", "pipelineParallelSize"])
def size(request: pytest.FixtureRequest) -> str:
    """By which field the engine is divided."""
    found: str = request.param
    return found


def spec_in(model: Path, pools: dict[str, int], rollout: str, size: str, **changes: Any) -> dict[str, Any]:
    """Return the spec of a job without a critic; `pools`: nodes of each, with one GPU."""
    sections = {"algorithm": {"advantageEstimator": "GRPO"}, "rollout": {**OVER_NODES, size: 2}}
    spec = lossy_spec(model, {}, {"actor": next(iter(pools)), "rollout": [rollout]}, **sections | changes)
    return spec | {"pools": [{"name": name, "nodes": nodes, "gpusPerNode": 1} for name, nodes in pools.items()]}


@pytest.mark.gpu(2)
def test_an_engine_on_the_actors_gpus_follows_the_weights_and_sleeps(model: Path, tmp_path: Path, size: str) -> None:
    with pods_of({"all": [0, 1]}):
        records = finish(tmp_path, spec_in(model, {"all": 2}, "all", size)).records

    assert list(records) == list(range(1, NUM_STEPS + 1))
    differences = [record["training/rollout_probs_diff_mean"] for record in records.values()]
    print(f"mean differences of probabilities {differences}")
    assert max(differences) < LARGEST_DIFFERENCE
    assert [record["comm_receivers/update_weights"] for record in records.values()] == [2] * NUM_STEPS


@pytest.mark.gpu(3)
def test_an_engine_whose_workers_would_wait_in_nccl_is_lost_with_one_of_its_nodes(
    model: Path, tmp_path: Path, size: str
) -> None:
    spec = spec_in(model, {"actor": 1, ENGINE: 2}, ENGINE, size, trainer={"totalSteps": 10_000})
    with pods_of({"actor": [0], ENGINE: [1, 2]}) as pods:
        records = run_until_a_node_is_gone(tmp_path, spec, pods, NUM_STEPS)

    differences = [record["training/rollout_probs_diff_mean"] for record in records.values()]
    print(f"mean differences of probabilities {differences}")
    assert max(differences) < LARGEST_DIFFERENCE
