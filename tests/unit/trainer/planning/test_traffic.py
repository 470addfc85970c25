"""What moves in a step, by link: weights, the batch, each role's collectives, and those of engines over hosts."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.planning import plan_job
from ppojob_trainer.planning.report import as_json
from ppojob_trainer.planning.traffic import Link, links_of
from ppojob_trainer.planning.work import Measured, Traffic, Work
from ppojob_trainer.planning.workload import Workload, workload_of
from tests.unit.trainer.planning.jobs import HIDDEN, LAYERS, job, write_config, write_experts
from tests.unit.trainer.planning.measured import measure, measure_parameters
from tests.unit.trainer.planning.stubs import H200, of_roles, plan, stub


def test_traffic_by_hand(tmp_path: Path) -> None:
    found = plan(tmp_path)
    links = links_of(found.spec, *of_roles(found))
    weights, batch = links
    # An engine on each of the two GPUs gets 100 parameters in bfloat16.
    assert (weights.way, weights.bytes_each, weights.number) == ("on a GPU (CUDA IPC)", 200, 2)

    # 32 responses of 64 tokens. Fetched: sequences by five phases; rollout's log-probs with the actor's; advantages and
    # old log-probs by the actor's update; values and returns by the critic's. Stored: prompts, sequences, 7 columns.
    def column(tokens: int, size: int) -> int:
        return 32 * (tokens * size + 8)

    sequences, floats = column(128, 4) + column(64, 1), column(64, 4)
    assert batch.bytes_each == 5 * sequences + 5 * floats + column(64, 4) + sequences + 7 * floats


def test_the_traffic_of_an_engine_over_hosts_by_hand(tmp_path: Path) -> None:
    """Two engines of four GPUs on two hosts each; one on a host of four sends nothing to another host."""

    def found(gpus_per_node: int) -> tuple[list[Link], Workload]:
        pools = [{"name": "all", "nodes": 8 // gpus_per_node, "gpusPerNode": gpus_per_node}]
        made = plan(tmp_path, rollout={"tensorParallelSize": 4}, pools=pools)
        roles, measured = of_roles(made)
        links = links_of(made.spec, roles, measured)
        return [link for link in links if link.what == "engines"], workload_of(made.spec, roles, measured)

    (link,), work = found(gpus_per_node=2)
    # Of 16 sequences of 128 tokens: hidden states of 128 numbers, seven times; logits of 2048 tokens for 64 of them.
    reduced, gathered = 2 * 16 * 128 * 128 * 7, 2 * 16 * 64 * 2048
    assert link.bytes_each == pytest.approx((2 * reduced + gathered) * 3 / 4)
    assert link.from_other_hosts == pytest.approx((2 * reduced + gathered) * 3 / 4 / 2)
    assert link.number == 8
    assert work.awaited["gen"] == link.from_other_hosts

    links, work = found(gpus_per_node=4)
    assert links == []
    assert work.awaited["gen"] == 0


def test_the_traffic_of_an_engine_whose_stages_are_on_hosts_by_hand(tmp_path: Path) -> None:
    """Two engines of two stages; each stage has a host of two GPUs, so nothing is reduced over hosts."""
    pools = [{"name": "all", "nodes": 4, "gpusPerNode": 2}]
    made = plan(tmp_path, rollout={"tensorParallelSize": 2, "pipelineParallelSize": 2}, pools=pools)
    roles, measured = of_roles(made)
    [link] = [link for link in links_of(made.spec, roles, measured) if link.what == "engines"]

    # Of 16 sequences of 128 tokens: hidden states of 128 numbers; two of three layers reduce them twice, and one gets
    # them and the residual stream from the other stage: half over the network, and half from the other GPU.
    hidden, gathered = 2 * 16 * 128 * 128, 2 * 16 * 64 * 2048
    assert link.from_other_hosts == hidden
    assert link.bytes_each == pytest.approx((2 * 5 * hidden + gathered + 2 * hidden) / 2 + hidden)
    assert workload_of(made.spec, roles, measured).awaited["gen"] == hidden


def test_a_host_with_several_stages_receives_what_the_first_of_them_gets(tmp_path: Path) -> None:
    """Two engines of four stages on two hosts each: the last stage gets its vectors from its own host."""
    path = write_config(tmp_path, num_hidden_layers=4)
    pools = [{"name": "all", "nodes": 4, "gpusPerNode": 2}]
    found = plan_job(job(path, pools=pools, rollout={"pipelineParallelSize": 4}), {"all": H200}, runner=stub)
    [link] = [link for link in json.loads(as_json(found))["links"] if link["what"] == "engines"]
    # Hidden states and residual stream of 16 sequences of 128 tokens, 128 numbers each in bfloat16.
    assert link["from_other_hosts"] == 2 * (2 * 16 * 128 * 128)


def test_the_stages_of_an_engine_receive_their_weights_one_after_the_other(tmp_path: Path) -> None:
    def entering(size: str, **sections: Any) -> float:
        made = plan(tmp_path, rollout={size: 2}, **sections)
        roles, measured = of_roles(made)
        exchanged = Traffic(from_other_hosts=Counter(broadcast=30))
        measured = {name: replace(one, push_traffic=exchanged) for name, one in measured.items()}
        return workload_of(made.spec, roles, measured).prefetched["update_weights"]

    pools = [{"name": "all", "gpusPerNode": 2}, {"name": "engines", "nodes": 2, "gpusPerNode": 1}]
    apart = {"pools": pools, "placement": {"actor": "all", "rollout": ["engines"]}}
    # 100 parameters in bfloat16, half of them for each GPU; on the actor's host, nothing comes from others.
    assert (entering("tensorParallelSize", **apart), entering("pipelineParallelSize", **apart)) == (100, 200)
    # Engines on the actor's GPUs receive nothing, and the actor's stages exchange what they do for any engine.
    shared = {"pools": [{"name": "all", "nodes": 2, "gpusPerNode": 1}], "actor": {"pipelineParallelSize": 2}}
    assert (entering("tensorParallelSize", **shared), entering("pipelineParallelSize", **shared)) == (30, 30)


@pytest.mark.parametrize("method", ["Truncate", "Bypass"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_actor_gathers_for_each_of_its_passes(tmp_path: Path, lora: dict[str, int] | None, method: str) -> None:
    """With adapters and without a model of the reference, the actor without adapters is the reference."""

    def gathering(work: Work) -> Measured:
        return replace(stub(work), traffic=Traffic(Counter(gather=7)), update_traffic=Traffic(Counter(gather=11)))

    model = {"actor": {"path": write_config(tmp_path), "lora": lora}}
    algorithm = {"rolloutCorrection": {"method": method}}
    found = plan_job(job(write_config(tmp_path), model=model, algorithm=algorithm), {"all": H200}, runner=gathering)
    links = links_of(found.spec, *of_roles(found))
    (gathered,) = [link.bytes_each for link in links if link.what == "actor: gather"]
    # Two micro-batches of 8 sequences of 128 tokens on each of two ranks.
    assert gathered == 2 * 7 * ((method != "Bypass") + (lora is not None)) + 2 * 11
    assert ("ref" in found.roles) == (lora is None)


@pytest.mark.parametrize(("num_experts", "size"), [(256, 1), (257, 2)])
def test_recorded_experts_are_fetched_and_stored(tmp_path: Path, num_experts: int, size: int) -> None:
    """By the actor's log-probs and its update, and by a reference with the actor's experts: of all tokens but the last,
    in both layers.
    """

    def batch(ref: str | None = None, **rollout: object) -> float:
        model = {"actor": {"path": path}} | ({} if ref is None else {"ref": {"path": ref}})
        found = plan(tmp_path, model=model, rollout=rollout)
        links = links_of(found.spec, *of_roles(found))
        return next(link.bytes_each for link in links if link.what == "batch")

    path = write_experts(tmp_path / "mixture", num_experts=num_experts, num_experts_per_tok=3, num_hidden_layers=2)
    column = 32 * ((128 - 1) * 2 * 3 * size + 8)
    assert batch(routingReplay=True) - batch() == 4 * column
    other = write_experts(tmp_path / "other", num_experts=num_experts, num_experts_per_tok=3, num_hidden_layers=2)
    assert batch(other, routingReplay=True) - batch(other) == 3 * column


@pytest.mark.parametrize(("actors", "way"), [(1, "from actor rank 0 (NCCL)"), (4, "from 2 actor ranks (NCCL)")])
def test_gpus_of_a_divided_engine_in_another_pool_get_their_part_of_the_weights(
    tmp_path: Path, actors: int, way: str
) -> None:
    spec = job(
        write_config(tmp_path),
        pools=[{"name": "all", "gpusPerNode": actors}, {"name": "engines", "gpusPerNode": 4}],
        placement={"actor": "all", "rollout": ["engines"]},
        rollout={"tensorParallelSize": 2},
    )
    found = plan_job(spec, {"all": H200, "engines": H200}, runner=measure)
    [weights] = [link for link in json.loads(as_json(found))["links"] if link["what"] == "weights"]
    assert weights["way"] == way
    # In bfloat16; each of four GPUs gets a half.
    assert (weights["bytes_each"], weights["number"]) == (found.roles["actor"].measured.num_parameters, 4)


def test_with_adapters_a_push_has_what_they_change_if_engines_keep_the_rest(tmp_path: Path) -> None:
    path = write_config(tmp_path)

    def sent(target: str, *, sleep: bool) -> float:
        actor = {"path": path, "lora": {"rank": 4, "targetModules": [target]}}
        found = plan_job(job(path, model={"actor": actor}, rollout={"sleep": sleep}), {"all": H200}, runner=measure)
        [weights] = [link for link in json.loads(as_json(found))["links"] if link["what"] == "weights"]
        return float(weights["bytes_each"])

    # In bfloat16: all layers of a module with adapters, because engines fuse some. Four heads, two of keys and values.
    keys, intermediate = HIDDEN // 2, 512
    queries_and_outputs, biases = 2 * HIDDEN * HIDDEN, HIDDEN + 2 * keys
    assert sent("q_proj", sleep=False) == 2 * LAYERS * (queries_and_outputs + 2 * HIDDEN * keys + biases)
    assert sent("down_proj", sleep=False) == 2 * LAYERS * 3 * HIDDEN * intermediate
    # Engines that sleep need everything again, but no adapters.
    assert sent("q_proj", sleep=True) == 2 * measure_parameters(tmp_path)
