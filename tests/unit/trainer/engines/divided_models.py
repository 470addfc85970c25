"""One of two tensor-parallel ranks that load weights into vLLM's own models; prints what it has seen as JSON.

`python -m tests.unit.trainer.engines.divided_models RANK PORT FOLDER ...`. Models, loaders and groups are vLLM's. The
models are not processed after loading, as on CUDA: on the CPU, vLLM would pack them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.loader_reads import LoaderReads
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension
from ppojob_trainer.engines.weights.boxes import Box, inside
from tests.unit.trainer.engines.kept_weights import stream_of

SIZE = 2


def weights_of(path: str) -> dict[str, Tensor]:
    """Return the weights as the trainer sends them: tied ones once."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def divided(path: str) -> tuple[VllmConfig, nn.Module]:
    """Return this rank's part of vLLM's model, without weights."""
    config = EngineArgs(
        model=path,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=SIZE,
        distributed_executor_backend="mp",
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        # vLLM makes the experts' group only for a model with experts.
        destroy_model_parallel()
        initialize_model_parallel(SIZE)
        return config, initialize_model(config)


class CopyingWorker(WeightReceiverExtension):
    """Copies weights into every model, also into those whose experts vLLM would change after loading."""

    def _ppojob_copies(self, model: nn.Module) -> bool:
        return True


def worker_of(config: VllmConfig, model: nn.Module) -> WeightReceiverExtension:
    worker = CopyingWorker()
    worker.vllm_config, worker.device = config, torch.device("cpu")
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    return worker


def outcome(
    worker: WeightReceiverExtension, weights: Iterable[tuple[str, Tensor]], *, is_partial: bool = False
) -> bool | str:
    """Copy weights in; return whether they were read back, or the refusal."""
    try:
        return worker._ppojob_load(7, stream_of(dict(weights), is_partial=is_partial))[0]
    except WeightSyncError as error:
        return str(error)


def are_same_from_boxes(model: nn.Module, weights: dict[str, Tensor], boxes: dict[str, tuple[Box, ...]]) -> bool:
    """Whether weights that have NaN outside of the boxes give the parameters that the model has."""
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.zero_()
    parts = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    for name, part in parts.items():
        for box in boxes[name]:
            inside(part, box).copy_(inside(weights[name], box))
    model.load_weights(parts.items())  # type: ignore[operator]
    return all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


class Changing(nn.Module):
    """The model, with a loader that changes one bit at its end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(weights)  # type: ignore[operator]
        first = next(self.model.parameters())
        first.detach().view(torch.int16)[0, 0] ^= 1


def negated(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: -tensor for name, tensor in weights.items()}


@torch.no_grad()
def seen_with(path: str) -> dict[str, Any]:
    config, model = divided(path)
    weights = weights_of(path)
    with set_current_vllm_config(config):
        with LoaderReads() as reads:
            model.load_weights(reads.passing(weights.items()))  # type: ignore[operator]
        worker = worker_of(config, model)
        others = negated(weights)
        stale = next(name for name in weights if "o_proj" in name)
        attention = {name: tensor for name, tensor in weights.items() if ".self_attn." in name}
        return {
            "are_exact": reads.are_exact(model),
            "boxes": reads.boxes(),
            "from_boxes": are_same_from_boxes(model, weights, reads.boxes()),
            "others": outcome(worker, others.items()),
            "partial": outcome(worker, attention.items(), is_partial=True),
            "stale in a partial one": outcome(
                worker, [(n, -t) for n, t in attention.items() if n != stale], is_partial=True
            ),
            "partial without a complete one": outcome(worker_of(config, model), attention.items(), is_partial=True),
            "stale": outcome(worker, [pair for pair in weights.items() if pair[0] != stale]),
            "changed": outcome(worker_of(config, Changing(model)), weights.items()),
        }


def main() -> None:
    rank, port, *paths = sys.argv[1:]
    torch.set_num_threads(1)
    # vLLM's name of the memory that the ranks share.
    os.environ["VLLM_DIST_IDENT"] = f"ppojob-{port}"
    init_distributed_environment(SIZE, int(rank), f"tcp://127.0.0.1:{port}", 0, "gloo")
    sys.stdout.write("FOUND " + json.dumps([seen_with(path) for path in paths]) + "\n")


if __name__ == "__main__":
    main()
