"""Generation alone: the engine of a job's rollout, with nothing around it.

    python -m tests.bench.generation job.yaml seconds.json --prompts 256 --batches 6

It is `RolloutEngine` with the rollout's options, sampling, environment and threads, without Ray, trainer and other
replicas. `bench_split` starts it as a process of its own and compares the median of the batches' seconds, which it
writes, with the rollout's. The difference is what surrounds the engine in a step: the calls, the streaming of finished
responses, and the company on the GPU and on the host's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import yaml

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.rollout.options import RolloutOptions, SamplingOptions
from ppojob_trainer.worker_groups.roles.rollout import rollout_environment
from ppojob_trainer.worker_groups.worker_process import num_threads
from tests.bench.measurement import spec_of

WARM_UP_BATCHES = 2
RUN_LIMIT_S = 600.0


def measure_alone(job: Path, num_prompts: int, num_batches: int, folder: Path) -> float:
    """Return the median seconds of a batch, after the warm-up; log and seconds go to `folder`.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, result = folder / "log.txt", folder / "seconds.json"
    wanted = ["--prompts", str(num_prompts), "--batches", str(WARM_UP_BATCHES + num_batches)]
    command = [sys.executable, "-m", "tests.bench.generation", str(job), str(result), *wanted]
    surroundings = {**os.environ, **_environment(_spec(job))}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=surroundings, timeout=RUN_LIMIT_S, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"the engine alone ended with {done.returncode}: see {log}\n{log.read_text()[-3000:]}")
    seconds = json.loads(result.read_text(encoding="utf-8"))
    return statistics.median(seconds[WARM_UP_BATCHES:])


def main() -> None:
    """Generate, and write the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--prompts", type=int, required=True, help="of a batch, as a replica gets them")
    parser.add_argument("--batches", type=int, default=6)
    arguments = parser.parse_args()
    seconds = asyncio.run(_generate(_spec(arguments.job), arguments.prompts, arguments.batches))
    arguments.result.write_text(json.dumps(seconds), encoding="utf-8")


def _spec(job: Path) -> PPOJobSpec:
    return spec_of(yaml.safe_load(job.read_text(encoding="utf-8")))


def _pool(spec: PPOJobSpec) -> str:
    return spec.placement.rollout_pools[0]


def _environment(spec: PPOJobSpec) -> dict[str, str]:
    """Return what a replica's process has, its threads included."""
    replicas = spec.pool(_pool(spec)).gpus // spec.rollout.tensor_parallel_size
    threads = num_threads(replicas, has_gpu=spec.device is Device.CUDA)
    return rollout_environment(spec, _pool(spec)) | {"OMP_NUM_THREADS": str(threads)}


async def _generate(spec: PPOJobSpec, num_prompts: int, num_batches: int) -> list[float]:
    # vLLM must find its environment set.
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    prompts = _prompts(spec)
    sampling = SamplingOptions.training(spec)
    engine = RolloutEngine(RolloutOptions.from_spec(spec, _pool(spec)))
    await engine.start()
    seconds = []
    try:
        for batch in range(num_batches):
            numbers = range(batch * num_prompts, (batch + 1) * num_prompts)
            chosen = [prompts[number % len(prompts)] for number in numbers]
            started = time.perf_counter()
            await engine.generate(chosen, list(numbers), sampling)
            seconds.append(time.perf_counter() - started)
            # As after each step's weights.
            await engine.reset_prefix_cache()
    finally:
        await engine.shutdown()
    return seconds


def _prompts(spec: PPOJobSpec) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.model.actor.path)
    files = spec.data.train.files
    assert files is not None, "the workload is of files"
    rows = [json.loads(line) for path in files.paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [
        list(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False))
        for row in rows
    ]


if __name__ == "__main__":
    main()
