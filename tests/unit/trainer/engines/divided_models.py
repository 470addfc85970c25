"""One of two ranks of an engine that load weights into vLLM's own models; prints what it has seen as JSON.

`python -m tests.unit.trainer.engines.divided_models RANK PORT KIND:FOLDER ...`. KIND is `slices`, `experts` or
`stages`: whether the ranks divide each layer with its experts, each layer but for whole experts, or the layers. Models,
loaders and groups are vLLM's. The models are not processed after loading, as on CUDA: on the CPU, vLLM would pack them.
Only those that are reloaded are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.loader_reads import LoaderReads
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension
from ppojob_trainer.engines.weights.boxes import Box, inside
from ppojob_trainer.engines.weights.receipts import UNREAD, Receipt
from ppojob_trainer.engines.weights.receiver import WeightReceiver
from tests.unit.trainer.engines.compared_reloads import experts_in, swapped
from tests.unit.trainer.engines.kept_weights import stream_of
from tests.unit.trainer.engines.reloaded_weights import worker_of as reloading_worker

SIZE = 2
EXPERTS, STAGES = "experts", "stages"
FUSED = "_proj_bias"
"""End of the names of gpt-oss's fused experts, which a push brings as they are."""


def weights_of(path: str, kind: str) -> dict[str, Tensor]:
    """Return the weights as the trainer sends them: tied ones once, and each of whole experts by itself."""
    if kind in (EXPERTS, STAGES):
        return load_file(Path(path) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def divided(path: str, kind: str, *, is_loaded: bool = False) -> tuple[VllmConfig, nn.Module]:
    """Return this rank's part of vLLM's model, without weights, or read from disk and processed."""
    tensor, pipeline = (1, SIZE) if kind == STAGES else (SIZE, 1)
    config = EngineArgs(
        model=path,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        enable_expert_parallel=kind == EXPERTS,
        distributed_executor_backend="mp",
        # As in `engines.rollout.options`; models without latent attention ignore it.
        attention_backend=AttentionBackendEnum.CPU_MLA,
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        # By the address of a model, which may be that of an earlier one that is gone.
        _model_to_pp_missing_layer_names.clear()
        # vLLM makes the experts' group only for a model with experts.
        destroy_model_parallel()
        initialize_model_parallel(tensor, pipeline)
        return config, get_model(vllm_config=config) if is_loaded else initialize_model(config)


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


def parts_of(weights: dict[str, Tensor], boxes: dict[str, tuple[Box, ...]]) -> dict[str, Tensor]:
    """Return the weights with NaN outside of the boxes; one without a box has one number in memory."""
    one = torch.full((), torch.nan, dtype=torch.bfloat16)
    parts = {
        name: torch.full_like(tensor, torch.nan) if boxes[name] else one.expand(tensor.shape)
        for name, tensor in weights.items()
    }
    for name, part in parts.items():
        for box in boxes[name]:
            inside(part, box).copy_(inside(weights[name], box))
    return parts


def are_same_from_boxes(model: nn.Module, weights: dict[str, Tensor], boxes: dict[str, tuple[Box, ...]]) -> bool:
    """Whether the boxes alone give the parameters that the model has."""
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.zero_()
    model.load_weights(parts_of(weights, boxes).items())  # type: ignore[operator]
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


def unread_by(worker: WeightReceiverExtension, weights: dict[str, Tensor]) -> list[str]:
    """Receive weights as from the trainer; return the names that the worker reports as not read."""
    stream = stream_of(weights)
    vars(stream)["receipt"] = lambda: Receipt(7, len(weights), 8, (1,))
    receiver = SimpleNamespace(begin=lambda version, keeps_weights: stream, ask_for=lambda boxes: None)
    worker.ppojob_receiver = cast(WeightReceiver, receiver)
    unread: list[str] = worker.ppojob_receive_weights(7, True)[UNREAD]
    return unread


def without_last_expert(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without a matrix of the last expert, which the second rank has."""
    last = max(name for name in weights if ".mlp.experts." in name or ".block_sparse_moe.experts." in name)
    return {name: tensor for name, tensor in weights.items() if name != last}


def reloaded(path: str, kind: str, boxes: dict[str, tuple[Box, ...]]) -> dict[str, Any]:
    """Reload weights into this rank's part by vLLM's own means, as on CUDA: whole ones, boxes of them, too few ones.

    Returns for each push the refusal, or the parameters that differ from those read from disk, and the maps of experts
    that differ or are at another address: CUDA graphs read them there.
    """
    config, model = divided(path, kind, is_loaded=True)
    from_disk = {name: parameter.clone() for name, parameter in model.named_parameters()}
    weights = weights_of(path, kind)
    maps = {name: one for name, one in model.named_buffers() if name.endswith("_expert_map")}
    assert bool(maps) is (kind == EXPERTS), "the experts are divided"
    before = {name: (one.data_ptr(), one.tolist()) for name, one in maps.items()}

    worker = reloading_worker(config, model)
    found: dict[str, Any] = {}
    for name, pushed in (
        ("negated", negated(weights)),
        ("boxes", parts_of(weights, boxes)),
        ("too few", without_last_expert(weights)),
        ("whole", weights),
    ):
        said = outcome(worker, pushed.items())
        now = dict(model.named_parameters())
        changed = [each for each, tensor in from_disk.items() if not torch.equal(tensor, now[each])]
        buffers = dict(model.named_buffers())
        changed += [
            each for each, is_now in before.items() if is_now != (buffers[each].data_ptr(), buffers[each].tolist())
        ]
        found[name] = said or changed
    return found


def compared(path: str, kind: str) -> list[bool | str]:
    """Reload weights twice as on a GPU, with experts in the layout of a kernel; return whether they were read back."""
    with experts_in(swapped):
        config, model = divided(path, kind, is_loaded=True)
        worker = reloading_worker(config, model)
        # The weights are on the CPU.
        worker.device = torch.device("cuda")
        weights = weights_of(path, kind)
        return [outcome(worker, pushed.items()) for pushed in (weights, negated(weights))]


@torch.no_grad()
def seen_with(kind: str, path: str) -> dict[str, Any]:
    config, model = divided(path, kind)
    weights = weights_of(path, kind)
    with set_current_vllm_config(config):
        with LoaderReads() as reads:
            model.load_weights(reads.passing(weights.items()))  # type: ignore[operator]
        worker = worker_of(config, model)
        others = negated(weights)
        stale = next(name for name in weights if "o_proj" in name)
        attention = {name: tensor for name, tensor in weights.items() if ".self_attn." in name}
        more = {"unread": unread_by(worker_of(config, model), weights)}
        if any(".experts.0." in name or name.endswith(FUSED) for name in weights):
            more |= {
                "too few": outcome(worker_of(config, model), without_last_expert(weights).items()),
                "reloaded": reloaded(path, kind, reads.boxes()),
                "compared": compared(path, kind),
            }
        return {
            **more,
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
    rank, port, *given_models = sys.argv[1:]
    torch.set_num_threads(1)
    # vLLM's name of the memory that the ranks share.
    os.environ["VLLM_DIST_IDENT"] = f"ppojob-{port}"
    init_distributed_environment(SIZE, int(rank), f"tcp://127.0.0.1:{port}", 0, "gloo")
    sys.stdout.write("FOUND " + json.dumps([seen_with(*given.split(":")) for given in given_models]) + "\n")


if __name__ == "__main__":
    main()
