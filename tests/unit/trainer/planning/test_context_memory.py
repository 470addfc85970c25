"""The plan of gathered keys and values: their bytes by hand, and the memory of real ranks."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.model import LoadOptions
from ppojob_trainer.planning import role_memory
from ppojob_trainer.planning.roles import passes_of, planned_roles, work_of
from ppojob_trainer.planning.work import Work
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.planning import stage_ranks
from tests.unit.trainer.planning.batches import MICRO_BATCHES, PROMPT, RESPONSE, SEQUENCES
from tests.unit.trainer.planning.jobs import CONFIG, HIDDEN, LAYERS, job, write_config
from tests.unit.trainer.planning.measured import measure

TWO = ParallelDims(context=2)
TOKENS = SEQUENCES * (PROMPT + RESPONSE)
# Keys and values of all tokens in bfloat16: 2 of 4 heads.
GATHERED = TOKENS * 2 * (HIDDEN // 4 * 2) * 2


def work(folder: Path, dims: ParallelDims, **options: Any) -> Work:
    config = AutoConfig.from_pretrained(write_config(folder))
    load = LoadOptions(gradient_checkpointing=True, **options)
    return Work("actor", config, load, dims, SEQUENCES, 2, PROMPT, RESPONSE, ActorSpec(), SEQUENCES)


def test_bytes_of_gathered_keys_by_hand(tmp_path: Path) -> None:
    """A layer gathers once; the backward pass gathers again, and sends the gradients of all keys."""
    found = measure(work(tmp_path, TWO))
    assert found.traffic.received["keys"] == LAYERS * GATHERED
    assert found.update_traffic.received["keys"] == LAYERS * 3 * GATHERED
    assert found.traffic.received["exchange"] == 0
    assert measure(work(tmp_path, ParallelDims(sequence=2))).traffic.received["keys"] == 0


def test_ranks_that_divide_heads_gather_their_heads_alone(tmp_path: Path) -> None:
    found = measure(work(tmp_path, ParallelDims(sequence=2, context=2)))
    assert found.traffic.received["keys"] == LAYERS * GATHERED / 2
    assert found.traffic.received["exchange"] > 0


def test_a_rank_has_the_activations_of_its_slice(tmp_path: Path) -> None:
    whole, halved = (measure(work(tmp_path, dims)) for dims in (ParallelDims(shard=2), TWO))
    assert halved.weights == whole.weights
    assert halved.activations < whole.activations


def test_a_size_beyond_the_heads_is_planned_for_its_model(tmp_path: Path) -> None:
    spec = job(write_config(tmp_path), 4, actor={"sequenceParallelSize": 4, "miniBatchSize": 32})
    roles = planned_roles(spec, lambda _, path, __: AutoConfig.from_pretrained(path))
    dims = work_of(spec, roles["actor"], stays_gathered=False).dims
    assert (CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]) == (4, 2)
    assert dims == ParallelDims(sequence=2, context=2)
    # A micro-batch has the tokens of four GPUs.
    of_one = passes_of(spec, replace(roles["actor"], divided_like=spec.critic))
    assert passes_of(spec, roles["actor"]).sequences == 4 * of_one.sequences


def test_a_group_over_several_nodes_is_planned_as_it_runs(tmp_path: Path) -> None:
    nodes = [{"name": "all", "nodes": 4, "gpusPerNode": 1}]
    spec = job(write_config(tmp_path), actor={"sequenceParallelSize": 4, "miniBatchSize": 32}, pools=nodes)
    roles = planned_roles(spec, lambda _, path, __: AutoConfig.from_pretrained(path))
    assert work_of(spec, roles["actor"], stays_gathered=False).dims == ParallelDims(context=4)


@pytest.mark.slow
def test_real_ranks_hold_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with the real engine, on the CPU: so the plan takes the CPU's paths here, too."""
    # Twice the tokens of a rank are in a micro-batch.
    planned_work = replace(
        work(tmp_path, TWO), sequences=2 * SEQUENCES, update_sequences=2 * SEQUENCES, num_passes=MICRO_BATCHES // 2
    )
    with monkeypatch.context() as patched:
        patched.setattr(role_memory, "as_on_cuda", lambda _: nullcontext())
        planned = role_memory.measure(planned_work)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(planned_work.config).to(torch.bfloat16).save_pretrained(tmp_path)

    run_ranks(TWO, tmp_path, tmp_path, stage_ranks.live_bytes)

    for rank in range(TWO.world_size):
        seen = torch.load(tmp_path / f"rank-{rank}.pt")
        assert seen["idle"] == pytest.approx(planned.weights + planned.optimizer, rel=0.01), rank
        assert seen["update"] == pytest.approx(planned.update, rel=0.01), rank
        assert seen["forward"] == pytest.approx(planned.forward + planned.optimizer, rel=0.01), rank
