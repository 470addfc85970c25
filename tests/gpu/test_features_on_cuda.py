"""What saves memory, on one GPU: each feature runs some steps on a random model of 135 million parameters.

The numbers are those of the plain run (exactly where only memory moves, up to bfloat16's rounding elsewhere), the
memory that a feature promises to free is free, and the last test prints one table. It needs neither a network nor a
checkpoint: the weights are drawn here.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA, Offload
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.unit.trainer.engines.fsdp_engines import policy_engine

pytestmark = [
    pytest.mark.gpu,
    # Whichever test comes first waits for all runs.
    pytest.mark.timeout(400),
]

VOCABULARY, SEQUENCES, PROMPT, RESPONSE, STEPS = 49152, 32, 128, 384, 4
MIB = 2**20
BOTH = Offload(parameters=True, optimizer=True)
ADAPTERS = LoRA(rank=16, alpha=32.0)
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {"gradient_checkpointing": False},
    "gradient checkpointing": {},
    "checkpointing, activation offload": {"activation_offload": True},
    "checkpointing, parameter offload": {"offload": Offload(parameters=True)},
    "checkpointing, optimizer offload": {"offload": Offload(optimizer=True)},
    "checkpointing, both offloads": {"offload": BOTH},
    "checkpointing, compile": {"compile": True},
    "checkpointing, LoRA": {"lora": ADAPTERS},
    "checkpointing, LoRA, compile": {"lora": ADAPTERS, "compile": True},
    "checkpointing, LoRA, all offloads": {"lora": ADAPTERS, "offload": BOTH, "activation_offload": True},
}


@dataclass(frozen=True)
class Seen:
    """Of one feature: memory in MiB, and the numbers of the first update and after the last."""

    peak: float
    idle: float
    tokens_per_second: float
    first: dict[str, float]
    last: dict[str, float]
    log_probs: torch.Tensor


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M's shape with random weights in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "random"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seen(parallel: ParallelMesh, model_path: Path) -> dict[str, Seen]:
    return {name: measure(parallel, model_path, settings) for name, settings in FEATURES.items()}


def make_batch(num_minibatches: int = 2) -> DataProto:
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    tensors = rollout_batch(
        [tokens(PROMPT - row) for row in range(SEQUENCES)], [tokens(RESPONSE - 2 * row) for row in range(SEQUENCES)]
    )
    mask = tensors[Keys.RESPONSE_MASK]
    tensors[Keys.ADVANTAGES] = mask.unpadded(torch.randn(mask.padded().shape, generator=generator))
    meta = {"temperature": 1.0, "num_mini_batches": num_minibatches, "epochs": 1, "response_length": RESPONSE}
    return DataProto.from_dict(tensors, meta_info=meta)


def measure(parallel: ParallelMesh, path: Path, settings: dict[str, Any]) -> Seen:
    """Run the steps; speed is that of the last."""
    _forget()
    training = ActorSpec(learning_rate=1e-4, max_tokens_per_gpu=16_384)
    engine = policy_engine(
        parallel, ActorModel(path=str(path), **settings), training, AlgorithmSpec(), total_steps=STEPS
    )
    batch = make_batch()
    num_tokens = float(len(batch.ragged(Keys.INPUT_IDS).values))
    updates: list[dict[str, float]] = []
    seconds = 0.0
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        old = engine.forward(batch)
        torch.cuda.synchronize()
        started = time.perf_counter()
        updates.append(engine.update(batch.with_fields(old.columns)))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    for _ in engine.weights().gather():
        pass
    peak, idle = torch.cuda.max_memory_allocated() / MIB, torch.cuda.memory_allocated() / MIB
    log_probs = engine.forward(batch).padded(Keys.OLD_LOG_PROBS)
    del engine
    _forget()
    return Seen(peak, idle, num_tokens / seconds, updates[0], updates[-1], log_probs)


def moments_after(parallel: ParallelMesh, path: Path, *, late: bool) -> torch.Tensor:
    """Return the first moments of all parameters after the second update, before which the moments may arrive late."""
    _forget()
    # The weights stay as they are: else rounding in the first update would change the gradients of the second one.
    engine = make_engine(parallel, path, learning_rate=0.0, offload=Offload(optimizer=True))
    batch = make_batch()
    batch = batch.with_fields(engine.forward(batch).columns)
    engine.update(batch)
    if late:
        # A second or more; the update takes less.
        with torch.cuda.stream(engine._offloader._arriving):
            torch.cuda._sleep(2_000_000_000)
    engine.update(batch)
    with engine._offloader.on_device(moments=True):
        states = engine.optimizer.adamw.state.values()
        return torch.cat([local(state["exp_avg"]).flatten().cpu() for state in states])


def _forget() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def test_the_table(seen: dict[str, Seen]) -> None:
    """Print it; with PPOJOB_TEST_TABLE also as JSON lines into that file."""
    rows = [(name, one.peak, one.idle, one.tokens_per_second) for name, one in seen.items()]
    tokens = SEQUENCES * (PROMPT + RESPONSE)
    print(f"\n{torch.cuda.get_device_name()}, 135M, up to {tokens} tokens, 2 minibatches, torch {torch.__version__}")
    print(f"{'feature':36} {'peak MiB':>9} {'idle MiB':>9} {'tokens/s':>9}")
    for name, peak, idle, speed in rows:
        print(f"{name:36} {peak:9.0f} {idle:9.0f} {speed:9.0f}")
    if path := os.environ.get("PPOJOB_TEST_TABLE"):
        keys = ("feature", "peak_mib", "idle_mib", "tokens_per_second")
        Path(path).write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    assert all(speed > 0 for *_, speed in rows)


@pytest.mark.parametrize("name", [name for name in FEATURES if "LoRA" not in name])
def test_no_feature_changes_the_training(seen: dict[str, Seen], name: str) -> None:
    plain, other = seen["gradient checkpointing"], seen[name]
    # The backward pass of attention adds in no fixed order, so not even two plain runs are equal to the last bit.
    assert other.first["actor/grad_norm"] == pytest.approx(plain.first["actor/grad_norm"], rel=0.02)
    assert other.first["actor/pg_loss"] == pytest.approx(plain.first["actor/pg_loss"], abs=1e-3)
    assert (other.log_probs - plain.log_probs).abs().mean() < 0.05


@pytest.mark.parametrize("name", ["checkpointing, LoRA, compile", "checkpointing, LoRA, all offloads"])
def test_no_feature_changes_the_training_of_adapters(seen: dict[str, Seen], name: str) -> None:
    plain, other = seen["checkpointing, LoRA"], seen[name]
    assert other.first["actor/grad_norm"] == pytest.approx(plain.first["actor/grad_norm"], rel=0.02)
    assert (other.log_probs - plain.log_probs).abs().mean() < 0.05


def test_a_step_waits_for_moments_that_arrive_late(parallel: ParallelMesh, model_path: Path) -> None:
    plain, late = (moments_after(parallel, model_path, late=late) for late in (False, True))
    # Runs differ by the rounding of the backward pass. If they arrived after a step, it would be 0.4.
    assert (late - plain).norm() < 0.1 * plain.norm()


def test_adapters_learn(seen: dict[str, Seen]) -> None:
    assert seen["checkpointing, LoRA"].last["actor/grad_norm"] > 0
    difference = (seen["checkpointing, LoRA"].log_probs - seen["gradient checkpointing"].log_probs).abs().mean()
    assert difference > 0


def test_the_memory_that_was_promised_is_free(seen: dict[str, Seen]) -> None:
    # 135 million parameters: float32 weights 513 MiB, AdamW's moments twice that, bfloat16 weights half of it.
    weights = 513.0
    plain = seen["gradient checkpointing"]
    assert plain.peak < seen["nothing"].peak
    assert plain.idle == pytest.approx(3 * weights, abs=150)
    assert seen["checkpointing, parameter offload"].idle == pytest.approx(2 * weights, abs=150)
    assert seen["checkpointing, optimizer offload"].idle == pytest.approx(weights, abs=150)
    assert seen["checkpointing, both offloads"].idle < 200
    assert seen["checkpointing, LoRA"].idle < weights / 2 + 200
    assert seen["checkpointing, LoRA"].peak < plain.peak - weights
    assert seen["checkpointing, LoRA, all offloads"].idle < 200


def make_engine(
    parallel: ParallelMesh,
    path: Path,
    *,
    learning_rate: float = 1e-4,
    max_tokens: int = 4096,
    stays_gathered: bool = False,
    **settings: Any,
) -> FSDPEngine:
    training = ActorSpec(learning_rate=learning_rate, max_tokens_per_gpu=max_tokens)
    model = ActorModel(path=str(path), **settings)
    return policy_engine(parallel, model, training, AlgorithmSpec(), total_steps=STEPS, stays_gathered=stays_gathered)


# For the last size, Inductor by itself fuses other sums than for a warm-up, and compiles the layers again.
@pytest.mark.parametrize(("stays_gathered", "max_tokens"), [(False, 4096), (True, 4096), (False, 16_384)])
def test_after_a_warmup_a_step_compiles_nothing(
    parallel: ParallelMesh, model_path: Path, stays_gathered: bool, max_tokens: int
) -> None:
    from torch._dynamo.utils import counters

    _forget()
    counters.clear()
    engine = make_engine(parallel, model_path, compile=True, stays_gathered=stays_gathered, max_tokens=max_tokens)
    batch = make_batch(num_minibatches=1)
    engine.warm_up(PROMPT, RESPONSE)
    warmed_up = counters["stats"]["unique_graphs"]
    assert warmed_up > 0
    engine.update(batch.with_fields(engine.forward(batch).columns))
    assert counters["stats"]["unique_graphs"] == warmed_up


def test_a_checkpoint_of_what_is_offloaded_takes_none_of_the_gpu(
    parallel: ParallelMesh, model_path: Path, tmp_path: Path
) -> None:
    saved, resumed = make_engine(parallel, model_path, offload=BOTH), make_engine(parallel, model_path)
    batch = make_batch()
    saved.update(batch)
    idle = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    saved.save(tmp_path / "waited-for")
    saved.save(tmp_path / "background", in_background=True)
    assert torch.cuda.max_memory_allocated() - idle < 10 * MIB
    while not saved.is_saved():
        time.sleep(0.01)
    expected = [tensor.clone() for tensor in saved.weights().gather()]
    for name in ("waited-for", "background"):
        resumed.restore(tmp_path / name)
        assert all(torch.equal(*pair) for pair in zip(resumed.weights().gather(), expected, strict=True))


def test_a_background_save_has_the_tensors_of_its_start_and_its_copies_take_none_of_the_gpu(
    parallel: ParallelMesh, model_path: Path, tmp_path: Path
) -> None:
    saved, resumed = make_engine(parallel, model_path), make_engine(parallel, model_path)
    batch = make_batch()
    saved.update(batch)
    for number in range(2):
        expected = [tensor.clone() for tensor in saved.weights().gather()]
        idle = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        saved.save(tmp_path / str(number), in_background=True)
        assert torch.cuda.max_memory_allocated() - idle < 10 * MIB
        assert "timing_s/checkpoint/wait_actor" in saved.update(batch)
        while not saved.is_saved():
            time.sleep(0.01)
        resumed.restore(tmp_path / str(number))
        assert all(torch.equal(*pair) for pair in zip(resumed.weights().gather(), expected, strict=True))
    # The random state is copied too, and most of it is on the host anyway.
    of_parameters = [saved._offloader._buffers[size] for size in set(saved._offloader._sizes_of_copies())]
    assert of_parameters
    assert all(buffer.is_pinned() for of_size in of_parameters for buffer in of_size)


def test_activations_on_the_host_leave_the_gpu_their_memory(parallel: ParallelMesh, tmp_path: Path) -> None:
    """With a small vocabulary the layers' inputs are most of the peak; with a large one the output layer hides them."""
    torch.manual_seed(7)
    layers, width, sequences, length = 24, 512, 64, 1024
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(1024, (sequences, length), generator=generator).tolist()
    tensors = rollout_batch([row[:8] for row in rows], [row[8:] for row in rows])
    tensors[Keys.ADVANTAGES] = tensors[Keys.RESPONSE_MASK].unpadded(
        torch.randn(sequences, length - 8, generator=generator)
    )
    meta = {"temperature": 1.0, "num_mini_batches": 1, "epochs": 1, "response_length": length}
    batch = DataProto.from_dict(tensors, meta_info=meta)
    peaks = {}
    for is_asked in (False, True):
        _forget()
        training = ActorSpec(learning_rate=1e-4, max_tokens_per_gpu=sequences * length)
        model = ActorModel(path=str(tmp_path), activation_offload=is_asked)
        engine = policy_engine(parallel, model, training, AlgorithmSpec(), total_steps=1)
        old = engine.forward(batch)
        torch.cuda.reset_peak_memory_stats()
        engine.update(batch.with_fields(old.columns))
        peaks[is_asked] = torch.cuda.max_memory_allocated()
        del engine
    inputs = layers * sequences * length * width * 2
    print(
        f"\nactivation offload: {peaks[False] / MIB:.0f} -> {peaks[True] / MIB:.0f} MiB; inputs {inputs / MIB:.0f} MiB"
    )
    assert peaks[True] < peaks[False] - inputs / 2
