"""Trains one step and pushes weights to a real vLLM engine; prints what was seen as JSON. See test_vllm_agreement.py.

`separate_process.seen_by` runs it with the arguments MODEL DEVICE BACKEND [DTYPE [REPLAY]]. With backend nccl vLLM
computes on the second GPU, else on the trainer's. DTYPE is that of the trainer, bfloat16 by default. With the word
`replay`, vLLM records the experts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.rollout.options import RolloutOptions, SamplingOptions, environment
from tests.integration.trainer.separate_process import VISIBLE_GPUS, gpu, print_seen

NUM_PROMPTS = 12
LIMIT_SECONDS = 300.0
MOST, FEW = 0.75, 0.25
"""Shares of the responses that two generations must have in common, and may have with other seeds or weights.

vLLM rounds otherwise where it computes other sequences at the same time, and which those are depends on when the
requests arrive. So now and then, a number between two tokens samples the other one. The second share shows that the
model's responses are not all the same anyway."""
MOVED = 1e-3
"""Learning rate of the random models of mixtures: with the usual one, many responses stay the same."""
OTHER_SEEDS = 1000
"""The first of seeds that no other generation has."""
SAMPLING = SamplingOptions(max_tokens=24)
MODULE = "tests.integration.trainer.vllm_agreement"


@dataclass
class Trainer:
    """The policy engine, its sender, and the batch that was generated last."""

    policy: Any
    sender: Any

    def log_probs(self, batch: Any) -> Any:
        return self.policy.forward(batch).ragged("old_log_probs")


