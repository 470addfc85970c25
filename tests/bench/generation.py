"""Generation by vLLM alone: the same prompts, options and sampling as a job's rollout, with nothing of ours around it.

    python -m tests.bench.generation job.yaml seconds.json --prompts 256 --batches 6

`bench_split` starts it, as a process of its own with the environment that the engine wants, and compares the median of
the batches' seconds, which it writes, with the rollout's.
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


def measure_alone(job: Path, num_prompts: int, num_batches: int, folder: Path) -> float:
    """Return the median seconds of a batch, after the warm-up; log and seconds go to `folder`.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, result = folder / "log.txt", folder / "seconds.json"
    wanted = ["--prompts", str(num_prompts), "--batches", str(WARM_UP_BATCHES + num_batches)]
    command = [sys.executable, "-m", "tests.bench.generation", str(job), str(result), *wanted]
    surroundings = {**os.environ, **environment(_options(_spec(job)))}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=surroundings, timeout=RUN_LIMIT_S, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"vLLM alone ended with {done.returncode}: see {log}\n{log.read_text()[-3000:]}")
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
    seconds = _generate(_spec(arguments.job), arguments.prompts, arguments.batches)
    arguments.result.write_text(json.dumps(seconds), encoding="utf-8")


def _spec(job: Path) -> PPOJobSpec:
    _, _, spec = parse_manifest(yaml.safe_load(job.read_text(encoding="utf-8")))
    return resolve(spec)


def _options(spec: PPOJobSpec) -> RolloutOptions:
    return RolloutOptions.from_spec(spec, is_shared=False)


def _generate(spec: PPOJobSpec, num_prompts: int, num_batches: int) -> list[float]:
    from vllm import LLM

    prompts = _prompts(spec)
    engine = LLM(**engine_arguments(_options(spec)))
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
