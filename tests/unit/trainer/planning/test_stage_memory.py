"""What a pipeline's stages need on fake tensors: what real stages hold, and what the schedule says."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_api.v1alpha1.model import LoRA
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.batch import MicroBatchPlan
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.model import LoadOptions
from ppojob_trainer.planning import role_memory
from ppojob_trainer.planning.role_memory import measure_stage
from ppojob_trainer.planning.work import Measured, Work
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.planning import stage_ranks
from tests.unit.trainer.planning.batches import MICRO_BATCHES, PROMPT, RESPONSE, SEQUENCES
from tests.unit.trainer.planning.jobs import HIDDEN, LAYERS, VOCABULARY, write_config
from tests.unit.trainer.planning.measured import measure, measured_stages

TWO, THREE = ParallelDims(pipeline=2), ParallelDims(pipeline=3)
INTERLEAVED = ParallelDims(pipeline=2, virtual=2)
MESSAGE = SEQUENCES * (PROMPT + RESPONSE) * HIDDEN * 2
"""Bytes of a micro-batch's hidden states in bfloat16."""


def work(
    folder: Path,
    dims: ParallelDims = TWO,
    kind: str = "actor",
    passes: int = 4,
    *,
    layers: int = LAYERS,
    **options: Any,
) -> Work:
    config = AutoConfig.from_pretrained(write_config(folder, num_hidden_layers=layers))
    training = ActorSpec() if kind == "actor" else CriticSpec() if kind == "critic" else None
    load = LoadOptions(is_frozen=training is None, **options)
    return Work(kind, config, load, dims, SEQUENCES, passes, PROMPT, RESPONSE, training, SEQUENCES, passes)


def stages_anew(found: Work) -> list[Measured]:
    return [measure_stage(found, stage) for stage in range(found.dims.pipeline)]


@pytest.mark.slow
def test_real_stages_hold_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the real engine, on the CPU: so the plan takes the CPU's paths here, too."""
    planned_work = work(tmp_path, passes=MICRO_BATCHES, gradient_checkpointing=True)
    with monkeypatch.context() as patched:
        patched.setattr(role_memory, "as_on_cuda", lambda _: nullcontext())
        planned = stages_anew(planned_work)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(planned_work.config).to(torch.bfloat16).save_pretrained(tmp_path)

    run_ranks(TWO, tmp_path, tmp_path, stage_ranks.live_bytes)

    for stage, plan in enumerate(planned):
        seen = torch.load(tmp_path / f"rank-{stage}.pt")
        assert seen["idle"] == pytest.approx(plan.weights + plan.optimizer, rel=0.01), stage
        assert seen["update"] == pytest.approx(plan.update, rel=0.01), stage
        assert seen["forward"] - plan.optimizer == pytest.approx(plan.forward, rel=0.01), stage


@pytest.mark.parametrize(("kind", "copied"), [("actor", VOCABULARY * HIDDEN), ("critic", 0)])
def test_all_stages_together_have_the_model(tmp_path: Path, kind: str, copied: int) -> None:
    """Its tied embedding is on both ends of a policy; a critic has no output layer."""
    whole = measure(work(tmp_path, ParallelDims(), kind))
    for dims in (TWO, THREE):
        stages = measured_stages(work(tmp_path, dims, kind))
        assert {stage.num_parameters for stage in stages} == {whole.num_parameters}
        assert {stage.layer_parameters for stage in stages} == {whole.layer_parameters}
        for number in ("weights", "gradients", "optimizer"):
            total = sum(getattr(stage, number) for stage in stages)
            each = 8 if number == "optimizer" else 4
            assert total == pytest.approx(getattr(whole, number) + each * copied, rel=0.01), number


def test_the_plan_of_a_role_is_the_most_of_its_stages(tmp_path: Path) -> None:
    """Half of the layers and the embedding; FSDP divides each stage further."""
    found = work(tmp_path)
    role, stages = measure(found), measured_stages(found)
    assert role.weights == max(stage.weights for stage in stages)
    assert role.peak == max(stage.peak for stage in stages)
    whole = measure(work(tmp_path, ParallelDims()))
    embedding = 4 * VOCABULARY * HIDDEN
    assert role.weights == pytest.approx(embedding + (whole.weights - embedding) * 2 / LAYERS, rel=0.02)
    sharded = measure(work(tmp_path, ParallelDims(pipeline=2, shard=2)))
    assert (sharded.weights, sharded.optimizer) == pytest.approx((role.weights / 2, role.optimizer / 2), rel=0.02)


