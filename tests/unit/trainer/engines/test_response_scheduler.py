"""`ResponseScheduler` beside vLLM's own: the same requests are scheduled in the same steps and blocks, and end equally.

No model runs: a function of request and position stands for it, and results arrive a step late, as on a GPU.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Loading vLLM takes many seconds.
pytestmark = pytest.mark.slow

BLOCK = 4
LENGTH = 56
EOS, STOP = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    found = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(found)
    return found


@dataclass
class Seen:
    """What a scheduler did: of each step its requests, blocks and ends; of each request its response."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    responses: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: int = 0


def make(
    scheduler: str,
    folder: Path,
    num_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
    runner: str = "1",
    reference: str = "AsyncScheduler",
    **engine_args: Any,
) -> Any:
    """Return a scheduler as vLLM's engine makes it."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.sched import async_scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from ppojob_trainer.engines.rollout.scheduler import ResponseScheduler

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments = AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=LENGTH,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        enable_chunked_prefill=False,
        block_size=BLOCK,
        enforce_eager=True,
        **engine_args,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    if "pipeline_parallel_size" in engine_args:
        # vLLM's choice on GPUs.
        config.scheduler_config.async_scheduling = runner == "2"
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    kind = ResponseScheduler if scheduler == "ours" else getattr(async_scheduler, reference)
    found = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        include_finished_set=False,
        log_stats=False,
    )
    found.use_v2_model_runner = runner == "2"
    return found


def drive(
    scheduler: Any, seed: int, num_requests: int, depth: int, streamed: float = 0.0, aborted: float = 0.02
) -> Seen:
    """Send requests at random steps, abort some, and answer each step `depth - 1` steps later."""
    chance, seen = random.Random(seed), Seen()
    waiting = deque(make_request(number, chance, streamed) for number in range(num_requests))
    running: deque[Any] = deque()
    lengths: dict[str, int] = {}
    for _ in range(10_000):
        while waiting and chance.random() < 0.4:
            scheduler.add_request(waiting.popleft())
        if chance.random() < aborted and scheduler.requests:
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests(chance.choice(sorted(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests() and len(running) < depth:
            output = scheduler.schedule()
            seen.steps.append(step_of(output))
            running.append((output, answer(output, scheduler, lengths)))
        if running and (len(running) == depth or not scheduler.has_requests()):
            output, found = running.popleft()
            receive(scheduler, output, found, seen)
        if not waiting and not running and not scheduler.has_requests():
            return seen
    raise AssertionError("it did not end")


def make_request(number: int, chance: random.Random, streamed: float) -> Any:
    is_streamed, max_tokens = chance.random() < streamed, chance.randint(1, 40)
    # Some prompts begin alike, so that blocks are shared.
    prompt = [3 + number % 3] * chance.randint(1, 14) + [10 + number % 20] * chance.randint(1, 9)
    return request_of(number, prompt, max_tokens, is_streamed=is_streamed)


def request_of(number: int, prompt: list[int], max_tokens: int, *, is_streamed: bool = False) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    if number == 0:
        init_none_hash(sha256)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=number,
        logprobs=0 if number % 3 else None,
        stop_token_ids=[STOP] if number % 2 else None,
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )
    sampling.update_from_generation_config({}, EOS)
    return Request(
        f"r{number}",
        prompt,
        sampling,
        None,
        arrival_time=float(number),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def step_of(output: Any) -> dict[str, Any]:
    cached = output.scheduled_cached_reqs
    return {
        "tokens": output.num_scheduled_tokens,
        "new": {new.req_id: (new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs},
        "cached": list(
            zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        ),
        "resumed": cached.resumed_req_ids,
        "known": {name: list(tokens) for name, tokens in cached.all_token_ids.items()},
        "finished": output.finished_req_ids,
        "preempted": output.preempted_req_ids,
        "total": output.total_num_scheduled_tokens,
    }


def answer(output: Any, scheduler: Any, lengths: dict[str, int]) -> Any:
    """Return what a model would: a token for each request whose prompt is complete."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    tokens, log_probs = [], []
    for name in names:
        position = computed[name] + output.num_scheduled_tokens[name]
        request = scheduler.requests[name]
        is_decoding = position >= max(request.num_prompt_tokens, lengths.get(name, 0))
        lengths[name] = position
        draw = random.Random(f"{name}/{position}")
        tokens.append([draw.randrange(1, 64)] if is_decoding else [])
        log_probs.append(-draw.random())
    columns = np.array([one[:1] or [0] for one in tokens], dtype=np.int32)
    found = LogprobsLists(
        columns, np.array(log_probs, dtype=np.float32).reshape(-1, 1), np.arange(1, len(names) + 1, dtype=np.int64)
    )
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=found,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def receive(scheduler: Any, output: Any, found: Any, seen: Seen) -> None:
    for of_client in scheduler.update_from_output(output, found).values():
        for one in of_client.outputs:
            seen.messages += 1
            response = seen.responses.setdefault(
                one.request_id, {"tokens": [], "log_probs": [], "ranks": [], "end": None}
            )
            response["tokens"] += one.new_token_ids
            if one.new_logprobs is not None:
                response["log_probs"] += one.new_logprobs.logprobs[:, 0].tolist()
                response["ranks"] += one.new_logprobs.sampled_token_ranks.tolist()
            if one.finish_reason is not None:
                response["end"] = (one.finish_reason, one.stop_reason)


