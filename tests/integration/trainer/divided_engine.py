"""Pushes weights to a real vLLM engine of two workers; prints what was seen as JSON.

`divided` runs it with the arguments MODEL DEVICE KIND BACKEND ... The engine is connected by one backend after the
other. The workers divide each layer, experts included (kind `slices`); or each layer, with whole experts, and vLLM
records which ones it uses (`experts`); or each has half of the layers (`stages`). Weights have the trainer's names,
with each expert by itself. On CUDA, worker i has GPU i. Each worker has its own sender, on the other GPU, because NCCL
refuses two processes on one; with backend cuda_ipc, on the worker's.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.rollout.options import RolloutOptions, SamplingOptions, environment
from ppojob_trainer.engines.weights.announcements import COMPARED_EVERY
from tests.integration.trainer.in_flight_updates import Source, log_probs, other_weights
from tests.integration.trainer.separate_process import print_seen, seen_by

MODULE = "tests.integration.trainer.divided_engine"
LIMIT_S = 300.0
SIZE = 2
SLICES, EXPERTS, STAGES = "slices", "experts", "stages"
PROMPT = [5 + position % 7 for position in range(20)]
SAMPLING = SamplingOptions(max_tokens=24, ignore_eos=True)


def divided(model: Path, device: str, *backends: str, limit: float, kind: str = SLICES) -> dict[str, Any]:
    """Run this module as a process and return what it has seen with each backend."""
    return seen_by(MODULE, str(model), device, kind, *backends, limit=limit)


def assert_follows(found: dict[str, Any]) -> None:
    """Check that an engine in bfloat16 has followed each push; the model that it is compared with does not round."""
    for push in ("first", "new", "old", "new again"):
        assert found[push]["apart"] < 0.2 * found["stale"], push
    for push in ("partial", "partial again", "partial later"):
        assert found[push]["apart"] < 0.2 * found["stale attention"], push


class Pushes:
    """An engine, and a sender for each of its workers."""

    def __init__(self, engine: Any, backend: str, dtype: Any, version: int) -> None:
        self.engine, self.backend, self.dtype = engine, backend, dtype
        self.version, self.number = version, 0
        self.senders: list[Any] = []
        self.sources: list[Source] = []

    def device_of(self, part: int) -> Any:
        import torch

        if self.engine.options.device is Device.CPU:
            return torch.device("cpu")
        return torch.device("cuda", part if self.backend == "cuda_ipc" else SIZE - 1 - part)

    async def connect(self, model: Any) -> None:
        from ppojob_trainer.engines.weights.plans import LinkPlan
        from ppojob_trainer.engines.weights.sender import WeightSender

        self.sources = [Source(self.weights(model, part), is_frozen) for part in range(SIZE)]
        self.senders = [
            WeightSender(
                source,
                [LinkPlan(part, self.backend, (part,), None if self.backend == "cuda_ipc" else part)],  # type: ignore[arg-type]
                "127.0.0.1",
                LIMIT_S,
                self.device_of(part),
            )
            for part, source in enumerate(self.sources)
        ]
        links = [link for sender in self.senders for link in sender.listen()]
        preparing = (asyncio.to_thread(self.on_device, part, "prepare") for part in range(SIZE))
        await asyncio.gather(*preparing, self.engine.connect_weights([(link, 1) for link in links]))

    def on_device(self, part: int, method: str, **arguments: Any) -> Any:
        """Call a sender in a thread of its own, whose GPU is the sender's."""
        import torch

        if self.device_of(part).type == "cuda":
            torch.cuda.set_device(self.device_of(part))
        return getattr(self.senders[part], method)(**arguments)

    def weights(self, model: Any, part: int) -> dict[str, Any]:
        from ppojob_trainer.engines.train.fsdp.checkpoint_tensors import written_of

        return {
            written.name: written.of(tensor.detach()).to(self.device_of(part), self.dtype)
            for name, tensor in model.named_parameters()
            for written in written_of(model, name, tuple(tensor.shape))
        }

    async def push(self, model: Any, *, is_partial: bool = False) -> dict[str, Any]:
        """Push a model's weights, or those of its attention alone. An engine that may sleep does so before whole ones.

        Returns seconds, bytes to each worker, and whether each one was read back.
        """
        from ppojob_trainer.engines.weights.receipts import verify

        self.version, self.number = self.version + 1, self.number + 1
        for part, source in enumerate(self.sources):
            source.weights = self.weights(model, part)
        if not is_partial:
            await self.engine.sleep()
            await self.engine.wake("weights")
        started = time.perf_counter()
        push = functools.partial(asyncio.to_thread, self.on_device, method="push", is_partial=is_partial)
        sending = (push(part, version=self.version) for part in range(SIZE))
        *sent, received = await asyncio.gather(*sending, self.engine.update_weights(self.version))
        seconds = time.perf_counter() - started
        await self.engine.wake("kv_cache")
        for [receipt], worker in zip(sent, received, strict=True):
            verify(receipt, [worker])
        return {
            "seconds": seconds,
            "bytes": [worker.num_bytes for worker in received],
            "is_read_back": [worker.is_read_back for worker in received],
        }

    async def apart(self, model: Any) -> float:
        """Return how far the engine's log-probs of a sampled response are from a model's, by the mean."""
        [response] = await self.engine.generate([PROMPT], [self.version], SAMPLING)
        theirs, _ = log_probs(model, [*PROMPT, *response.token_ids])
        differences = [abs(a - b) for a, b in zip(response.log_probs, theirs[len(PROMPT) - 1 :], strict=True)]
        return sum(differences) / len(differences)

    async def same_experts(self, model: Any) -> float:
        """Return the share of the experts that a model chooses for each token that the engine has recorded, too."""
        import torch

        sampling = replace(SAMPLING, experts=True)
        [response] = await self.engine.generate([PROMPT], [self.version], sampling)
        with torch.no_grad():
            tokens = torch.tensor([[*PROMPT, *response.token_ids[:-1]]])
            logits = torch.stack(model(tokens, output_router_logits=True).router_logits, 1)
        ours = torch.from_numpy(response.experts.astype("int64"))
        theirs = logits.view(len(ours), ours.shape[1], -1).topk(ours.shape[2]).indices
        return float((ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).float().mean())

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


