"""One of several processes with a GPU each: trains a random model in several layouts and writes what it saw as JSON.

`python -m tests.gpu.parallel_ranks RANK MODEL OUT LAYOUT=PORT...`. CUDA_VISIBLE_DEVICES names the GPU.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

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

VOCABULARY, HIDDEN = 151_936, 896
NUM_SEQUENCES, PROMPT, RESPONSE = 8, 256, 3840
MAX_TOKENS_PER_GPU = 16_384
LAYOUTS = {
    "one GPU": (ParallelDims(), {}),
    "data 2": (ParallelDims(shard=2), {}),
    "replicate 2": (ParallelDims(replicate=2), {}),
    "sequence 2": (ParallelDims(sequence=2), {}),
    "sequence 2, compiled": (ParallelDims(sequence=2), {"compile": True}),
    "context 2": (ParallelDims(context=2), {}),
    "context 2, compiled": (ParallelDims(context=2), {"compile": True}),
    "tensor 2": (ParallelDims(tensor=2), {}),
    "tensor 2, compiled": (ParallelDims(tensor=2), {"compile": True}),
    "pipeline 2": (ParallelDims(pipeline=2), {}),
    "pipeline 2, compiled": (ParallelDims(pipeline=2), {"compile": True}),
}

OF_FOUR_GPUS = {
    "sequence 2 x context 2": (ParallelDims(sequence=2, context=2), {}),
    "sequence 2 x context 2, compiled": (ParallelDims(sequence=2, context=2), {"compile": True}),
    "context 2 x tensor 2": (ParallelDims(context=2, tensor=2), {}),
}


def write_model(folder: Path) -> Path:
    """Write a model of Qwen2-0.5B's shape with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return folder


def make_batch() -> DataProto:
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    prompts = [tokens(PROMPT) for _ in range(NUM_SEQUENCES)]
    responses = [tokens(RESPONSE - 100 * row) for row in range(NUM_SEQUENCES)]
    tensors = rollout_batch(prompts, responses)
    mask = tensors[Keys.RESPONSE_MASK]
    tensors[Keys.ADVANTAGES] = mask.unpadded(torch.randn(mask.padded().shape, generator=generator))
    meta = {"temperature": 1.0, "num_mini_batches": 1, "epochs": 1, "response_length": RESPONSE}
    return DataProto.from_dict(tensors, meta_info=meta)


def run(parallel: ParallelMesh, model: Path, batch: DataProto, options: dict[str, Any]) -> dict[str, Any]:
    training = ActorSpec(learning_rate=1e-5, max_tokens_per_gpu=MAX_TOKENS_PER_GPU)
    actor = ActorModel(path=str(model), **options)
    engine = policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=10)
    batch = batch.with_fields(engine.forward(batch).columns)
    grad_norm = engine.update(batch)["actor/grad_norm"]
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    metrics = engine.update(batch)
    torch.cuda.synchronize()
    weights = sum(float(tensor.double().sum()) for tensor in engine.weights().gather())
    return {
        "seconds": time.perf_counter() - started,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "grad_norm": grad_norm,
        "pg_loss": metrics["actor/pg_loss"],
        "mfu": metrics["perf/mfu/actor"],
        "weights": weights,
        "log_probs": batch.ragged(Keys.OLD_LOG_PROBS).rows()[0][:512].tolist(),
    }


def shard_of(batch: DataProto, number: int, num_shards: int) -> DataProto:
    return batch.split(len(batch) // num_shards)[number]


def main() -> None:
    rank, model, out = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    found: dict[str, Any] = {}
    for name, port in (argument.rsplit("=", 1) for argument in sys.argv[4:]):
        dims, options = (LAYOUTS | OF_FOUR_GPUS)[name]
        if rank >= dims.world_size:
            continue
        shard = shard_of(make_batch(), dims.shard_of(rank), dims.num_shards)
        work = partial(run, model=model, batch=shard, options=options)
        started = time.perf_counter()
        found[name] = in_layout(Device.CUDA, rank, dims, int(port), work)
        # The last line says which layout did not end.
        print(f"rank {rank}: {name} took {time.perf_counter() - started:.0f} s", flush=True)
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
