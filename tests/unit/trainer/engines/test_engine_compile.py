"""Layers are compiled, with gradient checkpointing too, and compute what they compute without.

torch's tracing and partitioning run as on a GPU; the code is then run by PyTorch's own operators (`aot_eager`), which
takes seconds where Inductor takes minutes on a CPU. tests/gpu has every combination with Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines import test_engine_families
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.engines.tiny_llama import make_batch, save_tiny_model

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
