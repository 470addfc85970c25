"""How much of the accelerator's arithmetic an update used: model FLOPs utilization (Chowdhery et al. 2022, PaLM, B).

    mfu = (6 * N * tokens + 6 * L * H * D * sum over sequences of length^2) / (seconds * ranks * peak)

N: the decoder's matrix parameters (embeddings do no arithmetic; the output layer is left out, because it is computed
for response tokens only). L layers, H heads of size D: attention takes 12 * L * H * D operations for each pair of
tokens, half of which a causal mask hides. Recomputation by gradient checkpointing does not count, as usual. Called by
the engines after an update; unknown accelerators and the CPU get no figure.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from ppojob_trainer.engines.fsdp.mesh import DataParallel
from ppojob_trainer.engines.fsdp.update import UpdateResult

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


def mfu(backbone: nn.Module, result: UpdateResult, parallel: DataParallel) -> float | None:
    """Return the share of the peak that the update's model operations took, or None where no peak is known."""
    peak = peak_flops(parallel.device)
    if peak is None or result.seconds <= 0:
        return None
    return model_flops(backbone, result) / (result.seconds * parallel.world_size * peak)


def model_flops(backbone: nn.Module, result: UpdateResult) -> float:
    """Return the operations of forward and backward over all ranks; see the module's docstring."""
    config = backbone.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    matrices = sum(parameter.numel() for parameter in backbone.get_submodule("layers").parameters())
    return 6.0 * matrices * result.num_tokens + 6.0 * config.num_hidden_layers * width * result.num_token_pairs


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak in bfloat16, or None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
