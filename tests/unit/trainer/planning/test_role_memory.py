"""What a role needs on fake tensors is what it needs on real ones, and what its formulas say."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.model import LoadOptions
from ppojob_trainer.engines.train.mesh import init_process_group
from ppojob_trainer.engines.train.objectives import PolicyObjective
from ppojob_trainer.planning import role_memory
from ppojob_trainer.planning.fake_device import LiveBytes
from ppojob_trainer.planning.work import Measured, Traffic, Work
from tests.unit.trainer.planning.batches import PROMPT, RESPONSE, SEQUENCES, real_batch
from tests.unit.trainer.planning.jobs import LAYERS, write_config, write_experts
from tests.unit.trainer.planning.measured import measure

ALONE = ParallelDims()
SHARDED = ParallelDims(shard=2)


def work(folder: Path, dims: ParallelDims = ALONE, kind: str = "actor", passes: int = 1, **options: Any) -> Work:
    config = AutoConfig.from_pretrained(write_config(folder))
    training = ActorSpec() if kind == "actor" else CriticSpec() if kind == "critic" else None
    load = LoadOptions(is_frozen=training is None, **options)
    return Work(kind, config, load, dims, SEQUENCES, passes, PROMPT, RESPONSE, training, SEQUENCES)


def parameters(folder: Path) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write_config(folder)))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_real_update_has_the_planned_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    """The real engine, with memory, on the CPU: so the plan takes the CPU's paths here, too."""
    planned_work = work(tmp_path, gradient_checkpointing=checkpointing)
    with monkeypatch.context() as patched:
        patched.setattr(role_memory, "as_on_cuda", lambda _: nullcontext())
        planned = role_memory.measure(planned_work)

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(planned_work.config).to(torch.bfloat16).save_pretrained(tmp_path)
    training = ActorSpec(max_tokens_per_gpu=SEQUENCES * (PROMPT + RESPONSE))
    model = ActorModel(path=str(tmp_path), gradient_checkpointing=checkpointing)
    engine = FSDPEngine(EngineSetup(model, training, PolicyObjective(training, AlgorithmSpec())))
    parallel = init_process_group(Device.CPU, 0, ALONE, listen("127.0.0.1", 60), 60)
    live = LiveBytes()
    try:
        with live:
            engine.load(parallel, total_steps=2)
            engine.update(real_batch())
            idle = live.now
            live.restart()
            engine.update(real_batch())
    finally:
        parallel.destroy()
    assert idle == pytest.approx(planned.weights + planned.optimizer, rel=0.02)
    assert live.peak == pytest.approx(planned.update, rel=0.02)


def test_states_by_hand(tmp_path: Path) -> None:
    """float32 weights, gradients and two moments, each divided over the ranks; the reference in bfloat16."""
    count = parameters(tmp_path)
    for dims in (ALONE, SHARDED):
        found, share = measure(work(tmp_path, dims, passes=2)), count / dims.world_size
        assert found.num_parameters == count
        states = (found.weights, found.gradients, found.optimizer)
        assert states == pytest.approx((4 * share, 4 * share, 8 * share), rel=0.05)
    frozen = measure(work(tmp_path, SHARDED, "ref"))
    assert frozen.weights == pytest.approx(2 * count / 2, rel=0.05)
    assert (frozen.gradients, frozen.optimizer, frozen.update) == (0, 0, 0)


@pytest.mark.parametrize(("kind", "lora"), [("ref", None), ("reward_model", None), ("actor", LoRA(rank=4))])
def test_frozen_weights_take_bfloat16_whatever_their_file_has(tmp_path: Path, kind: str, lora: LoRA | None) -> None:
    planned = work(tmp_path, kind=kind, lora=lora)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        planned.config.dtype, planned.config.pad_token_id = dtype, 0
        found.append(measure(planned))
    assert found[1:] == found[:1] * 2


def peak(folder: Path, dims: ParallelDims = ALONE, **options: Any) -> int:
    return measure(work(folder, dims, **options)).peak


def test_gradients_of_the_micro_batches_before_are_beside_the_last(tmp_path: Path) -> None:
    first, last = measure(work(tmp_path, passes=1)), measure(work(tmp_path, passes=2))
    assert last.update - first.update == pytest.approx(first.gradients, rel=0.01)


def test_each_option_changes_the_peak_in_its_direction(tmp_path: Path) -> None:
    plain = peak(tmp_path)
    assert peak(tmp_path, gradient_checkpointing=True) < plain
    assert peak(tmp_path, SHARDED) < plain
    assert peak(tmp_path, SHARDED, stays_gathered=True) > peak(tmp_path, SHARDED)
    kept = peak(tmp_path, gradient_checkpointing=True)
    assert peak(tmp_path, gradient_checkpointing=True, activation_offload=True) < kept
    assert peak(tmp_path, gradient_checkpointing=True, lora=LoRA(rank=4)) < kept


@pytest.mark.parametrize("dims", [ParallelDims(sequence=2), ParallelDims(tensor=2), ParallelDims(2, 1, 1, 2)])
def test_every_axis_is_planned(tmp_path: Path, dims: ParallelDims) -> None:
    found: Measured = measure(work(tmp_path, dims, gradient_checkpointing=True))
    assert found.peak > found.weights + found.optimizer
    assert found.update_traffic.received["exchange" if dims.sequence > 1 else "reduce"] > 0
    assert found.update_traffic.received["experts"] == 0