def complete(seen: Seen) -> Mapping[str, Any]:
    """Return the responses that ended: parts of aborted ones are never sent by ours."""
    return {name: response for name, response in seen.responses.items() if response["end"] is not None}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("runner", ["1", "2"])
@pytest.mark.parametrize(("num_blocks", "seeds"), [(400, range(6)), (36, range(6, 16))])
def test_steps_and_responses_are_those_of_vllms_scheduler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, seeds: range, runner: str, depth: int
) -> None:
    steps: list[bool] = []
    for seed in seeds:
        expected = drive(make("vllm", folder, num_blocks, monkeypatch, runner), seed, 40, depth)
        scheduler = make("ours", folder, num_blocks, monkeypatch, runner)
        note_steps(scheduler, steps)
        seen = drive(scheduler, seed, 40, depth)
        for number, (mine, theirs) in enumerate(zip(seen.steps, expected.steps, strict=True)):
            assert mine == theirs, f"seed {seed}, step {number}"
        assert complete(seen) == complete(expected)
        assert len(complete(seen)) == seen.messages <= expected.messages
        assert not scheduler._responses
        assert not scheduler._decoding
    assert sum(steps) > 100 * len(seeds) / 4


STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


# On GPUs, vLLM schedules a step more than there are stages before it has the tokens of the first one.
@pytest.mark.parametrize(("runner", "reference", "depth"), [("1", "Scheduler", 2), ("2", "AsyncScheduler", 3)])
@pytest.mark.parametrize("num_blocks", [400, 36])
def test_with_stages_responses_are_those_of_vllms_scheduler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, runner: str, reference: str, depth: int
) -> None:
    for seed in range(4):
        theirs = make("vllm", folder, num_blocks, monkeypatch, runner, reference, **STAGES)
        expected = drive(theirs, seed, 40, depth, aborted=0.0)
        seen = drive(make("ours", folder, num_blocks, monkeypatch, runner, **STAGES), seed, 40, depth, aborted=0.0)
        # Other steps have other sequences beside each one, and a rank here is a place in the step.
        ours, vllms = (
            {name: one | {"ranks": []} for name, one in complete(found).items()} for found in (seen, expected)
        )
        assert ours == vllms
        assert len(ours) == seen.messages == 40


@pytest.mark.parametrize(("runner", "depth"), [("1", 2), ("2", 3)])
def test_each_stage_has_its_share_of_the_sequences(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runner: str, depth: int
) -> None:
    """All of these prompts fit into one step, and vLLM alone would put them there: then every second step is empty."""

    def sizes_of(scheduler: Any) -> list[int]:
        """Return the number of sequences in each of twelve steps, of seven that take longer."""
        for number in range(7):
            scheduler.add_request(request_of(number, [3 + number] * 5, 30))
        running: deque[Any] = deque()
        lengths: dict[str, int] = {}
        sizes = []
        for _ in range(12):
            output = scheduler.schedule()
            sizes.append(len(output.num_scheduled_tokens))
            running.append((output, answer(output, scheduler, lengths)))
            if len(running) == depth:
                receive(scheduler, *running.popleft(), Seen())
        return sizes

    reference = "Scheduler" if runner == "1" else "AsyncScheduler"
    assert sizes_of(make("vllm", folder, 400, monkeypatch, runner, reference, **STAGES)) == [7, 0] * 6
    assert sizes_of(make("ours", folder, 400, monkeypatch, runner, **STAGES)) == [4, 3] * 6


def test_a_request_that_streams_gets_each_token_beside_others_that_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        expected = drive(make("vllm", folder, 400, monkeypatch), seed, 30, 2, streamed=0.3)
        seen = drive(make("ours", folder, 400, monkeypatch), seed, 30, 2, streamed=0.3)
        assert seen.steps == expected.steps
        assert complete(seen) == complete(expected)
        assert len(complete(seen)) < seen.messages < expected.messages


def note_steps(scheduler: Any, steps: list[bool]) -> None:
    """Note of each step that may be one of decoding whether it was."""
    schedule = scheduler._schedule_decoding

    def noting() -> Any:
        output = schedule()
        steps.append(output is not None)
        return output

    scheduler._schedule_decoding = noting