@pytest.mark.parametrize(
    ("dims", "passes", "of_each"),
    [(THREE, (4, 7), (1, 2, 1)), (INTERLEAVED, (4, 6), (3, 3))],
    ids=["1F1B", "interleaved"],
)
def test_more_micro_batches_add_their_messages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dims: ParallelDims,
    passes: tuple[int, int],
    of_each: tuple[int, ...],
) -> None:
    """A plan runs few of them, stages + 1 or two rounds, and adds the others' messages: the same as if it ran all."""

    few, many = (
        [(stage.forward, stage.update) for stage in measured_stages(work(tmp_path, dims, passes=number, layers=4))]
        for number in passes
    )
    for (first, then), messages in zip(zip(few, many, strict=True), of_each, strict=True):
        assert then[0] - first[0] == then[1] - first[1] == (passes[1] - passes[0]) * messages * MESSAGE
    with monkeypatch.context() as patched:
        whole = MicroBatchPlan(passes[1], SEQUENCES * (PROMPT + RESPONSE), SEQUENCES * (PROMPT + RESPONSE))
        patched.setattr(role_memory._Schedule, "_plan", lambda *_: whole)
        all_run = stages_anew(work(tmp_path, dims, passes=passes[1], layers=4))
    for planned, run in zip(many, all_run, strict=True):
        assert planned == pytest.approx((run.forward, run.update), rel=0.002)


def test_interleaved_stages_hold_more_micro_batches(tmp_path: Path) -> None:
    """Of two ranks with two stages, the first holds five passes through a stage, of half as many layers as two."""
    plain, interleaved = (measured_stages(work(tmp_path, dims, layers=4)) for dims in (TWO, INTERLEAVED))
    weights = [(one.weights, one.optimizer) for one in plain]
    assert [(one.weights, one.optimizer) for one in interleaved] == weights
    assert interleaved[0].activations > 1.1 * plain[0].activations


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages(tmp_path: Path) -> None:
    """1F1B: up to three of them add their activations, and a fourth its message, beside the gradients of the first."""
    found = [measured_stages(work(tmp_path, THREE, passes=number)) for number in (1, 2, 3, 4)]
    one, two, three, four = (first.update for first, _, _ in found)
    assert two - one > 10 * MESSAGE
    assert three - two == pytest.approx(two - one, rel=0.001)
    assert four - three == pytest.approx(found[0][0].gradients + MESSAGE, rel=0.001)
    assert found[3][2].update - found[2][2].update == pytest.approx(MESSAGE, rel=0.01), "the last stage holds one"


def test_traffic_between_stages_by_hand(tmp_path: Path) -> None:
    """Each micro-batch's hidden states, and in an update their gradients back; ends of a tied embedding exchange it."""
    stages = measured_stages(work(tmp_path, THREE))
    assert [stage.traffic.received["pipeline"] for stage in stages] == [0, MESSAGE, MESSAGE]
    assert [stage.update_traffic.received["pipeline"] for stage in stages] == [MESSAGE, 2 * MESSAGE, MESSAGE]
    gradient = 4 * VOCABULARY * HIDDEN
    assert [stage.step_traffic.received["pipeline"] for stage in stages] == [gradient, 0, gradient]
    assert measure(work(tmp_path, THREE)).update_traffic.received["pipeline"] == 2 * MESSAGE


@pytest.mark.parametrize("dims", [ParallelDims(sequence=2, pipeline=2), ParallelDims(2, 1, 1, 2, pipeline=2)])
def test_stages_are_divided_by_all_other_axes(tmp_path: Path, dims: ParallelDims) -> None:
    found = measure(work(tmp_path, dims, gradient_checkpointing=True))
    assert found.peak > found.weights + found.optimizer
    assert found.update_traffic.received["pipeline"] > 0


def test_options_and_the_reference_are_planned_for_stages(tmp_path: Path) -> None:
    plain = measure(work(tmp_path, gradient_checkpointing=True))
    assert measure(work(tmp_path)).peak > plain.peak
    assert measure(work(tmp_path, gradient_checkpointing=True, activation_offload=True)).peak < plain.peak
    adapters = measure(work(tmp_path, gradient_checkpointing=True, lora=LoRA(rank=4)))
    assert adapters.optimizer < plain.optimizer / 10
    frozen = measure(work(tmp_path, kind="ref"))
    assert frozen.weights == pytest.approx(plain.weights / 2, rel=0.01)
    assert (frozen.optimizer, frozen.update) == (0, 0)
    sharded = replace(work(tmp_path, ParallelDims(pipeline=2, shard=2)))
    gathered = replace(sharded, options=replace(sharded.options, stays_gathered=True))
    assert measure(gathered).peak > measure(sharded).peak