def chat_prompts(path: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    questions = [f"What is {number} + {number + 1}?" for number in range(NUM_PROMPTS)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]


def make_policy(path: str, parallel: Any, dtype: str, learning_rate: float = 1e-4, correction: Any = None) -> Any:
    import torch

    from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
    from ppojob_api.v1alpha1.model import ActorModel
    from ppojob_api.v1alpha1.training import ActorSpec
    from tests.unit.trainer.engines.fsdp_engines import policy_engine

    training = ActorSpec(learning_rate=learning_rate, max_tokens_per_gpu=1024)
    run: dict[str, Any] = {"total_steps": 10, "dtype": getattr(torch, dtype)}
    algorithm = AlgorithmSpec(rollout_correction=correction)
    return policy_engine(parallel, ActorModel(path=path), training, algorithm, **run)


def make_trainer(path: str, device: Device, backend: str, dtype: str, **policy_options: Any) -> Trainer:
    from ppojob_trainer.engines.network import listen
    from ppojob_trainer.engines.train.dims import ParallelDims
    from ppojob_trainer.engines.train.mesh import init_process_group
    from ppojob_trainer.engines.weights.plans import LinkPlan
    from ppojob_trainer.engines.weights.sender import WeightSender

    parallel = init_process_group(device, 0, ParallelDims(), listen("127.0.0.1", LIMIT_SECONDS), LIMIT_SECONDS)
    policy = make_policy(path, parallel, dtype, **policy_options)
    plan = LinkPlan(0, cast("Any", backend), (0,))
    return Trainer(policy, WeightSender(policy.weights(), [plan], "127.0.0.1", LIMIT_SECONDS, parallel.device))


async def generate(engine: Any, prompts: list[list[int]], order: list[int], first_seed: int = 0) -> Any:
    """Return the responses in the order of the prompts; the requests are made in the given order of rows."""
    from ppojob_trainer.protocol import DataProto, rollout_batch

    sampling = replace(SAMPLING, experts=engine.options.routing_replay)
    seeds = [first_seed + row for row in order]
    written = await engine.generate([prompts[row] for row in order], seeds, sampling)
    by_row = dict(zip(order, written, strict=True))
    rows = [by_row[row] for row in range(len(prompts))]
    tokens, log_probs = [row.token_ids for row in rows], [row.log_probs for row in rows]
    experts = [row.experts for row in rows if row.experts is not None]
    meta = {"temperature": SAMPLING.temperature, "num_mini_batches": 1, "epochs": 1}
    meta["response_length"] = SAMPLING.max_tokens
    tensors = rollout_batch(prompts, tokens, log_probs, experts=experts or None)
    return DataProto.from_dict(tensors, meta_info=meta)


def responses_of(batch: Any) -> list[list[int]]:
    found: list[list[int]] = batch.responses().to_lists()
    return found


def share_of_equal(ones: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """Return the share of rows that are equal in both."""
    return sum(one == other for one, other in zip(ones, others, strict=True)) / len(ones)


def experts_of(batch: Any) -> list[list[int]]:
    found: list[list[int]] = batch.ragged("routed_experts").to_lists()
    return found


def probs_diff(trainer: Trainer, batch: Any) -> float:
    ours, theirs = trainer.log_probs(batch).values.exp(), batch.ragged("rollout_log_probs").values.exp()
    return float((ours - theirs).abs().mean())


def replay_diffs(path: str, parallel: Any, batch: Any) -> dict[str, float]:
    """Return how far a trainer that rounds to bfloat16 is from the engine: with and without the engine's experts."""
    trainer = Trainer(make_policy(path, parallel, "bfloat16"), None)
    columns = {name: batch.ragged(name) for name in batch.columns if name != "routed_experts"}
    without = type(batch).from_dict(columns, meta_info=batch.meta_info)
    wrong = batch.ragged("routed_experts")
    wrong = batch.with_fields({"routed_experts": wrong.with_values(wrong.values.flip(0))})
    named = {"replayed": batch, "not_replayed": without, "wrongly_replayed": wrong}
    return {name: probs_diff(trainer, each) for name, each in named.items()}


async def push(trainer: Trainer, engine: Any, version: int) -> tuple[float, bool]:
    from ppojob_trainer.engines.weights.receipts import verify

    started = time.perf_counter()
    [sent], received = await asyncio.gather(
        asyncio.to_thread(trainer.sender.push, version), engine.update_weights(version)
    )
    verify(sent, received)
    return time.perf_counter() - started, all(receipt.is_read_back for receipt in received)


async def renewed(trainer: Any, engine: Any, version: int) -> tuple[float, bool]:
    """Sleep, wake and push, as a step does; return the seconds of the push and whether it was read back."""
    await engine.sleep()
    await engine.wake("weights")
    found = await push(trainer, engine, version)
    await engine.wake("kv_cache")
    return found


def train_once(trainer: Any, batch: Any) -> dict[str, Any]:
    """Make each sampled token less probable; return the metrics, and by how much log-probs have moved."""
    import torch

    before = trainer.log_probs(batch)
    step = batch.with_fields(
        {"old_log_probs": before, "advantages": before.with_values(-torch.ones_like(before.values))}
    )
    metrics = trainer.policy.update(step)
    moved = float((trainer.log_probs(batch).values - before.values).abs().mean())
    return {"metrics": metrics, "moved_by": moved}


async def scenario(path: str, options: RolloutOptions, backend: str, dtype: str) -> dict[str, Any]:
    from ppojob_trainer.engines.errors import RolloutError
    from ppojob_trainer.engines.rollout.engine import RolloutEngine

    engine = RolloutEngine(options)
    await engine.start()
    # vLLM's child process has its GPU now; the trainer takes the first.
    os.environ[VISIBLE_GPUS] = gpu(0)
    learning = {"learning_rate": MOVED} if options.routing_replay else {}
    trainer, prompts = make_trainer(path, options.device, backend, dtype, **learning), chat_prompts(path)
    forward, backward = list(range(NUM_PROMPTS)), list(reversed(range(NUM_PROMPTS)))
    first, again = await generate(engine, prompts, forward), await generate(engine, prompts, backward)
    seen: dict[str, Any] = {"equal_in_any_order": share_of_equal(responses_of(first), responses_of(again))}
    seen["diff_at_start"] = probs_diff(trainer, first)
    others = await generate(engine, prompts, forward, OTHER_SEEDS)
    seen["equal_with_other_seeds"] = share_of_equal(responses_of(first), responses_of(others))

    if options.routing_replay:
        seen["replay"] = replay_diffs(path, trainer.policy.parallel, first)
        seen["equal_experts_in_any_order"] = share_of_equal(experts_of(first), experts_of(again))
        seen["equal_experts_with_other_seeds"] = share_of_equal(experts_of(first), experts_of(others))

    (link,) = trainer.sender.listen()
    await asyncio.gather(asyncio.to_thread(trainer.sender.prepare), engine.connect_weights([(link, 1)]))
    seen["push_seconds"], seen["first_is_read_back"] = await renewed(trainer, engine, 1)
    after_equal = await generate(engine, prompts, forward)
    seen["equal_with_equal_weights"] = share_of_equal(responses_of(first), responses_of(after_equal))

    seen |= train_once(trainer, first)
    seen["diff_of_stale_weights"] = probs_diff(trainer, await generate(engine, prompts, forward))
    seen["second_push_seconds"], seen["second_is_read_back"] = await renewed(trainer, engine, 2)
    after_push = await generate(engine, prompts, forward)
    seen["diff_after_push"] = probs_diff(trainer, after_push)
    seen["equal_with_other_weights"] = share_of_equal(responses_of(first), responses_of(after_push))
    seen["weights_version"] = engine.weights_version

    greedy = SamplingOptions(max_tokens=8, temperature=0)
    seen["greedy"] = [generation.token_ids for generation in await engine.generate(prompts[:1] * 2, [1, 2], greedy)]
    generating = asyncio.create_task(engine.generate(prompts, forward, SAMPLING))
    # A tiny model writes them in less than a tenth of a second.
    await asyncio.sleep(0)
    try:
        await engine.update_weights(3)
    except RolloutError as error:
        seen["refusal"] = str(error)
    await generating
    trainer.sender.close()
    await engine.shutdown()
    trainer.policy.parallel.destroy()
    return seen


def main() -> None:
    path, device, backend = sys.argv[1], Device(sys.argv[2]), sys.argv[3]
    dtype = sys.argv[4] if len(sys.argv) > 4 else "bfloat16"
    is_cuda = device is Device.CUDA
    options = RolloutOptions(
        path=path,
        device=device,
        max_model_len=128,
        max_num_seqs=64,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        sleeps=is_cuda and backend == "cuda_ipc",
        timeout_seconds=LIMIT_SECONDS,
        routing_replay="replay" in sys.argv[5:],
    )
    os.environ.update(environment(options, num_threads=2))
    if is_cuda:
        os.environ[VISIBLE_GPUS] = gpu(1 if backend == "nccl" else 0)
    seen = asyncio.run(scenario(path, options, backend, dtype))
    print_seen(seen)


if __name__ == "__main__":
    main()
