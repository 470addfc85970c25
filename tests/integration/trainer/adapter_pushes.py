"""Trains adapters and pushes the merged weights to real vLLM engines; prints what was seen as JSON.

`adapters_pushed` runs it with the arguments MODEL TARGETS, the layers with adapters. See test_adapter_pushes.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.rollout.options import RolloutOptions, environment
from tests.integration.trainer.separate_process import print_seen, seen_by
from tests.integration.trainer.vllm_agreement import (
    LIMIT_SECONDS,
    NUM_PROMPTS,
    chat_prompts,
    generate,
    probs_diff,
    train_once,
)

MODULE = "tests.integration.trainer.adapter_pushes"
ROWS = list(range(NUM_PROMPTS))


def adapters_pushed(model: Path, targets: Sequence[str], limit: float) -> dict[str, Any]:
    """Run this module as a process and return what it has seen."""
    return seen_by(MODULE, str(model), ",".join(targets), limit=limit)


class BreakingSource:
    """The policy's weights; a push breaks off after two tensors while `breaks` is set."""

    def __init__(self, source: Any) -> None:
        self.source, self.breaks = source, False

    def specs(self) -> Any:
        return self.source.specs()

    def gather(self) -> Iterator[Any]:
        return self.source.gather()

    def gather_changing(self) -> Iterator[Any]:
        for number, tensor in enumerate(self.source.gather_changing()):
            if self.breaks and number == 2:
                raise ConnectionError("the trainer exited")
            yield tensor


@dataclass
class Scene:
    """A policy with adapters, its sender, and the engines that are connected to it."""

    policy: Any
    prompts: list[list[int]]
    engines: list[Any] = field(default_factory=list)
    version: int = 0
    source: Any = None
    sender: Any = None

    def log_probs(self, batch: Any) -> Any:
        return self.policy.forward(batch).ragged("old_log_probs")

    async def connect(self) -> None:
        from ppojob_trainer.engines.weights.plans import LinkPlan
        from ppojob_trainer.engines.weights.sender import WeightSender

        if self.sender is not None:
            self.sender.close()
        self.source = BreakingSource(self.policy.weights())
        plan = LinkPlan(0, "gloo", tuple(range(len(self.engines))))
        # So small that a push has several buckets.
        device, bucket_bytes = self.policy.parallel.device, 2**14
        self.sender = WeightSender(self.source, [plan], "127.0.0.1", LIMIT_SECONDS, device, bucket_bytes)
        (link,) = self.sender.listen()
        connecting = (engine.connect_weights([(link, number + 1)]) for number, engine in enumerate(self.engines))
        await asyncio.gather(asyncio.to_thread(self.sender.prepare), *connecting)

    async def push(self, *, is_partial: bool) -> int:
        """Push the merged weights; return their bytes."""
        from ppojob_trainer.engines.weights.receipts import verify

        self.version += 1
        sending = asyncio.to_thread(self.sender.push, self.version, is_partial=is_partial)
        receiving = (engine.update_weights(self.version) for engine in self.engines)
        [sent], *received = await asyncio.gather(sending, *receiving)
        for receipts in received:
            verify(sent, receipts)
        return int(sent.num_bytes)

    async def broken_push(self) -> list[str]:
        """Push until the source breaks off; return what trainer and engine say, and what the engine says to prompts."""
        from ppojob_trainer.engines.errors import RolloutError

        says: list[str] = []
        self.source.breaks = True
        updating = asyncio.create_task(self.engines[0].update_weights(self.version + 1))
        try:
            await asyncio.to_thread(self.sender.push, self.version + 1, is_partial=True)
        except ConnectionError as error:
            says.append(str(error))
        self.sender.close()
        for call in (updating, generate(self.engines[0], self.prompts, ROWS)):
            try:
                await call
            except RolloutError as error:
                says.append(str(error))
        return says

    async def train(self) -> None:
        train_once(self, await generate(self.engines[0], self.prompts, ROWS))

    async def apart(self) -> float:
        """Return the largest difference of an engine from the policy with its adapters, by the mean over tokens."""
        written = [await generate(engine, self.prompts, ROWS) for engine in self.engines]
        return max(probs_diff(self, batch) for batch in written)  # type: ignore[arg-type]


def make_policy(path: str, targets: list[str]) -> Any:
    import torch

    from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
    from ppojob_api.v1alpha1.model import ActorModel, LoRA
    from ppojob_api.v1alpha1.training import ActorSpec
    from ppojob_trainer.engines.network import listen
    from ppojob_trainer.engines.train.dims import ParallelDims
    from ppojob_trainer.engines.train.mesh import init_process_group
    from tests.unit.trainer.engines.fsdp_engines import policy_engine

    parallel = init_process_group(Device.CPU, 0, ParallelDims(), listen("127.0.0.1", LIMIT_SECONDS), LIMIT_SECONDS)
    model = ActorModel(path=path, lora=LoRA(rank=4, alpha=16.0, target_modules=targets))
    training = ActorSpec(learning_rate=2e-2, max_tokens_per_gpu=1024)
    return policy_engine(parallel, model, training, AlgorithmSpec(), total_steps=10, dtype=torch.float32)


async def scenario(path: str, targets: list[str], options: RolloutOptions) -> dict[str, Any]:
    from ppojob_trainer.engines.errors import RolloutError
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    first, late = RolloutEngine(options), RolloutEngine(options)
    await first.start()
    scene = Scene(make_policy(path, targets), chat_prompts(path), [first])
    await scene.connect()
    seen: dict[str, Any] = {"bytes of all": await scene.push(is_partial=False), "at start": await scene.apart()}

    await scene.train()
    seen["stale"] = await scene.apart()
    seen["bytes of a partial push"] = await scene.push(is_partial=True)
    seen["after a partial push"] = await scene.apart()
    await scene.train()
    await scene.push(is_partial=True)
    seen["after another one"] = await scene.apart()

    await scene.train()
    seen["broken"] = await scene.broken_push()
    await scene.connect()
    seen["bytes after a broken push"] = await scene.push(is_partial=False)
    seen["after a broken push"] = await scene.apart()

    await late.start()
    scene.engines.append(late)
    await scene.train()
    await scene.connect()
    seen["bytes with a late engine"] = await scene.push(is_partial=False)
    seen["with a late engine"] = await scene.apart()
    await scene.train()
    await scene.push(is_partial=True)
    seen["after its partial push"] = await scene.apart()

    # As after a sleep, which the engine leaves out on the CPU.
    scene.engines, late._has_weights = [late], False
    await first.shutdown()
    await scene.connect()
    await scene.push(is_partial=False)
    late._has_weights = False
    try:
        await scene.push(is_partial=True)
    except RolloutError as error:
        seen["without weights"] = str(error)
    scene.sender.close()
    await late.shutdown()
    scene.policy.parallel.destroy()
    return seen


def main() -> None:
    path, targets = sys.argv[1], sys.argv[2].split(",")
    options = RolloutOptions(
        path=path,
        device=Device.CPU,
        max_model_len=128,
        max_num_seqs=64,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        timeout_seconds=LIMIT_SECONDS,
    )
    os.environ.update(environment(options, num_threads=1))
    print_seen(asyncio.run(scenario(path, targets, options)))


if __name__ == "__main__":
    main()
