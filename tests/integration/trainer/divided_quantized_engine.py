"""Pushes weights to a real vLLM engine of two workers that round them to FP8; prints what was seen as JSON.

`separate_process.seen_by` runs it with the argument MODEL. At the end, one worker's sender fails, and the other worker
waits for the first in the reduction of the rounding.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from typing import Any

from ppojob_api.v1alpha1.rollout import Quantization
from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.rollout.options import RolloutOptions, environment
from tests.integration.trainer.divided_engine import LIMIT_S, PROMPT, SAMPLING, SIZE, Pushes
from tests.integration.trainer.in_flight_updates import BrokenSource, other_weights
from tests.integration.trainer.separate_process import print_seen

SHORT_LIMIT_S = 20.0
"""Twice what the engine waits for a push that one of its workers cannot end."""
PATIENCE_S = 120.0
EXTENSION = "tests.integration.trainer.format_extension.ChangingExtension"


def left_processes() -> list[str]:
    """Return the processes of vLLM that have not ended some time after the engine's end."""
    import psutil

    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=PATIENCE_S)
    return [one.name() for one in left if one.status() != psutil.STATUS_ZOMBIE and "python" not in one.name()]


async def failed_push(pushes: Pushes, model: Any) -> dict[str, Any]:
    """Let the first worker's sender fail in the middle of a layer; return what the engine says, and when."""
    from ppojob_trainer.engines.errors import EngineLostError

    pushes.version += 1
    first, second = pushes.senders
    first._source = BrokenSource(pushes.weights(model, 0))
    pushes.sources[1].weights = pushes.weights(model, 1)
    pushes.engine.options = replace(pushes.engine.options, timeout_seconds=SHORT_LIMIT_S)
    started = time.perf_counter()
    updating = asyncio.create_task(pushes.engine.update_weights(pushes.version))
    sending = asyncio.create_task(asyncio.to_thread(second.push, pushes.version))
    try:
        await asyncio.to_thread(first.push, pushes.version)
    except ConnectionError:
        first.close()
    await sending
    seen: dict[str, Any] = {}
    for name, answer in (("says", updating), ("check", asyncio.to_thread(pushes.engine.check))):
        try:
            await answer
        except EngineLostError as error:
            seen[name] = str(error)
    return {**seen, "seconds": time.perf_counter() - started}


async def scenario(path: str, options: RolloutOptions) -> dict[str, Any]:
    import torch

    from ppojob_trainer.engines.errors import RolloutError
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    engine = RolloutEngine(options)
    await engine.start()
    old, new = other_weights(path)
    pushes = Pushes(engine, "gloo", torch.bfloat16, engine.weights_version)
    await pushes.connect(old)
    seen: dict[str, Any] = {}
    for name, model in (("first", old), ("new", new)):
        seen[name] = {**await pushes.push(model), "apart": await pushes.apart(model)}
    seen["stale"] = await pushes.apart(old)
    pushes.close()
    # The first push over a connection is compared.
    await pushes.connect(old)
    await engine._workers("ppojob_change_next")
    try:
        await pushes.push(old)
    except RolloutError as error:
        seen["refusal"] = str(error)
    pushes.close()
    await pushes.connect(old)
    seen["after refusal"] = {**await pushes.push(old), "apart": await pushes.apart(old)}
    seen["failed"] = await failed_push(pushes, new)
    pushes.close()
    started = time.perf_counter()
    await engine.shutdown()
    seen["shutdown_seconds"] = time.perf_counter() - started
    seen["left"] = left_processes()
    return seen


def main() -> None:
    options = RolloutOptions(
        path=sys.argv[1],
        device=Device.CPU,
        max_model_len=len(PROMPT) + SAMPLING.max_tokens,
        max_num_seqs=8,
        tensor_parallel_size=SIZE,
        timeout_seconds=LIMIT_S,
        quantization=Quantization.FP8,
        engine_args={"worker_extension_cls": EXTENSION},
    )
    os.environ.update(environment(options, num_threads=1))
    print_seen(asyncio.run(scenario(sys.argv[1], options)))


if __name__ == "__main__":
    main()
