"""Generation by vLLM alone: the same prompts, options and sampling as a job's rollout, with nothing of ours around it.

    python -m tests.bench.generation job.yaml --prompts 256 --batches 6

It is a process of its own, because vLLM wants its environment before it is imported. Prints one JSON object: the
seconds of each batch. `bench_split` starts it and compares the median with the rollout's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.engines.vllm.options import RolloutOptions, SamplingOptions, engine_arguments, environment

WARM_UP_BATCHES = 2
RUN_LIMIT_S = 600.0


def measure_alone(job: Path, num_prompts: int, num_batches: int, log: Path) -> float:
    """Return the median seconds of a batch, after the warm-up; runs this module in a process of its own.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    wanted = ["--prompts", str(num_prompts), "--batches", str(WARM_UP_BATCHES + num_batches)]
    command = [sys.executable, "-m", "tests.bench.generation", str(job), *wanted]
    with log.open("w", encoding="utf-8") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, timeout=RUN_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"vLLM alone ended with {done.returncode}: see {log}\n{log.read_text()[-3000:]}")
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return statistics.median(seconds[WARM_UP_BATCHES:])


def main() -> None:
    """Generate, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--prompts", type=int, required=True, help="of a batch, as a replica gets them")
    parser.add_argument("--batches", type=int, default=6)
    arguments = parser.parse_args()
    _, _, spec = parse_manifest(yaml.safe_load(arguments.job.read_text(encoding="utf-8")))
    seconds = _generate(resolve(spec), arguments.prompts, arguments.batches)
    sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")


def _generate(spec: PPOJobSpec, num_prompts: int, num_batches: int) -> list[float]:
    options = RolloutOptions.from_spec(spec, is_shared=False)
    os.environ.update(environment(options))
    from vllm import LLM

    prompts = _prompts(spec)
    engine = LLM(**engine_arguments(options))
    seconds = []
    for batch in range(num_batches):
        first = batch * num_prompts % len(prompts)
        chosen = [prompts[(first + index) % len(prompts)] for index in range(num_prompts)]
        parameters = [_parameters(SamplingOptions.training(spec), batch * num_prompts + i) for i in range(num_prompts)]
        started = time.perf_counter()
        engine.generate([{"prompt_token_ids": ids} for ids in chosen], parameters, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        # As after each step's weights.
        engine.reset_prefix_cache()
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


def _parameters(sampling: SamplingOptions, seed: int) -> Any:
    # The engine's own, so that both sample in the same way.
    from ppojob_trainer.engines.vllm.engine import sampling_parameters

    return sampling_parameters(sampling, seed)


if __name__ == "__main__":
    main()
