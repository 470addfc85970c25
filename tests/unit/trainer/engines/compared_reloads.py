"""Reloads weights into vLLM's own models as on a GPU, and compares them; prints what was found as JSON.

`python -m tests.unit.trainer.engines.compared_reloads FOLDER ...`. vLLM's models, loaders and reloads are real. Its CPU
layouts are replaced: dense layers stay as they are, as on a GPU, and experts get the layout of one of its GPU kernels.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout import worker_extension
from tests.ports import server_port
from tests.unit.trainer.engines.kept_weights import stream_of
from tests.unit.trainer.engines.reloaded_weights import vllm_model, worker_of

Layout = Callable[[Tensor], Tensor]


def swapped(weight: Tensor) -> Tensor:
    """Exchange an expert's two first matrices, as vLLM does for FlashInfer's CUTLASS kernel."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def doubled(weight: Tensor) -> Tensor:
    """Change numbers, as none of vLLM's layouts does."""
    return 2 * weight


@contextmanager
def experts_in(layout: Layout) -> Iterator[None]:
    """Replace what vLLM does after loading on the CPU."""

    def process(self: Any, layer: Any) -> None:
        layer.w13_weight.data.copy_(layout(layer.w13_weight.data.clone()))

    def nothing(self: Any, layer: Any) -> None:
        pass

    with ExitStack() as stack:
        for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            stack.enter_context(patch.object(method, "process_weights_after_loading", nothing))
        stack.enter_context(patch.object(UnquantizedFusedMoEMethod, "process_weights_after_loading", process))
        yield


@contextmanager
def changed_latent_attention() -> Iterator[None]:
    """Let vLLM change a number of the matrices that it computes for latent attention."""
    process = MLAAttention.process_weights_after_loading

    def changing(self: Any, act_dtype: torch.dtype) -> None:
        process(self, act_dtype)
        # They may be views of the layer that they come from.
        self.W_UV = torch.nn.Parameter(self.W_UV + 1, requires_grad=False)

    with patch.object(MLAAttention, "process_weights_after_loading", changing):
        yield


def outcome(worker: Any, weights: dict[str, Tensor], *, is_partial: bool = False) -> bool | str:
    """Push weights; return whether they were read back, or the refusal."""
    try:
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            is_read_back: bool = worker._ppojob_load(7, stream_of(weights, is_partial=is_partial))[0]
            return is_read_back
    except WeightSyncError as error:
        return str(error)


def compared(path: str) -> dict[str, Any]:
    weights = {name: tensor.float() for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    negated = {name: -tensor for name, tensor in weights.items()}
    attention = {name: -tensor for name, tensor in weights.items() if ".self_attn." in name}
    found: dict[str, Any] = {}
    with experts_in(swapped):
        worker = worker_of(*vllm_model(path))
        # The weights are on the CPU.
        worker.device = torch.device("cuda")
        for name, pushed, is_partial in (
            ("first", weights, False),
            ("others", negated, False),
            ("partial", {name: -tensor for name, tensor in attention.items()}, True),
        ):
            found[name] = outcome(worker, pushed, is_partial=is_partial)
        with experts_in(doubled):
            found["changed"] = outcome(worker, weights)
        with changed_latent_attention():
            found["latent attention"] = outcome(worker, negated)
        found["after it"] = outcome(worker, weights)
    with experts_in(doubled):
        worker = worker_of(*vllm_model(path))
        worker.device = torch.device("cuda")
        records = BufferingHandler(capacity=100)
        worker_extension.logger.addHandler(records)
        found["changing layout"] = [outcome(worker, pushed) for pushed in (weights, negated)]
        worker_extension.logger.removeHandler(records)
        found["warnings"] = [record.getMessage() for record in records.buffer]
    return found


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.WARNING)
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{server_port()}", 0, "gloo")
    sys.stdout.write("FOUND " + json.dumps({path: compared(path) for path in sys.argv[1:]}) + "\n")


if __name__ == "__main__":
    main()
