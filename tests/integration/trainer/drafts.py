"""Generates with a real vLLM engine, without and with drafts; prints what was seen as JSON. See test_drafts.py.

`generated` runs it with the arguments MODEL DEVICE.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.speculative import SpeculativeSpec
from ppojob_trainer.engines.rollout.options import Drafts, RolloutOptions, SamplingOptions, environment
from tests.integration.trainer.separate_process import print_seen, seen_by
from tests.integration.trainer.tiny_model import write_tiny_model
from tests.integration.trainer.vllm_agreement import OTHER_SEEDS

MODULE = "tests.integration.trainer.drafts"
EXTENSION = "tests.integration.trainer.drafting_extension.EqualStepsExtension"
NUM_PROMPTS, NUM_TOKENS = 12, 96
SAMPLINGS = {
    "greedy": SamplingOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    "sampled": SamplingOptions(max_tokens=NUM_TOKENS, ignore_eos=True),
    "from the likeliest": SamplingOptions(max_tokens=NUM_TOKENS, temperature=1.2, top_k=20, top_p=0.9),
    "without log-probs": SamplingOptions(max_tokens=NUM_TOKENS, log_probs=False),
}


def write_repeating_model(folder: Path) -> Path:
    """Write a tiny model that often samples its last token again: what its layers add to the embedding is small."""
    from safetensors.torch import load_file, save_file

    file = write_tiny_model(folder, initializer_range=0.1) / "model.safetensors"
    added = ("o_proj.weight", "down_proj.weight")
    weights = {name: value * (0.05 if name.endswith(added) else 1) for name, value in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return folder


def generated(model: Path, device: str, limit: float) -> dict[str, Any]:
    """Run this module as a process and return its responses for each of `SAMPLINGS`, `without` and `with` drafts."""
    return seen_by(MODULE, str(model), device, limit=limit)


def prompts() -> list[list[int]]:
    # Of different lengths, and some have a part twice.
    return [[5 + number, 9, 7 + number % 3] * (1 + number % 4) for number in range(NUM_PROMPTS)]


async def scenario(options: RolloutOptions) -> dict[str, Any]:
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    engine = RolloutEngine(options)
    await engine.start()
    seen = {}
    seeds = list(range(NUM_PROMPTS))
    for name, sampling in SAMPLINGS.items():
        found = await engine.generate(prompts(), seeds, sampling)
        # Others finish at other times, and the choice for drafts has changed.
        again = await engine.generate(prompts()[:3], list(range(3)), replace(sampling, max_tokens=NUM_TOKENS // 2))
        others = await engine.generate(prompts(), [OTHER_SEEDS + seed for seed in seeds], sampling)
        drafts = Drafts.total(one.drafts for one in found)
        seen[name] = {
            "tokens": [one.token_ids for one in found],
            "again": [one.token_ids for one in again],
            "with other seeds": [one.token_ids for one in others],
            "log_probs": [one.log_probs for one in found],
            "drafts": [drafts.num_steps, drafts.num_drafted, drafts.num_accepted],
        }
    await engine.shutdown()
    return seen


def main() -> None:
    path, device = sys.argv[1], Device(sys.argv[2])
    options = RolloutOptions(
        path=path,
        device=device,
        max_model_len=128,
        max_num_seqs=64,
        gpu_memory_utilization=0.3,
        engine_args={"worker_extension_cls": EXTENSION},
    )
    os.environ.update(environment(options, num_threads=2))
    seen = {"without": asyncio.run(scenario(options))}
    seen["with"] = asyncio.run(scenario(replace(options, speculative=SpeculativeSpec())))
    print_seen(seen)


if __name__ == "__main__":
    main()
