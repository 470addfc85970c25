"""Changes the weights of a real vLLM engine while it generates; prints what was seen as JSON.

`seen_of` runs it with the arguments MODEL [drafts]. See test_in_flight_updates.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.speculative import SpeculativeSpec
from ppojob_trainer.engines.rollout.options import Drafts, RolloutOptions, SamplingOptions, environment
from tests.integration.trainer.separate_process import print_seen, seen_by

MODULE = "tests.integration.trainer.in_flight_updates"
LIMIT_S = 300.0
NUM_SAMPLES, NUM_TOKENS, BLOCK = 4, 256, 32
SAMPLING = SamplingOptions(max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDS = list(range(NUM_SAMPLES))
PROMPTS = [[5 + position % 7 for position in range(3 * BLOCK + 3)]] * NUM_SAMPLES
"""Samples of one prompt, which is longer than a block of the cache."""
_TRIES = 12


def seen_of(model: Path, limit: float, *, drafts: bool) -> dict[str, Any]:
    """Run this module as a process and return what it has seen."""
    return seen_by(MODULE, str(model), *(["drafts"] if drafts else []), limit=limit)


class Source:
    """Weights that a test chooses, in place of a trained model's."""

    def __init__(self, weights: Mapping[str, Any], frozen: Callable[[str], bool] = lambda _: False) -> None:
        self.weights, self.frozen = weights, frozen

    def specs(self) -> list[Any]:
        from ppojob_trainer.engines.weights.buckets import TensorSpec

        return [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), is_frozen=self.frozen(name))
            for name, tensor in self.weights.items()
        ]

    def gather(self) -> Iterator[Any]:
        return iter(self.weights.values())

    def gather_changing(self) -> Iterator[Any]:
        return (tensor for name, tensor in self.weights.items() if not self.frozen(name))


class BrokenSource(Source):
    """Fails in the middle of a layer: after the first of its attention's tensors."""

    def gather(self) -> Iterator[Any]:
        for name, tensor in self.weights.items():
            yield tensor
            if name.endswith("layers.1.self_attn.q_proj.weight"):
                raise ConnectionError("the trainer exited")


async def connected(engine: Any, source: Source) -> Any:
    """Return a sender that is connected to an engine. Its buckets are so small that each tensor has its own."""
    import torch

    from ppojob_trainer.engines.weights.plans import LinkPlan
    from ppojob_trainer.engines.weights.sender import WeightSender

    plans, device = [LinkPlan(0, "gloo", (0,))], torch.device("cpu")
    sender = WeightSender(source, plans, "127.0.0.1", LIMIT_S, device, bucket_bytes=1)
    (link,) = sender.listen()
    await asyncio.gather(asyncio.to_thread(sender.prepare), engine.connect_weights([(link, 1)]))
    return sender


