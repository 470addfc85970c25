"""Every family on ranks that gather keys and values: the outputs and gradients of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.models import support
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines import option_ranks, peer_ranks
from tests.unit.trainer.engines.test_engine_families import FAMILIES, SHAPE
from tests.unit.trainer.engines.test_engine_peer_options import SAME_GRADIENTS
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_experts import fill_biases, saved
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH
from tests.unit.trainer.engines.two_ranks import make_policy

pytestmark = pytest.mark.slow

CONTEXT = ParallelDims(context=2)
Results = dict[str, dict[str, Any]]


def every_family(parallel: ParallelMesh, models: Path, batch: DataProto, _: Path) -> Results:
    """One rank's log-probs, and gradients of two optimizer steps, by the name of the family's folder."""
    found = {}
    for model in sorted(models.iterdir()):
        policy = make_policy(parallel, model)
        log_probs = policy.forward(batch).padded("old_log_probs", RESPONSE_LENGTH)
        found[model.name] = {"log_probs": log_probs, **option_ranks.observed_update(policy, batch)}
    return found


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name, (family, settings) in FAMILIES.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **settings}))
        fill_biases(model)
        saved(model, folder / name)
    return folder


@pytest.fixture(scope="module")
def alone(parallel: ParallelMesh, families: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return every_family(parallel, families, peer_ranks.whole_batch(), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def ranks(families: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("context")
    run_ranks(CONTEXT, families, folder, every_family)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(CONTEXT.world_size)]


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_one_rank(alone: Results, ranks: list[Results], name: str) -> None:
    expected = alone[name]
    for found in (rank[name] for rank in ranks):
        torch.testing.assert_close(found["log_probs"], expected["log_probs"], atol=1e-5, rtol=1e-4)
        norm = "actor/grad_norm"
        assert found["metrics"][norm] == pytest.approx(expected["metrics"][norm], rel=1e-4)
        for limit, step, of_one in zip(SAME_GRADIENTS, found["gradients"], expected["gradients"], strict=True):
            assert step.keys() == of_one.keys()
            for parameter, gradient in of_one.items():
                apart = (step[parameter] - gradient).abs().max() / gradient.abs().max()
                assert apart < limit, f"{parameter}: {apart:g} of its gradient"


def test_these_are_all_families() -> None:
    assert {family for family, _ in FAMILIES.values()} == set(support.FAMILIES)
