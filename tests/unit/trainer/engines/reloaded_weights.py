"""Reloads weights into vLLM's own model. A separate process, because an import of vLLM changes much.

`python -m tests.unit.trainer.engines.reloaded_weights FOLDER ...`. A folder has a model in the form of the hub, which
vLLM reads. Prints for each kind of push what the check said, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension
from tests.ports import server_port

PASSED = "passed"
OTHERS = "others"
BROKEN = "broken off"
ATTENTION, ATTENTION_AGAIN, QUERIES = "attention alone", "attention again", "queries alone"
PARTIAL = (ATTENTION, ATTENTION_AGAIN, QUERIES)
NUM_TOKENS = 20
# vLLM does not count them, and leaves them where they are.
UNCOUNTED = ("e_score_correction_bias", "sinks")


def pushes(path: str) -> dict[str, list[tuple[str, Tensor]]]:
    """Return the kinds of pushes, by name: the weights as the trainer has them, others, and some of them only."""
    # By the names of the hub, as the trainer sends them. Tied parameters come once.
    sent = [(name, tensor.float()) for name, tensor in load_file(Path(path) / "model.safetensors").items()]
    return {
        "all": sent,
        OTHERS: [(name, -tensor) for name, tensor in sent],
        "nothing": [],
        "no experts": [(name, tensor) for name, tensor in sent if ".experts." not in name],
        "half of the experts": [(name, tensor) for name, tensor in sent if not is_second_matrix(name)],
        "no attention": [(name, tensor) for name, tensor in sent if "self_attn.o_proj" not in name],
        "nothing uncounted": [(name, tensor) for name, tensor in sent if not name.endswith(UNCOUNTED)],
        "all again": sent,
        # Each layer of several tensors gets some of them, and those are wrong.
        BROKEN: [(name, -tensor) for name, tensor in sent[::2]],
        "all after a broken one": sent,
        # Some loaders raise another error for it, in the middle of the push.
        "a name too many": [*sent, ("model.layers.0.mlp.extra_bias", torch.ones(3))],
        "all at last": sent,
        ATTENTION: [(name, -tensor) for name, tensor in sent if ".self_attn." in name],
        ATTENTION_AGAIN: [(name, tensor) for name, tensor in sent if ".self_attn." in name],
        # vLLM fuses them with others.
        QUERIES: [(name, tensor) for name, tensor in sent if ".self_attn.q" in name],
        "all after a partial one": sent,
    }


def breaking_off(weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, and then fail as a push does whose sender exited."""
    yield from weights
    raise WeightSyncError(BROKEN)


def is_second_matrix(name: str) -> bool:
    """Whether a tensor is an expert's second matrix."""
    return ".experts." in name and (".down_proj" in name or ".w2." in name)