@dataclass
class Scene:
    """An engine, a sender of weights, and two models in transformers with the same layers."""

    engine: Any
    sender: Any
    source: Source
    old: Any
    new: Any
    version: int = 0
    pushed: tuple[int, int] = (0, 0)
    """The versions of the weights before and after the interruption of a generation."""
    is_paused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when vLLM is paused for the weights of `lost`."""

    async def push(self, model: Any) -> None:
        await self.update(model)
        await self.engine.resume()

    async def update(self, model: Any) -> None:
        """Push the weights of a model; the engine stays paused."""
        from ppojob_trainer.engines.weights.receipts import verify

        self.version += 1
        self.source.weights = dict(model.named_parameters())
        sending = asyncio.to_thread(self.sender.push, self.version)
        [sent], received = await asyncio.gather(sending, self.engine.update_weights(self.version))
        verify(sent, received)

    async def generate(self) -> list[Any]:
        found: list[Any] = await self.engine.generate(PROMPTS, SEEDS, SAMPLING)
        return found

    async def break_off(self, model: Any) -> tuple[list[str], asyncio.Task[Any]]:
        """Push the weights of a model until the sender fails, generate, and connect again.

        Returns:
            What sender and engine say, and the generation, which waits for weights.
        """
        from ppojob_trainer.engines.errors import RolloutError

        self.sender.close()
        self.sender = await connected(self.engine, BrokenSource(dict(model.named_parameters())))
        updating = asyncio.create_task(self.engine.update_weights(self.version + 1))
        says = []
        try:
            await asyncio.to_thread(self.sender.push, self.version + 1)
        except ConnectionError as error:
            says.append(str(error))
        self.sender.close()
        try:
            await updating
        except RolloutError as error:
            says.append(str(error))
        generating = asyncio.create_task(self.generate())
        self.sender = await connected(self.engine, self.source)
        return says, generating

    async def lost(self) -> list[str]:
        """Kill vLLM's process while it waits for weights; return what the engine says then, and in the next call."""
        from ppojob_trainer.engines.errors import EngineLostError

        pause = self.engine._pause

        async def noted_pause() -> None:
            await pause()
            self.is_paused.set()

        self.engine._pause = noted_pause
        updating = asyncio.create_task(self.engine.update_weights(self.version + 1))
        # Before that, it waits for vLLM's pause, which takes as long as the machine is busy.
        await asyncio.wait_for(self.is_paused.wait(), LIMIT_S)
        await asyncio.sleep(1.0)
        (core,) = (one for one in psutil.Process().children(recursive=True) if one.name().startswith("VLLM"))
        core.kill()
        says, began = [], time.perf_counter()
        for call in (updating, self.engine.reset_prefix_cache()):
            try:
                await call
            except EngineLostError as error:
                says.append(str(error))
        assert time.perf_counter() - began < LIMIT_S / 4, "it waited for an answer"
        return says

    async def interrupted(
        self, model: Any, seconds: float, *, is_repeated: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Push other weights in the middle of a generation, and generate the same samples again, at once.

        Args:
            model: has the weights.
            seconds: how long the generation takes alone.
            is_repeated: push twice before the engine continues, as when another engine is lost in the first push.

        Returns:
            The responses that were interrupted, and those that began after the push while the others were unfinished.
        """
        wait_s = seconds / 2
        for _ in range(_TRIES):
            await self.push(self.old)
            before_it = self.version
            generating = asyncio.create_task(self.generate())
            await asyncio.sleep(wait_s)
            if is_repeated:
                await self.update(model)
            await self.push(model)
            self.pushed = before_it, self.version
            is_unfinished = not generating.done()
            after = await self.generate()
            before = await generating
            if is_unfinished and all(len(set(one.versions)) == 2 for one in before):
                return before, after
            # The machine may be faster or slower now than when the generation was alone.
            is_early = is_unfinished and all(one.versions[0] == self.version for one in before)
            wait_s *= 1.5 if is_early else 0.6
        raise AssertionError("no push came while all samples were unfinished")


def log_probs(model: Any, tokens: Sequence[int], cache: Any = None) -> tuple[list[float], Any]:
    """Return the log-prob of each token but the first after those before it, and the cache of all but the last."""
    import torch

    with torch.no_grad():
        given = torch.tensor([tokens[:-1]])
        found = model(given, past_key_values=cache, use_cache=True)
        logits = found.logits[0].float().log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:]).reshape(-1, 1))[:, 0].tolist(), found.past_key_values


def expected(scene: Scene, generation: Any) -> dict[str, list[float]]:
    """Return the expected log-probs of a response, by how the new weights continue after the old ones."""
    prompt, tokens = PROMPTS[0], generation.token_ids
    num_old = generation.versions.count(generation.versions[0])
    whole, last = [*prompt, *tokens], len(prompt) + num_old
    # The cache of the last token that the old weights sampled is computed by the next step, with the new weights.
    by_old, cache = log_probs(scene.old, whole[:last])
    continued, _ = log_probs(scene.new, whole[last - 1 :], cache)
    anew, _ = log_probs(scene.new, whole)
    old, _ = log_probs(scene.old, whole)
    first = len(prompt) - 1
    return {"kept cache": [*by_old[first:], *continued], "computed again": anew[first:], "old": old[first:]}


def largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def plain(generation: Any) -> dict[str, Any]:
    return {
        "tokens": generation.token_ids,
        "log_probs": generation.log_probs,
        "versions": generation.versions,
        "reason": generation.finish_reason,
    }


def other_weights(path: str) -> tuple[Any, Any]:
    """Return the model of a folder, and one whose weights differ."""
    import torch
    from transformers import AutoModelForCausalLM

    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return old, new


async def scenario(path: str, options: RolloutOptions) -> dict[str, Any]:
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    engine = RolloutEngine(options)
    await engine.start()
    old, new = other_weights(path)
    source = Source(dict(old.named_parameters()))
    scene = Scene(engine, await connected(engine, source), source, old, new)

    first = await scene.generate()
    started = time.perf_counter()
    alone = await scene.generate()
    seconds = time.perf_counter() - started
    seen: dict[str, Any] = {"alone": [plain(one) for one in alone]}
    seen["accepted drafts"] = Drafts.total(one.drafts for one in first).num_accepted
    same, _ = await scene.interrupted(old, seconds)
    seen["pushed"] = {"same weights": scene.pushed}
    seen["same weights"] = [plain(one) for one in same]
    changed, after = await scene.interrupted(new, seconds, is_repeated=True)
    seen["pushed"]["other weights"] = scene.pushed
    seen["other weights"], seen["after"] = [plain(one) for one in changed], [plain(one) for one in after]
    seen["differences"] = [
        {how: largest(one.log_probs, theirs) for how, theirs in expected(scene, one).items()} for one in changed
    ]
    whole = [log_probs(new, [*PROMPTS[0], *one.token_ids])[0][len(PROMPTS[0]) - 1 :] for one in after]
    seen["difference after"] = max(largest(one.log_probs, theirs) for one, theirs in zip(after, whole, strict=True))
    seen["alone with new"] = [plain(one) for one in await scene.generate()]
    seen["broken off"], waiting = await scene.break_off(old)
    done, _ = await asyncio.wait([waiting], timeout=seconds)
    seen["waits"] = not done
    await scene.push(new)
    seen["after a broken push"] = [plain(one) for one in await waiting]
    seen["lost"] = await scene.lost()
    scene.sender.close()
    await engine.shutdown()
    return seen


def main() -> None:
    path, has_drafts = sys.argv[1], "drafts" in sys.argv[2:]
    options = RolloutOptions(
        path=path,
        device=Device.CPU,
        max_model_len=len(PROMPTS[0]) + NUM_TOKENS,
        max_num_seqs=64,
        timeout_seconds=LIMIT_S,
        updates_in_flight=True,
        speculative=SpeculativeSpec() if has_drafts else None,
        engine_args={"block_size": BLOCK},
    )
    os.environ.update(environment(options, num_threads=1))
    print_seen(asyncio.run(scenario(path, options)))


if __name__ == "__main__":
    main()
