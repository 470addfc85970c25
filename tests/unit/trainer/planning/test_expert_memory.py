"""What a mixture of experts needs on fake tensors: what real ranks hold, and what they send each other."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters, warn_once_cache
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import expert_blocks
from ppojob_trainer.engines.train.fsdp.model import LoadOptions
from ppojob_trainer.engines.weights.buckets import BUCKET_BYTES
from ppojob_trainer.planning import fake_device, role_memory
from ppojob_trainer.planning.work import Work
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.planning import stage_ranks
from tests.unit.trainer.planning.batches import MICRO_BATCHES, PROMPT, RESPONSE, SEQUENCES
from tests.unit.trainer.planning.jobs import HIDDEN, write_experts
from tests.unit.trainer.planning.measured import measure, measured_stages

EXPERTS, PER_TOKEN, LAYERS = 4, 3, 2
ONE_EXPERT = 3 * HIDDEN * 192
TOKENS = SEQUENCES * (PROMPT + RESPONSE)
HIDDEN_STATES = TOKENS * 2 * HIDDEN * 2
"""Bytes of a hidden state in bfloat16 for each token and each of two ranks, which both have experts of it."""
CHOICES, WEIGHTS = TOKENS * 2 * PER_TOKEN * 4, TOKENS * 2 * PER_TOKEN * 2
SIZES = 8 * (EXPERTS + 2)
TWO, IN_STAGES = ParallelDims(shard=2, expert=2), ParallelDims(shard=2, pipeline=2, expert=2)
IN_SLICES = ParallelDims(tensor=2, expert=2)


def work(folder: Path, dims: ParallelDims, per_token: int = PER_TOKEN, passes: int = 2, **options: Any) -> Work:
    path = write_experts(folder, num_experts=EXPERTS, num_experts_per_tok=per_token, num_hidden_layers=LAYERS)
    config, load = AutoConfig.from_pretrained(path), LoadOptions(gradient_checkpointing=True, **options)
    return Work("actor", config, load, dims, SEQUENCES, passes, PROMPT, RESPONSE, ActorSpec(), SEQUENCES, passes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims", [TWO, *(pytest.param(dims, marks=pytest.mark.long) for dims in (IN_STAGES, IN_SLICES))], ids=str
)
def test_real_ranks_hold_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dims: ParallelDims) -> None:
    """Processes with the real engine, on the CPU. Each token uses all experts: that is even routing."""
    planned_work = work(tmp_path, dims, EXPERTS, MICRO_BATCHES)
    with monkeypatch.context() as patched:
        patched.setattr(role_memory, "as_on_cuda", lambda _: nullcontext())
        stages = [role_memory.measure_stage(planned_work, stage) for stage in range(dims.pipeline)]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(planned_work.config).to(torch.bfloat16).save_pretrained(tmp_path)

    run_ranks(dims, tmp_path, tmp_path, stage_ranks.live_bytes)

    # On a busy machine, a rank was seen to hold 0.32 MB more for a moment: less than the rows of one exchange.
    in_flight = TOKENS * EXPERTS * HIDDEN * 2
    for rank in range(dims.world_size):
        planned = stages[rank // dims.of_stage]
        seen = torch.load(tmp_path / f"rank-{rank}.pt")
        assert seen["idle"] == pytest.approx(planned.weights + planned.optimizer, rel=0.01), rank
        for peak, expected in (("update", planned.update), ("forward", planned.forward + planned.optimizer)):
            assert 0.99 * expected < seen[peak] < 1.01 * expected + in_flight, (rank, peak, seen[peak], expected)


def test_bytes_of_the_exchange_by_hand(tmp_path: Path) -> None:
    """A layer sends hidden states with choices and weights, and receives sums. An update sends hidden states and
    weights again, as often as the layer is computed, and gradients of both and of the sums."""
    found = measure(work(tmp_path, TWO))
    assert found.traffic.received["experts"] == LAYERS * (2 * HIDDEN_STATES + CHOICES + WEIGHTS + SIZES)
    of_update = (2 + 1 + 2) * HIDDEN_STATES + CHOICES + 3 * WEIGHTS + SIZES
    assert found.update_traffic.received["experts"] == LAYERS * of_update
    assert measure(work(tmp_path, ParallelDims(shard=2))).traffic.received["experts"] == 0


def test_the_exchange_of_sequence_parallel_ranks_is_another(tmp_path: Path) -> None:
    found = measure(work(tmp_path, ParallelDims(sequence=2, expert=2)))
    assert 0 < found.traffic.received["experts"] <= LAYERS * (2 * HIDDEN_STATES + CHOICES + WEIGHTS + SIZES)
    assert found.traffic.received["exchange"] > 0


def test_tensor_parallel_ranks_exchange_their_slices_of_the_tokens(tmp_path: Path) -> None:
    found = measure(work(tmp_path, IN_SLICES))
    assert found.traffic.received["experts"] == LAYERS * ((2 * HIDDEN_STATES + CHOICES + WEIGHTS) // 2 + SIZES)
    alone = measure(work(tmp_path, ParallelDims(tensor=2)))
    assert alone.traffic.received["experts"] == 0
    in_experts = LAYERS * EXPERTS * ONE_EXPERT
    assert alone.traffic.received["gather"] - found.traffic.received["gather"] == 2 * in_experts, (
        "undivided experts are gathered"
    )


def test_a_rank_gathers_its_own_experts_alone(tmp_path: Path) -> None:
    """In bfloat16, over the ranks that own the same ones; if there are no others, nothing."""
    whole = measure(work(tmp_path, ParallelDims(shard=4)))
    in_experts = LAYERS * EXPERTS * ONE_EXPERT
    gathered = {
        size: measure(work(tmp_path, ParallelDims(shard=4, expert=size))).traffic.received["gather"] for size in (2, 4)
    }
    assert whole.traffic.received["gather"] - gathered[2] == 2 * in_experts / 2
    assert whole.traffic.received["gather"] - gathered[4] == 2 * in_experts


def test_divided_experts_are_sharded_over_all_ranks(tmp_path: Path) -> None:
    whole, divided = (measure(work(tmp_path, ParallelDims(shard=4, expert=size))) for size in (1, 2))
    for number in ("weights", "gradients", "optimizer"):
        assert getattr(divided, number) == pytest.approx(getattr(whole, number), rel=0.01), number
    numbers = whole.num_parameters, whole.layer_parameters, whole.expert_layers
    assert (divided.num_parameters, divided.layer_parameters, divided.expert_layers) == numbers
    assert whole.expert_layers == LAYERS
    # The gathered experts of a layer, and their gradients in bfloat16 and float32, are halved.
    assert divided.update < whole.update - EXPERTS * ONE_EXPERT / 2 * 2


def test_stages_of_experts_together_have_the_model_and_its_exchange(tmp_path: Path) -> None:
    whole = measure(work(tmp_path, TWO))
    stages = measured_stages(work(tmp_path, IN_STAGES))
    for number in ("num_parameters", "layer_parameters", "expert_layers"):
        assert {getattr(stage, number) for stage in stages} == {getattr(whole, number)}, number
    for number in ("weights", "gradients", "optimizer"):
        assert sum(getattr(stage, number) for stage in stages) == pytest.approx(getattr(whole, number), rel=0.01)
    for number in ("traffic", "update_traffic"):
        of_stages = [getattr(stage, number).received["experts"] for stage in stages]
        assert sum(of_stages) == getattr(whole, number).received["experts"] > 0, number


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_divided_evenly_and_the_measured_rank_gets_no_fewer(ranks: int) -> None:
    sent, received, rows = fake_device._evenly(torch.zeros(3, ranks), 4 * ranks + 1, 3)
    # Two experts of a token are on the same of two ranks, and the three on others of four.
    most = {2: 9, 4: 13}[ranks]
    assert sent == {2: [9, 9], 4: [13, 13, 13, 12]}[ranks]
    assert received == [most] * ranks
    assert rows == [{2: 14, 4: 13}[ranks]] * ranks


def test_a_push_gathers_a_layer_or_experts_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = work(tmp_path, TWO)
    layer = 2 * EXPERTS * ONE_EXPERT

    whole = measure(planned).push
    # As in a layer that is too large to be gathered at once.
    monkeypatch.setattr(expert_blocks, "LARGE_BYTES", 0)
    monkeypatch.setattr(expert_blocks, "BLOCK_BYTES", 0)
    blocks = role_memory.measure(planned)

    assert whole - blocks.weights > layer
    assert 0 < blocks.push - blocks.weights - BUCKET_BYTES < whole - blocks.weights - BUCKET_BYTES - layer / 2


def test_a_compiled_mixture_is_planned_without_a_warning(tmp_path: Path) -> None:
    # torch warns once in a process.
    warn_once_cache.clear()
    compiled = work(tmp_path, ParallelDims(shard=2), compile=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        role_memory.measure(compiled)
    assert [str(one.message) for one in seen if "Dynamo" in str(one.message)] == []


# torch's tracer makes one of each of ours.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dims", [TWO, IN_SLICES], ids=str)
def test_layers_with_divided_experts_are_compiled_up_to_the_experts(tmp_path: Path, dims: ParallelDims) -> None:
    plain = measure(work(tmp_path, dims))
    counters.clear()

    found = role_memory.measure(work(tmp_path, dims, compile=True))

    assert counters["stats"]["unique_graphs"] == 2  # of the pass without a backward pass, and of the update
    assert not counters["graph_break"]
    # The hidden states between the two parts of each layer are kept, and compiled attention keeps less for a moment.
    assert found.update == pytest.approx(plain.update, rel=0.15)
