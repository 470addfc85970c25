"""Trains one step and pushes weights to a real vLLM engine that rounds them; prints what was seen as JSON.

`separate_process.seen_by` runs it with the arguments MODEL DEVICE BACKEND LEARNING_RATE. On CUDA, the engine has all of
its defaults: compiled layers, CUDA graphs, and the sleep that discards weights. On the CPU, vLLM multiplies the same
rounded numbers with another kernel. See test_quantized_rollout.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from ppojob_api.v1alpha1.algorithm import RolloutCorrection
from ppojob_api.v1alpha1.rollout import Quantization
from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.rollout.options import RolloutOptions, environment
from tests.integration.trainer.separate_process import VISIBLE_GPUS, gpu, print_seen
from tests.integration.trainer.vllm_agreement import (
    LIMIT_SECONDS,
    NUM_PROMPTS,
    chat_prompts,
    generate,
    make_trainer,
    probs_diff,
    renewed,
    responses_of,
    share_of_equal,
    train_once,
)

EXTENSION = "tests.integration.trainer.format_extension.FormatExtension"


async def scenario(path: str, options: RolloutOptions, backend: str, learning_rate: float) -> dict[str, Any]:
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    engine, started = RolloutEngine(options), time.perf_counter()
    await engine.start()
    seen: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    (seen["bytes_at_start"],) = await engine._workers("ppojob_bytes_by_format")
    # vLLM's child process has its GPU now; the trainer takes the first.
    os.environ[VISIBLE_GPUS] = gpu(0)
    learning = {"learning_rate": learning_rate, "correction": RolloutCorrection()}
    trainer, prompts = make_trainer(path, options.device, backend, "bfloat16", **learning), chat_prompts(path)
    order = list(range(NUM_PROMPTS))
    first = await generate(engine, prompts, order)
    seen["diff_at_start"] = probs_diff(trainer, first)

    (link,) = trainer.sender.listen()
    await asyncio.gather(asyncio.to_thread(trainer.sender.prepare), engine.connect_weights([(link, 1)]))
    seen["push_seconds"], seen["first_is_read_back"] = await renewed(trainer, engine, 1)
    after_equal = await generate(engine, prompts, order)
    seen["equal_with_equal_weights"] = share_of_equal(responses_of(first), responses_of(after_equal))

    seen |= train_once(trainer, first)
    seen["diff_of_stale_weights"] = probs_diff(trainer, await generate(engine, prompts, order))
    seen["second_push_seconds"], seen["second_is_read_back"] = await renewed(trainer, engine, 2)
    after_push = await generate(engine, prompts, order)
    seen["diff_after_push"] = probs_diff(trainer, after_push)
    seen["equal_with_other_weights"] = share_of_equal(responses_of(first), responses_of(after_push))
    (seen["bytes_at_end"],) = await engine._workers("ppojob_bytes_by_format")
    seen["weights_version"] = engine.weights_version
    trainer.sender.close()
    await engine.shutdown()
    trainer.policy.parallel.destroy()
    return seen


def main() -> None:
    path, device, backend, learning_rate = sys.argv[1], Device(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    is_cuda = device is Device.CUDA
    options = RolloutOptions(
        path=path,
        device=device,
        max_model_len=128,
        # vLLM computes each sequence alone: beside others it rounds otherwise, and FP8 turns that into other tokens.
        max_num_seqs=1,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        sleeps=is_cuda and backend == "cuda_ipc",
        timeout_seconds=LIMIT_SECONDS,
        quantization=Quantization.FP8,
        engine_args={"worker_extension_cls": EXTENSION},
    )
    os.environ.update(environment(options, num_threads=2))
    if is_cuda:
        os.environ[VISIBLE_GPUS] = gpu(1 if backend == "nccl" else 0)
    seen = asyncio.run(scenario(path, options, backend, learning_rate))
    print_seen(seen)


if __name__ == "__main__":
    main()
