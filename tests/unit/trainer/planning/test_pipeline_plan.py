"""The plan of a pipeline: its micro-batches, how long stages wait for one another, and what the report says."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ppojob_trainer.planning import Plan, plan_job
from ppojob_trainer.planning.report import as_json, as_text
from ppojob_trainer.planning.seconds import TimedRun, idle_shares, seconds_of
from ppojob_trainer.planning.work import Measured, Work
from tests.unit.trainer.planning.jobs import HIDDEN, VOCABULARY, job, write_config
from tests.unit.trainer.planning.measured import measure
from tests.unit.trainer.planning.stubs import H200, plan, stub, work_of


def test_a_pipeline_is_planned_with_as_many_micro_batches_as_stages(tmp_path: Path) -> None:
    """32 sequences of 128 tokens, 8 in a micro-batch: 4 for two ranks of one stage, 2 for each of two ranks of one."""
    works: dict[str, Work] = {}

    def seen(work: Work) -> Measured:
        works[work.kind] = work
        return stub(work)

    def planned(gpus: int, sizes: dict[str, int], tokens: int = 1024) -> tuple[int, int, int]:
        actor = {"miniBatchSize": 32, "maxTokensPerGPU": tokens, **sizes}
        plan_job(job(write_config(tmp_path), gpus, actor=actor), {"all": H200}, runner=seen)
        ref, actor_work = works["ref"], works["actor"]
        assert (ref.dims, ref.num_forward) == (actor_work.dims, actor_work.num_forward)
        return actor_work.dims.pipeline, actor_work.num_passes, actor_work.sequences

    assert planned(2, {}) == (1, 2, 8)
    assert planned(2, {"pipelineParallelSize": 2}) == (2, 4, 8)
    assert planned(4, {"pipelineParallelSize": 2, "tensorParallelSize": 2}) == (2, 4, 8)
    # All sequences would fit into one micro-batch.
    assert planned(3, {"pipelineParallelSize": 3}, 10**6) == (3, 3, 11)


def test_stages_wait_for_one_another_in_passes_and_updates(tmp_path: Path) -> None:
    """(p - 1) / (m + p - 1): with two stages and 4 micro-batches of an update a fifth."""
    actor = {"miniBatchSize": 32, "maxTokensPerGPU": 1024, "pipelineParallelSize": 2}

    def idle_of(found: Plan) -> dict[str, float]:
        return idle_shares(found.spec, {name: one.role for name, one in found.roles.items()})

    found = plan(tmp_path, actor=actor)
    idle = idle_of(found)
    assert idle == pytest.approx({"old_log_prob": 1 / 5, "ref": 1 / 5, "update_actor": 1 / 5})
    halved = idle_of(plan(tmp_path, actor={**actor, "miniBatchSize": 16}))
    assert halved == pytest.approx({"old_log_prob": 1 / 5, "ref": 1 / 5, "update_actor": 1 / 3})
    # 32 micro-batches of a sequence are two schedules of a forward pass, and one of an update.
    longer = idle_of(plan(tmp_path, actor={**actor, "maxTokensPerGPU": 128}))
    assert longer == pytest.approx({"old_log_prob": 2 / 34, "ref": 2 / 34, "update_actor": 1 / 33})

    work = work_of(found, layer_parameters=1e9)
    runs = [TimedRun(work, dict.fromkeys(work.operations, 2.0), H200)]
    without = seconds_of(found.spec, work, H200, runs).phases
    with_stages = seconds_of(found.spec, work, H200, runs, idle).phases
    assert with_stages["update_critic"] == without["update_critic"] == pytest.approx(2.0)
    # What is divided over the GPUs takes 5/4 as long; a tenth of the time on one GPU is not divided.
    fixed = 2.0 * 0.1 / (0.1 + 0.9 / 2)
    assert with_stages["update_actor"] == pytest.approx(fixed + (2.0 - fixed) * 5 / 4)


def test_virtual_stages_wait_for_half_as_much(tmp_path: Path) -> None:
    """(p - 1) / (v m + p - 1): with two stages on each of two GPUs and 4 micro-batches a ninth."""
    sizes = {"pipelineParallelSize": 2, "virtualPipelineParallelSize": 2}
    spec = job(
        write_config(tmp_path, num_hidden_layers=4), actor={"miniBatchSize": 32, "maxTokensPerGPU": 1024, **sizes}
    )
    found = plan_job(spec, {"all": H200}, runner=stub)
    idle = idle_shares(found.spec, {name: one.role for name, one in found.roles.items()})
    assert idle == pytest.approx({"old_log_prob": 1 / 9, "ref": 1 / 9, "update_actor": 1 / 9})
    printed = io.StringIO()
    Console(file=printed, width=200).print(as_text(found))
    assert "actor (most of 4 stages, 2 of each rank)" in printed.getvalue()


def test_the_report_of_a_pipeline(tmp_path: Path) -> None:
    actor = {"miniBatchSize": 32, "maxTokensPerGPU": 1024, "pipelineParallelSize": 2}
    spec = job(write_config(tmp_path), actor=actor, critic={**actor})
    found = plan_job(spec, {"all": H200}, runner=measure)
    assert found.fits
    content = json.loads(as_json(found))
    assert {role["role"]: role["stages"] for role in content["pools"][0]["roles"]} == {
        "actor": 2,
        "critic": 2,
        "ref": 2,
    }
    assert content["idleShares"]["update_critic"] == pytest.approx(1 / 5)
    links = {(link["what"], link["way"]): link for link in content["links"]}
    weights = 2 * found.roles["actor"].measured.num_parameters
    assert links["weights", "between the actor's stages"]["bytes_each"] == weights / 2
    # Hidden states of 4 micro-batches forwards for log-probs; in the update, gradients to the first stage and states to
    # the last; and a tied embedding's gradient.
    message = 8 * 128 * HIDDEN * 2
    traffic = links["actor: pipeline", "between its ranks"]["bytes_each"]
    assert traffic == 4 * message + 4 * message + 4 * VOCABULARY * HIDDEN
    printed = io.StringIO()
    Console(file=printed, width=200).print(as_text(found))
    assert "actor (most of 2 stages)" in printed.getvalue()
    assert "update_actor (pipeline: 20% idle)" in printed.getvalue()
