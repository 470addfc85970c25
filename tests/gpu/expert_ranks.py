"""One of two ranks: trains a random mixture with and without divided experts, and writes what it saw as JSON.

`python -m tests.gpu.expert_ranks RANK DEVICE MODEL STARVED OUT PORT...`, a port for each layout; CUDA_VISIBLE_DEVICES
names the GPU. MODEL and STARVED are folders; the routers of STARVED choose among the first half of the experts.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.gpu.one_layout import in_layout
from tests.unit.trainer.engines.fsdp_engines import policy_engine

VOCABULARY, NUM_SEQUENCES = 512, 8
SHAPES: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "CUDA": ({"hidden_size": 1024, "num_hidden_layers": 4, "num_experts": 64, "moe_intermediate_size": 512}, 1024),
    "CPU": ({"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32}, 32),
}
"""By device: the model's shape, and the longest response."""
LAYOUTS: Final = {
    f"{name}{'' if model == 'model' else f', {model}'}": (dims, dtype, model)
    for model in ("model", "starved")
    for name, dims, dtype in (
        ("FSDP 2", ParallelDims(shard=2), torch.bfloat16),
        ("expert 2", ParallelDims(shard=2, expert=2), torch.bfloat16),
        ("float32", ParallelDims(shard=2), torch.float32),
    )
}


def write_model(folder: Path, device: str, *, is_starved: bool) -> Path:
    """Write a mixture with random weights. Starved: routers choose among the first half of the experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape, _ = SHAPES[device]
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": shape["hidden_size"] // 8}
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, num_experts_per_tok=4, initializer_range=0.1, norm_topk_prob=True, **heads, **shape
    )
    model = Qwen3MoeForCausalLM(config).bfloat16()
    half = shape["num_experts"] // 2
    for name, weight in model.named_parameters():
        if is_starved and name.endswith("mlp.gate.weight"):
            with torch.no_grad():
                # Each direction and its opposite: whatever a token is, half of them are above 0.
                weight[half // 2 : half], weight[half:] = -weight[: half // 2], 0
    model.save_pretrained(folder)
    return folder


def make_batch(response: int) -> DataProto:
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    tensors = rollout_batch(
        [tokens(16) for _ in range(NUM_SEQUENCES)], [tokens(response - row) for row in range(NUM_SEQUENCES)]
    )
    mask = tensors[Keys.RESPONSE_MASK]
    tensors[Keys.ADVANTAGES] = mask.unpadded(torch.randn(mask.padded().shape, generator=generator))
    meta = {"temperature": 1.0, "num_mini_batches": 1, "epochs": 1, "response_length": response}
    return DataProto.from_dict(tensors, meta_info=meta)


def run(parallel: ParallelMesh, model: Path, dtype: torch.dtype, batch: DataProto) -> dict[str, Any]:
    training, algorithm = ActorSpec(learning_rate=1e-5, max_tokens_per_gpu=4096), AlgorithmSpec()
    engine = policy_engine(parallel, ActorModel(path=str(model)), training, algorithm, total_steps=10, dtype=dtype)
    is_cuda = parallel.device.type == "cuda"
    batch = batch.with_fields(engine.forward(batch).columns)
    log_probs = batch.ragged(Keys.OLD_LOG_PROBS).values.tolist()
    if dtype is torch.float32:
        # A reference on the processor, whose updates would take a minute.
        return {"log_probs": log_probs}
    first = engine.update(batch)
    # Rounding moves log-probs by up to 0.3, and a token with a clipped ratio has no gradient: with the earlier old
    # log-probs, the second norm would depend on which tokens rounding moves over the limit.
    batch = batch.with_fields(engine.forward(batch).columns)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    second = engine.update(batch)
    return {
        # The update ends with the host's wait for its norms.
        "seconds": time.perf_counter() - started,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0.0,
        "grad_norms": [first["actor/grad_norm"], second["actor/grad_norm"]],
        "imbalance": first["actor/expert_imbalance/mean"],
        "weights": sum(float(tensor.double().abs().sum()) for tensor in engine.weights().gather()),
        "log_probs": log_probs,
    }


def main() -> None:
    rank, device, out, ports = int(sys.argv[1]), Device(sys.argv[2]), Path(sys.argv[5]), sys.argv[6:]
    models = {"model": Path(sys.argv[3]), "starved": Path(sys.argv[4])}
    batch = make_batch(SHAPES[device.value][1])[[2 * row + rank for row in range(NUM_SEQUENCES // 2)]]
    found: dict[str, Any] = {}
    for (name, (dims, dtype, model)), port in zip(LAYOUTS.items(), ports, strict=True):
        compute = partial(run, model=models[model], dtype=dtype, batch=batch)
        # Attention on GPUs has no float32.
        found[name] = in_layout(Device.CPU if dtype is torch.float32 else device, rank, dims, int(port), compute)
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
