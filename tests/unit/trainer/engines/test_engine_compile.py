"""Layers are compiled, with gradient checkpointing too, and compute what they compute without.

torch's tracing and partitioning run as on a GPU; the code is then run by PyTorch's own operators (`aot_eager`), which
takes seconds where Inductor takes minutes on a CPU. tests/gpu has every combination with Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.batch import Segments
from ppojob_trainer.engines.train.fsdp import attention
from ppojob_trainer.engines.train.fsdp.layers import ATTENTION_PART, COMPILER, prepare_layer
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines import gradient_ranks, test_engine_families
from tests.unit.trainer.engines.fsdp_engines import policy_engine, reference_engine
from tests.unit.trainer.engines.test_engine_routing import log_probs, random_recording
from tests.unit.trainer.engines.tiny_experts import save_tiny_experts, tiny_experts
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH, make_batch, save_tiny_model

pytestmark = [
    pytest.mark.slow,
    # torch hides it from its users while it traces, which does not work where warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

NUM_LAYERS = 9
"""More than torch compiles one function for: layers that did not share their code would show."""


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=NUM_LAYERS)


@pytest.fixture
def update(
    deep_model: Path, parallel: ParallelMesh, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[float, int]]:
    """Return an update's gradient norm, and how many graphs were compiled for it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", dynamic=True))

    def run(**model: object) -> tuple[float, int]:
        torch.compiler.reset()
        counters.clear()
        engine = policy_engine(
            parallel,
            ActorModel(path=str(deep_model), **model),
            ActorSpec(learning_rate=1e-3, max_tokens_per_gpu=1000),
            AlgorithmSpec(),
            total_steps=10,
            dtype=torch.float32,
        )
        return engine.update(make_batch(2, num_mini_batches=1))["actor/grad_norm"], counters["stats"]["unique_graphs"]

    return run


@pytest.mark.parametrize(
    "features",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True},
        pytest.param(
            {"gradient_checkpointing": True, "activation_offload": True, "lora": LoRA(rank=4)}, marks=pytest.mark.long
        ),
    ],
    ids=["nothing recomputed", "checkpointing", "checkpointing, LoRA, activations offloaded"],
)
def test_compiled_layers_compute_the_same(
    update: Callable[..., tuple[float, int]], features: dict[str, object]
) -> None:
    plain, num_plain = update(compile=False, **features)
    compiled, num_compiled = update(compile=True, **features)

    assert compiled == pytest.approx(plain, rel=1e-4)
    assert num_plain == 0
    # The layers are compiled, once for all of them and not each for itself.
    assert 0 < num_compiled < NUM_LAYERS


def test_layers_with_and_without_windows_are_all_compiled(
    tmp_path: Path, parallel: ParallelMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an actor with adapters: with and without them, with gradients, of one and of several sequences."""
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    config = AutoConfig.for_model("qwen2", **test_engine_families.SHAPE, **windows)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    policy = policy_engine(
        parallel,
        ActorModel(path=str(tmp_path), compile=True, lora=LoRA(rank=2)),
        ActorSpec(learning_rate=1e-3, max_tokens_per_gpu=1000),
        AlgorithmSpec(),
        total_steps=10,
        dtype=torch.float32,
    )

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        policy.warm_up(9, 7)

    # torch's own limit is 8, and it computes without compilation what comes after them.
    assert counters["stats"]["unique_graphs"] > 8


def test_attention_with_a_window_is_compiled_for_any_number_and_length_of_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what GPUs have in place of the loop over sequences: one kernel for all of them."""

    def one_kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Any) -> Tensor:
        return (value * (1.0 if scores.window is None else 2.0)).transpose(1, 2)

    monkeypatch.setattr(attention, "_one_by_one", one_kernel)
    torch.compiler.reset()
    counters.clear()
    module, compiled = nn.Identity(), torch.compile(attention.packed_attention, backend="aot_eager", **COMPILER)
    for number in range(1, 13):
        lengths = tuple(5 + 7 * number * place % 11 for place in range(number))
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        tokens = torch.randn(1, 2, sum(lengths), 4)
        for window in (4, 1000):
            found, _ = compiled(
                module, tokens, tokens, tokens, None, segments=Segments(ends, lengths), sliding_window=window
            )
            assert torch.equal(found, (tokens * (2 if window == 4 else 1)).transpose(1, 2))

    # For each window one of a fixed size, and one or two of any size.
    assert counters["stats"]["unique_graphs"] <= 6


# torch's tracer makes one of each of ours.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_warm_up_compiles_what_recorded_experts_need(
    parallel: ParallelMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a reference: torch cannot trace the backward pass of grouped products on CPUs."""
    # torch traces mixtral in a third of the time of the others.
    path = str(save_tiny_experts(tmp_path, family="mixtral"))
    # One sequence: attention on CPUs is compiled for each number of them.
    batch = random_recording(gradient_ranks.whole_batch())[0]
    expected = log_probs(reference_engine(parallel, path, max_tokens_per_gpu=33, dtype=torch.float32), batch)
    # As in test_engine_compile: torch's tracing and partitioning without Inductor's code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", dynamic=True))
    torch.compiler.reset()
    counters.clear()
    reference = reference_engine(
        parallel, path, max_tokens_per_gpu=33, dtype=torch.float32, compile=True, replays_experts=True
    )
    reference.warm_up(9, RESPONSE_LENGTH)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0

    found = log_probs(reference, batch)

    assert counters["stats"]["unique_graphs"] == compiled
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (8,), self.weight)


class _Pass(NamedTuple):
    """The options are those that Inductor has where it makes the pass's kernels."""

    is_backward: bool
    fuses_all_sums: bool
    has_one_order: bool


def options_of_passes(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Tensor]) -> list[_Pass]:
    found: list[_Pass] = []
    compile_graph = GraphLowering.compile_to_module

    def noted(self: GraphLowering) -> Any:
        fuses_all = config.triton.mix_order_reduction_non_strict_mode
        found.append(_Pass(self.is_backward, fuses_all, config.batch_invariant))
        return compile_graph(self)

    monkeypatch.setattr(GraphLowering, "compile_to_module", noted)
    torch.compiler.reset()
    with fresh_cache():
        compute().sum().backward()
    return found


def test_sums_are_fused_for_any_number_of_tokens_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, the default compiles the first update again."""
    layer = _Layer()
    prepare_layer(layer, recomputes=False, compiles=True, gathers_experts=False)
    found = options_of_passes(monkeypatch, lambda: layer(torch.randn(4, 8)))
    assert found == [_Pass(False, True, False), _Pass(True, True, False)]


def test_sums_before_experts_are_added_in_one_order_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, the default chooses the block size of a sum by the time that it takes, for each pass."""
    model: Any = tiny_experts().base_model
    layer: Any = model.get_submodule("layers.0")
    hidden = torch.randn(1, 4, model.config.hidden_size)
    positions = model.get_submodule("rotary_emb")(hidden, torch.arange(4)[None])
    prepare_layer(layer, recomputes=True, compiles=True, gathers_experts=True)
    part = getattr(layer, ATTENTION_PART)
    found = options_of_passes(
        monkeypatch, lambda: part(layer, hidden, position_embeddings=positions, attention_mask=None)
    )
    assert found == [_Pass(False, True, True), _Pass(True, True, True)]