def is_frozen(name: str) -> bool:
    """Whether a partial push leaves out a tensor: it has the attention."""
    return ".self_attn." not in name


def with_attention_of(model: Any, other: Any) -> Any:
    """Return another model with the attention of a model."""
    mixed = copy.deepcopy(other)
    mixed.load_state_dict({n: t for n, t in model.state_dict().items() if not is_frozen(n)}, strict=False)
    return mixed


@contextmanager
def swapped_boxes(senders: Sequence[Any]) -> Iterator[None]:
    """Let the first sender pack the boxes of the second worker, where these have as many numbers."""
    from ppojob_trainer.engines.weights.buckets import Bucket

    pack = Bucket.pack
    [other] = senders[1]._link_ends
    theirs = {spec.name: spec for bucket in other._buckets for spec in bucket.specs}
    [mine] = senders[0]._link_ends

    def swapped(bucket: Any, buffer: Any, index: int, tensor: Any) -> None:
        spec = bucket.specs[index]
        if any(bucket is each for each in mine._buckets) and spec.num_bytes == theirs[spec.name].num_bytes:
            specs = [*bucket.specs]
            specs[index] = theirs[spec.name]
            bucket = replace(bucket, specs=tuple(specs))
        pack(bucket, buffer, index, tensor)

    cast("Any", Bucket).pack = swapped
    try:
        yield
    finally:
        cast("Any", Bucket).pack = pack


async def scenario(path: str, options: RolloutOptions, backends: Sequence[str]) -> dict[str, Any]:
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    engine = RolloutEngine(options)
    await engine.start()
    old, new = other_weights(path)
    seen = {backend: await seen_with(engine, backend, old, new) for backend in backends}
    await engine.shutdown()
    return seen


async def seen_with(engine: Any, backend: str, old: Any, new: Any) -> dict[str, Any]:
    import torch

    from ppojob_trainer.engines.errors import RolloutError

    dtype = torch.float32 if engine.options.device is Device.CPU else torch.bfloat16
    pushes = Pushes(engine, backend, dtype, engine.weights_version)
    await pushes.connect(old)
    seen: dict[str, Any] = {"num_bytes": sum(tensor.numel() * dtype.itemsize for tensor in old.parameters())}
    mixed = with_attention_of(old, new)
    for name, model, is_partial in (
        ("first", old, False),
        ("new", new, False),
        ("partial", mixed, True),
        ("partial again", new, True),
        ("old", old, False),
        ("new again", new, False),
        # What it does not have was not compared the last time.
        ("partial later", mixed, True),
    ):
        seen[name] = {**await pushes.push(model, is_partial=is_partial), "apart": await pushes.apart(model)}
    seen["stale"], seen["stale attention"] = await pushes.apart(old), await pushes.apart(new)
    if engine.options.routing_replay:
        seen["same experts"] = await pushes.same_experts(mixed)
    if backend != "cuda_ipc" and engine.options.pipeline_parallel_size == 1:
        # The eleventh push is the next one that is compared.
        while pushes.number < COMPARED_EVERY:
            await pushes.push(old)
        with swapped_boxes(pushes.senders):
            try:
                await pushes.push(new)
            except RolloutError as error:
                seen["refusal"] = str(error)
    pushes.close()
    return seen


def main() -> None:
    path, device, kind, *backends = sys.argv[1:]
    by_experts = kind == EXPERTS
    options = RolloutOptions(
        path=path,
        device=Device(device),
        max_model_len=len(PROMPT) + SAMPLING.max_tokens,
        max_num_seqs=8,
        gpu_memory_utilization=0.3,
        # With divided experts, CUDA graphs read the map of experts, which vLLM keeps aside while an engine sleeps.
        enforce_eager=not by_experts,
        sleeps=by_experts,
        tensor_parallel_size=1 if kind == STAGES else SIZE,
        pipeline_parallel_size=SIZE if kind == STAGES else 1,
        enable_expert_parallel=by_experts,
        routing_replay=by_experts,
        timeout_seconds=LIMIT_S,
    )
    os.environ.update(environment(options, num_threads=1))
    print_seen(asyncio.run(scenario(path, options, backends)))


if __name__ == "__main__":
    main()
