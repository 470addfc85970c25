"""Generates with real vLLM engines until a stop string; prints what was seen as JSON. See test_stop_strings.py.

`generated` runs it with the argument MODEL.
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
from ppojob_trainer.engines.rollout.options import RolloutOptions, SamplingOptions, environment
from tests.integration.trainer.separate_process import print_seen, seen_by
from tests.integration.trainer.vllm_agreement import OTHER_SEEDS

MODULE = "tests.integration.trainer.stop_strings"
NUM_PROMPTS, NUM_TOKENS = 24, 80
STOPS = ("q", "xy", "\u00e9", "Z", "0")
"""Each token of the model is a byte, so "xy" and "\u00e9" take two."""


def generated(model: Path, limit: float) -> dict[str, Any]:
    """Run this module as a process; return the responses of each engine."""
    return seen_by(MODULE, str(model), limit=limit)


async def scenario(options: RolloutOptions) -> dict[str, Any]:
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    engine = RolloutEngine(options)
    await engine.start()
    prompts = [[5 + number, 9, 7 + number % 3] * (1 + number % 4) for number in range(NUM_PROMPTS)]
    sampling = SamplingOptions(max_tokens=NUM_TOKENS, ignore_eos=True, stop=STOPS)
    seeds = list(range(NUM_PROMPTS))
    found = await engine.generate(prompts, seeds, sampling)
    others = await engine.generate(prompts, [OTHER_SEEDS + seed for seed in seeds], sampling)
    await engine.shutdown()
    return {
        "finds_stops": engine._finds_stops,
        "tokens": [one.token_ids for one in found],
        "with other seeds": [one.token_ids for one in others],
        "log_probs": [one.log_probs for one in found],
        "ends": [one.finish_reason for one in found],
    }


def main() -> None:
    options = RolloutOptions(path=sys.argv[1], device=Device.CPU, max_model_len=128, max_num_seqs=16)
    os.environ.update(environment(options, num_threads=2))
    engines = {
        "ours": options,
        "vLLM's": replace(options, engine_args={"async_scheduling": True}),
        "drafts": replace(options, speculative=SpeculativeSpec()),
    }
    print_seen({name: asyncio.run(scenario(of_one)) for name, of_one in engines.items()})


if __name__ == "__main__":
    main()