def test_adapters_on_divided_layers_by_hand(tmp_path: Path) -> None:
    """Of each adapter, the matrix on the divided side of its layer is divided, and the other is whole on each rank."""
    rank = 32
    # Inputs and outputs of q, k, v, gate and up, and of o and down.
    by_outputs, by_inputs = [(128, 128), (128, 64), (128, 64), (128, 512), (128, 512)], [(128, 128), (512, 128)]

    def numbers(parts: int) -> int:
        of_outputs = sum(inputs + outputs // parts for inputs, outputs in by_outputs)
        of_inputs = sum(inputs // parts + outputs for inputs, outputs in by_inputs)
        return LAYERS * rank * (of_outputs + of_inputs)

    whole, mine = numbers(1), numbers(2)
    options: dict[str, Any] = {"gradient_checkpointing": True, "lora": LoRA(rank=rank)}
    alone, divided = (measure(work(tmp_path, dims, **options)) for dims in (ALONE, ParallelDims(tensor=2)))
    assert alone.num_parameters == divided.num_parameters == parameters(tmp_path) + whole
    # float32 gradients and two moments.
    for found, adapters in ((alone, whole), (divided, mine)):
        assert (found.gradients, found.optimizer) == pytest.approx((4 * adapters, 8 * adapters), rel=0.05)
    assert divided.peak < alone.peak
    both = measure(work(tmp_path, ParallelDims(shard=2, tensor=2), **options))
    assert both.optimizer == pytest.approx(divided.optimizer / 2, rel=0.05)


@pytest.mark.parametrize("dims", [ALONE, ParallelDims(shard=2, expert=2)], ids=str)
def test_adapters_on_experts_by_hand(tmp_path: Path, dims: ParallelDims) -> None:
    """Of the eight experts of a layer, all three projections have adapters, and two compute for a token."""
    rank = 32
    in_expert = 3 * rank * (128 + 192)
    config = AutoConfig.from_pretrained(write_experts(tmp_path))
    lora = LoRA(rank=rank, target_modules=["gate_proj", "up_proj", "down_proj"])
    plain, adapted = (
        measure(
            replace(work(tmp_path, dims), config=config, options=LoadOptions(gradient_checkpointing=True, lora=one))
        )
        for one in (None, lora)
    )
    assert adapted.num_sent == plain.num_parameters
    assert adapted.num_adapters == adapted.num_parameters - plain.num_parameters == LAYERS * 8 * in_expert
    assert adapted.layer_adapters == adapted.layer_parameters - plain.layer_parameters == LAYERS * 2 * in_expert
    mine = adapted.num_adapters / dims.world_size
    assert (adapted.gradients, adapted.optimizer) == pytest.approx((4 * mine, 8 * mine), rel=0.05)
    # All experts, but neither attention nor embeddings.
    assert adapted.changing == 2 * LAYERS * 8 * 3 * 128 * 192


def test_critic_and_reward_model_are_planned(tmp_path: Path) -> None:
    critic = measure(work(tmp_path, SHARDED, "critic"))
    assert critic.optimizer == pytest.approx(2 * critic.weights, rel=0.01)
    found = work(tmp_path, SHARDED, "reward_model")
    found.config.num_labels, found.config.pad_token_id = 1, 0
    scored = measure(found)
    assert scored.weights == pytest.approx(critic.weights / 2, rel=0.05)
    assert scored.forward > scored.weights


def test_gathered_bytes_are_those_of_the_layers(tmp_path: Path) -> None:
    """In bfloat16: once in a pass, and once more in the backward pass, but the last group stays gathered for it."""
    found, count = measure(work(tmp_path, SHARDED, gradient_checkpointing=True)), parameters(tmp_path)
    assert found.traffic.received["gather"] == pytest.approx(2 * count, rel=0.05)
    assert 2 * count < found.update_traffic.received["gather"] <= 2 * 2 * count
    assert found.update_traffic.received["reduce"] == pytest.approx(4 * count, rel=0.05)


def test_a_model_that_stays_gathered_is_gathered_and_reduced_once(tmp_path: Path) -> None:
    """Of a pass over the batch, and of an optimizer step, whatever the number of its micro-batches."""
    count = parameters(tmp_path)
    for passes in (2, 4):
        found = measure(work(tmp_path, SHARDED, passes=passes, stays_gathered=True))
        once, of_step = found.batch_traffic.received, found.step_traffic.received
        assert (found.traffic.received["gather"], found.update_traffic.received["gather"]) == (0, 0)
        assert found.update_traffic.received["reduce"] == 0
        assert once["gather"] == of_step["gather"] == pytest.approx(2 * count, rel=0.05)
        assert of_step["reduce"] == pytest.approx(4 * count, rel=0.05)
    freed = measure(work(tmp_path, SHARDED, passes=2))
    assert freed.batch_traffic == freed.step_traffic == Traffic()


def test_live_bytes_are_those_of_pytorchs_own_tracker() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])

    theirs, ours, inputs = MemTracker(), LiveBytes(), torch.ones(64, 256)
    their_model = model()
    theirs.track_external(their_model)
    known = theirs.get_tracker_snapshot("current")[inputs.device]["Total"]
    with theirs:
        their_model(inputs * 2).sum().backward()
    with ours:
        our_model = model()
        before = ours.now
        our_model(inputs * 2).sum().backward()

    peak = theirs.get_tracker_snapshot("peak")[inputs.device]["Total"]
    # CUDA's blocks are counted by one of them for the smallest tensors, too.
    assert ours.peak - before == pytest.approx(peak - known, abs=4096)
    assert before == 4 * (256 * 256 + 256) * 4
    del our_model
    assert ours.now == 0
