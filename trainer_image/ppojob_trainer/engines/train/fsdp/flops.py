"""How much of the accelerator's arithmetic an update used: model FLOPs utilization (Chowdhery et al. 2022, PaLM, B).

    mfu = (6 * N * tokens + 6 * O * policy tokens + 6 * L * W * sum of length^2) / (seconds * ranks * peak)

N: the decoder layers' parameters that compute for a token: of a layer's experts num_experts_per_tok, and all shared
ones. O: the output layer's, which computes for the policy's tokens only (0 for a critic). L: layers, W: width of all
heads together (`attention_width`); attention takes 12 * L * W operations for each pair of tokens, half of which the
causal mask hides. Frozen weights, as with adapters, take 4 instead of 6: no gradient is computed for them. Embeddings
do no arithmetic, and recomputation by gradient checkpointing does not count. verl counts embeddings, and the output
layer for all tokens, so its figure is the higher one for small models. Called by the engine after an update; unknown
accelerators and the CPU get no figure.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from ppojob_trainer.engines.train.fsdp.experts import active_share
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import attention_width
from ppojob_trainer.engines.train.objectives import UpdateResult
from ppojob_trainer.engines.train.pipeline import PipelinePeers

# Dense bfloat16 operations per second, from NVIDIA's data sheets, by a part of the device's name.
PEAK_FLOPS: Final[dict[str, float]] = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def mfu(backbone: nn.Module, result: UpdateResult, parallel: ParallelMesh, num_outputs: int = 0) -> float | None:
    """Return the share of the peak that the update's model operations took, or None where no peak is known.

    Args:
        num_outputs: size of the vocabulary, 0 for a critic.
    """
    peak = peak_flops(parallel.device)
    if peak is None or result.seconds <= 0:
        return None
    flops = model_flops(backbone, result, num_outputs, parallel.pipeline)
    return flops / (result.seconds * parallel.world_size * peak)


def model_flops(
    backbone: nn.Module, result: UpdateResult, num_outputs: int, peers: PipelinePeers | None = None
) -> float:
    """Return the operations of forward and backward over all ranks; see the module's docstring.

    Args:
        peers: of a pipeline stage, which has some of the layers. Collective with them.
    """
    config: Any = backbone.config
    matrices = sum(
        _operations(parameter) * parameter.numel() * active_share(name, parameter.shape, config)
        for name, parameter in backbone.get_submodule("layers").named_parameters()
    )
    if peers is not None:
        matrices = float(peers.sum(torch.tensor(matrices, dtype=torch.float64)))
    attention = 6.0 * int(config.num_hidden_layers) * attention_width(config)
    # The output layer is trained, or frozen, with the embeddings.
    output = _operations(next(backbone.parameters())) * num_outputs * int(config.hidden_size)
    return matrices * result.num_tokens + output * result.num_policy_tokens + attention * result.num_token_pairs


def _operations(parameter: nn.Parameter) -> float:
    """Operations for each number of a matrix and each token: forward, gradient of the input, and of the matrix."""
    return 6.0 if parameter.requires_grad else 4.0


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak in bfloat16, or None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
