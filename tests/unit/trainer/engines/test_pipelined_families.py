"""More families on real pipeline ranks: the tests of `test_engine_peer_options` on models of `test_engine_families`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.models import support
from ppojob_trainer.models.support import Support
from tests.unit.trainer.engines import test_engine_peer_options, test_engine_tensor_parallel_experts
from tests.unit.trainer.engines.test_engine_families import FAMILIES, save_tiny_family
from tests.unit.trainer.engines.test_engine_peer_options import (
    Layout,
    alone,
    seen_of,
    test_each_rank_writes_its_share_of_the_files,
    test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes,
    test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes,
    test_ranks_of_a_group_stay_equal,
    test_the_initial_values_are_those_of_one_rank,
    test_the_outputs_are_those_of_one_rank,
    test_two_optimizer_steps_are_those_of_one_rank,
)

# The fixtures and tests of the other module, which run here too.
__all__ = [
    "alone",
    "test_each_rank_writes_its_share_of_the_files",
    "test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes",
    "test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes",
    "test_ranks_of_a_group_stay_equal",
    "test_the_initial_values_are_those_of_one_rank",
    "test_the_outputs_are_those_of_one_rank",
    "test_two_optimizer_steps_are_those_of_one_rank",
]

pytestmark = pytest.mark.slow

PIPELINE = ParallelDims(pipeline=2)
# Three layers: the first stage has two. Names of the models in `FAMILIES`.
LONG = {
    "pipeline 2 of mistral": Layout(PIPELINE, "mistral window", None),
    "pipeline 2 of gemma": Layout(PIPELINE, "gemma", None),
    "pipeline 2 of gemma2": Layout(PIPELINE, "gemma2 without caps", None),
    "pipeline 2 of gemma3": Layout(PIPELINE, "gemma3", None),
    "pipeline 2 of phi3": Layout(PIPELINE, "phi3", None),
    "pipeline 2 of olmo2": Layout(PIPELINE, "olmo2", None),
    "pipeline 2 of smollm3": Layout(PIPELINE, "smollm3", None),
    "pipeline 2 of glm4": Layout(PIPELINE, "glm4", None),
    "pipeline 2 of mixtral": Layout(PIPELINE, "mixtral window", None),
    "pipeline 2 x expert 2 of mixtral": Layout(ParallelDims(shard=2, pipeline=2, expert=2), "mixtral", None),
}


@pytest.fixture(scope="module")
def all_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: save_tiny_family(folder / name, name) for name in {layout.family for layout in LONG.values()}}


seen = seen_of({}, LONG)


def test_the_families_with_pipelines_are_tested_on_real_ranks() -> None:
    peers = test_engine_peer_options.LAYOUTS | test_engine_peer_options.LONG
    layouts = [*peers.values(), *test_engine_tensor_parallel_experts.LONG.values(), *LONG.values()]
    names = {"experts": "qwen3_moe", "starved": "qwen3_moe", "deep experts": "qwen3_moe", "deepseek": "deepseek_v3"}
    names |= {"deep": "llama", "deeper": "llama"} | {name: family for name, (family, _) in FAMILIES.items()}
    tested = {names.get(layout.family, layout.family) for layout in layouts if layout.dims.pipeline > 1}
    assert tested == {name for name, family in support.FAMILIES.items() if family.pipeline is Support.TESTED}