def worker_of(config: VllmConfig, model: nn.Module) -> WeightReceiverExtension:
    """Return the extension on a worker that has this model and nothing else."""
    worker = WeightReceiverExtension()
    worker.vllm_config, worker.device = config, torch.device("cpu")

    def reload(weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        reload_weights(config, model, weights_iterator, None, True)

    worker.model_runner = SimpleNamespace(get_model=lambda: model, reload_weights=reload)
    return worker


def outcome(worker: WeightReceiverExtension, weights: Iterator[tuple[str, Tensor]], *, is_partial: bool) -> str:
    try:
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            worker._ppojob_reload(7, weights, is_partial=is_partial)
    except (WeightSyncError, ValueError, KeyError) as error:
        return str(error)
    return PASSED


def changed(model: Any, before: dict[str, Tensor]) -> list[str]:
    now = dict(model.named_parameters())
    return sorted(name for name, tensor in before.items() if not torch.equal(tensor, now[name]))


def vllm_model(path: str) -> tuple[VllmConfig, nn.Module]:
    """Return vLLM's model, read from disk, and its configuration."""
    config = EngineArgs(
        model=path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        # As in `engines.rollout.options`: the other backend of a CPU refuses float32.
        attention_backend=AttentionBackendEnum.CPU_MLA,
    ).create_engine_config()
    with set_current_vllm_config(config):
        # vLLM makes the experts' group only for a model with experts.
        destroy_model_parallel()
        initialize_model_parallel()
        return config, get_model(vllm_config=config)


def reloaded(path: str) -> dict[str, Any]:
    """Return the outcome of each push, and which of vLLM's parameters it left other than they are read from disk."""
    config, model = vllm_model(path)
    from_disk = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    computed_from_disk = linear_outputs(config, model)
    worker = worker_of(config, model)
    found: dict[str, dict[str, Any]] = {}
    sent = pushes(path)["all"]
    for name, weights in pushes(path).items():
        arriving = breaking_off(weights) if name == BROKEN else iter(weights)
        found[name] = {"says": outcome(worker, arriving, is_partial=name in PARTIAL)}
        if found[name]["says"] == PASSED:
            found[name]["changed"] = changed(model, from_disk)
            found[name]["signs"] = signs(computed_from_disk, linear_outputs(config, model))
            found[name]["apart"] = apart(config, model, path, is_negative=name == OTHERS)
            found[name]["head_apart"] = head_apart(config, model, dict(weights if name not in PARTIAL else sent))
    return found


@torch.no_grad()
def linear_outputs(config: VllmConfig, model: nn.Module) -> dict[str, Tensor]:
    """Return what each linear layer computes: on the CPU, vLLM packs their weights, and leaves empty parameters."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            inputs = torch.randn(NUM_TOKENS, layer.input_size, generator=torch.Generator().manual_seed(3))
            with set_current_vllm_config(config):
                found[name] = layer.quant_method.apply(layer, inputs, layer.bias)
    return found


def signs(before: dict[str, Tensor], now: dict[str, Tensor]) -> dict[str, int]:
    """Return for each layer 1 if it computes the same as before, -1 if the negative of it, and 0 otherwise."""
    equal = {name: torch.allclose(now[name], tensor, atol=1e-6) for name, tensor in before.items()}
    negative = {name: torch.allclose(now[name], -tensor, atol=1e-6) for name, tensor in before.items()}
    return {name: equal[name] - negative[name] for name in before}


@torch.no_grad()
def apart(config: VllmConfig, model: Any, path: str, *, is_negative: bool) -> float | None:
    """Return how far vLLM's layers with experts compute from transformers' own, as a share; None without experts."""
    if not any(".experts." in name for name, _ in model.named_parameters()):
        # Of some of the others, vLLM changes transformers' classes.
        return None
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if is_negative:
        for tensor in theirs.state_dict().values():
            tensor.neg_()
    inputs = torch.randn(NUM_TOKENS, theirs.config.hidden_size, generator=torch.Generator().manual_seed(3))
    shares = []
    for mine, other in zip(model.model.layers, theirs.model.layers, strict=True):
        if hasattr(other.mlp, "experts"):
            with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=NUM_TOKENS):
                computed = (mine.block_sparse_moe if hasattr(mine, "block_sparse_moe") else mine.mlp)(inputs.clone())
            transformed = other.mlp(inputs.unsqueeze(0))
            expected = (transformed[0] if isinstance(transformed, tuple) else transformed).squeeze(0)
            shares.append(float((computed - expected).norm() / expected.norm()))
    return max(shares)


@torch.no_grad()
def head_apart(config: VllmConfig, model: Any, weights: dict[str, Tensor]) -> float:
    """Return how far the logits of vLLM's head are from those of the pushed weights, as a share."""
    # Tied weights have the embedding's name.
    head = weights.get("lm_head.weight", weights.get("model.embed_tokens.weight"))
    assert head is not None
    inputs = torch.randn(NUM_TOKENS, head.shape[1], generator=torch.Generator().manual_seed(3))
    with set_current_vllm_config(config):
        # Gemma 2 has no other head than its embedding.
        layer = model.lm_head if hasattr(model, "lm_head") else model.model.embed_tokens
        computed = layer.quant_method.apply(layer, inputs)[:, : head.shape[0]]
    expected = inputs @ head.float().T
    return float((computed - expected).norm() / expected.norm())


def main() -> None:
    torch.set_num_threads(1)
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{server_port()}", 0, "gloo")
    found = {path: reloaded(path) for path in sys.argv[1:]}
    sys.stdout.write("FOUND " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
