"""Generation alone: the engine of a job's rollout, with nothing around it.

    python -m tests.bench.generation job.yaml seconds.json --prompts 256 --batches 6

It is `RolloutEngine` with the rollout's options, sampling, environment and threads, without Ray, trainer and other
replicas. `bench_split` starts it as a process of its own and compares the median of the batches' seconds, which it
writes, with the rollout's. The difference is what surrounds the engine in a step: the calls, the streaming of finished
responses, and the company on the GPU and on the host's cores. `bench_generation` compares `variants` of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.rollout.options import NO_DRAFTS, Drafts, RolloutOptions, SamplingOptions
from ppojob_trainer.worker_groups.roles.rollout import rollout_environment
from ppojob_trainer.worker_groups.worker_process import num_threads
from tests.bench.measurement import spec_of
from tests.bench.variants import VARIANTS, Variant
from tests.bench.workload import VARIED_MEAN

if TYPE_CHECKING:
    # vLLM must find its environment set.
    from ppojob_trainer.engines.rollout.engine import RolloutEngine
    from ppojob_trainer.engines.rollout.generation import Generation

WARM_UP_BATCHES = 2
RUN_LIMIT_S = 600.0
ROWS_OF_PROFILE = 45


@dataclass(frozen=True)
class Work:
    """What an engine generates: batches of so many prompts, after those of the warm-up.

    is_varied: responses have geometric lengths, the same for every variant, and not all the most tokens.
    """

    prompts: tuple[int, ...]
    batches: int
    is_varied: bool = False
    is_profiled: bool = False


@dataclass(frozen=True)
class Alone:
    """What an engine took for batches of one size, without the warm-up."""

    seconds: tuple[float, ...]
    drafts: Drafts

    @property
    def median_s(self) -> float:
        """Median seconds of a batch."""
        return statistics.median(self.seconds)


def measure_alone(job: Path, num_prompts: int, num_batches: int, folder: Path) -> float:
    """Return the median seconds of a batch, after the warm-up; log and seconds go to `folder`.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    return measure_variant(job, "default", Work((num_prompts,), num_batches), folder)[num_prompts].median_s


def measure_variant(job: Path, variant: str, work: Work, folder: Path) -> dict[int, Alone]:
    """Return what a variant of the engine took, by the number of prompts; log and figures go to `folder`.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, result = folder / "log.txt", folder / "seconds.json"
    wanted = ["--prompts", *map(str, work.prompts), "--batches", str(work.batches), "--variant", variant]
    wanted += ["--varied"] if work.is_varied else []
    wanted += ["--profile"] if work.is_profiled else []
    command = [sys.executable, "-m", "tests.bench.generation", str(job), str(result), *wanted]
    surroundings = {**os.environ, **_environment(_spec(job)), **VARIANTS[variant].environment}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=surroundings, timeout=RUN_LIMIT_S, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"the engine alone ended with {done.returncode}: see {log}\n{log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return {int(number): Alone(tuple(one["seconds"]), Drafts(**one["drafts"])) for number, one in found.items()}


def main() -> None:
    """Generate, and write the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--prompts", type=int, nargs="+", required=True, help="of a batch, as a replica gets them")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--variant", choices=VARIANTS, default="default")
    parser.add_argument("--varied", action="store_true", help="lengths that end by chance")
    parser.add_argument("--profile", action="store_true", help="print where the engine's thread spends its time")
    arguments = parser.parse_args()
    work = Work(tuple(arguments.prompts), arguments.batches, arguments.varied, arguments.profile)
    found = asyncio.run(_generate(_spec(arguments.job), VARIANTS[arguments.variant], work))
    arguments.result.write_text(json.dumps({number: asdict(one) for number, one in found.items()}), encoding="utf-8")


def _spec(job: Path) -> PPOJobSpec:
    return spec_of(yaml.safe_load(job.read_text(encoding="utf-8")))


def _pool(spec: PPOJobSpec) -> str:
    return spec.placement.rollout_pools[0]


def _environment(spec: PPOJobSpec) -> dict[str, str]:
    """Return what a replica's process has, its threads included."""
    replicas = spec.pool(_pool(spec)).gpus // spec.rollout.gpus_per_replica
    threads = num_threads(replicas, has_gpu=spec.device is Device.CUDA)
    return rollout_environment(spec, _pool(spec)) | {"OMP_NUM_THREADS": str(threads)}


async def _generate(spec: PPOJobSpec, variant: Variant, work: Work) -> dict[int, Alone]:
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    spec = variant.spec(spec)
    engine = RolloutEngine(variant.options(RolloutOptions.from_spec(spec, _pool(spec))))
    await engine.start()
    try:
        for call in variant.calls:
            await engine._workers(f"ppojob_{call}")
        return {number: await _batches(engine, spec, number, work) for number in work.prompts}
    finally:
        await engine.shutdown()


async def _batches(engine: RolloutEngine, spec: PPOJobSpec, num_prompts: int, work: Work) -> Alone:
    prompts, sampling = _prompts(spec), SamplingOptions.training(spec)
    seconds, drafts = [], NO_DRAFTS
    for batch in range(WARM_UP_BATCHES + work.batches):
        numbers = range(batch * num_prompts, (batch + 1) * num_prompts)
        chosen = [prompts[number % len(prompts)] for number in numbers]
        lengths = _lengths(numbers, sampling.max_tokens, is_varied=work.is_varied)
        if work.is_profiled and batch == WARM_UP_BATCHES:
            await engine._workers("ppojob_begin_profile")
        started = time.perf_counter()
        found = await _responses(engine, chosen, numbers, lengths, sampling)
        if batch >= WARM_UP_BATCHES:
            seconds.append(time.perf_counter() - started)
            drafts = Drafts.total([drafts, *(one.drafts for one in found)])
        # As after each step's weights.
        await engine.reset_prefix_cache()
    if work.is_profiled:
        print(f"{num_prompts} prompts:", *await engine._workers("ppojob_end_profile", ROWS_OF_PROFILE), sep="\n")
    return Alone(tuple(seconds), drafts)


async def _responses(
    engine: RolloutEngine,
    prompts: Sequence[list[int]],
    numbers: Sequence[int],
    lengths: Sequence[int],
    sampling: SamplingOptions,
) -> list[Generation]:
    if len(set(lengths)) == 1:
        return await engine.generate(prompts, numbers, sampling)
    work = [
        engine.generate([prompt], [number], replace(sampling, max_tokens=length))
        for prompt, number, length in zip(prompts, numbers, lengths, strict=True)
    ]
    return [one for found in await asyncio.gather(*work) for one in found]


def _lengths(numbers: Sequence[int], most: int, *, is_varied: bool) -> list[int]:
    """Return the length of the response to each seed."""
    if not is_varied:
        return [most] * len(numbers)
    return [max(1, min(most, round(random.Random(number).expovariate(1 / (VARIED_MEAN * most))))) for number in numbers]


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
