"""Drafts that are checked by seed: a draft is kept if it is what the model samples, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

# Loading vLLM takes many seconds.
pytestmark = pytest.mark.slow

VOCABULARY = 8


@pytest.mark.parametrize(
    ("tokens", "inputs", "expected"),
    [
        # Last token 9, drafts 1 2 3; sampled after each.
        ([1, 2, 3, 4], [9, 1, 2, 3], [1, 2, 3, 4]),
        ([1, 2, 7, 4], [9, 1, 2, 3], [1, 2, 7]),
        ([5, 2, 3, 4], [9, 1, 2, 3], [5]),
        # What is sampled after a draft that is not kept is for another text.
        ([1, 5, 3, 4], [9, 1, 2, 3], [1, 5]),
        # No draft.
        ([1, 2, 3, 4], [9, -1, -1, -1], [1]),
        ([1], [9], [1]),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_is_not_sampled(
    tokens: list[int], inputs: list[int], expected: list[int]
) -> None:
    import torch

    from ppojob_trainer.engines.rollout.seeded_verification import keep_sampled

    # Between two other responses, one of which has no draft, and whose rows must not be read.
    rows = torch.tensor([[3, 3], tokens, [6, 0]][0] + tokens + [6])
    before = torch.tensor([3, 3, *inputs, tokens[-1]], dtype=torch.int32)
    first_rows = torch.tensor([0, 2, 2 + len(tokens), 3 + len(tokens)], dtype=torch.int32)

    sampled, counts = keep_sampled(rows, before, first_rows, 3)

    assert counts.tolist() == [2, len(expected), 1]
    assert counts.dtype == torch.int32
    assert sampled[1, : counts[1]].tolist() == expected
    assert sampled.shape == (3, 4)


def logits_after(text: list[int]) -> Any:
    """Return the logits of a model that reads all tokens."""
    import torch

    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    return torch.randn(VOCABULARY, generator=generator)


def metadata(generators: dict[int, Any], temperature: float, *, log_probs: bool) -> Any:
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    count, is_greedy = len(generators), temperature == 0
    return SamplingMetadata(
        temperature=None if is_greedy else torch.full((count,), temperature),
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=None,
        top_k=None if is_greedy else torch.full((count,), 5, dtype=torch.int32),
        generators={} if is_greedy else generators,
        max_num_logprobs=0 if log_probs else None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(count),
        presence_penalties=torch.zeros(count),
        repetition_penalties=torch.ones(count),
        output_token_ids=[[] for _ in range(count)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def without_drafts(sampler: Any, prompts: list[list[int]], temperature: float, length: int) -> list[list[Any]]:
    """Return of each response its tokens and log-probs."""
    import torch

    generators = {row: torch.Generator().manual_seed(row) for row in range(len(prompts))}
    texts, found = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    for _ in range(length):
        sampled = sampler(
            torch.stack([logits_after(text) for text in texts]), metadata(generators, temperature, log_probs=True)
        )
        for row, text in enumerate(texts):
            text.append(int(sampled.sampled_token_ids[row, 0]))
            found[row].append((text[-1], float(sampled.logprobs_tensors.logprobs[row, 0])))
    return found


def with_drafts(
    verifier: Any, prompts: list[list[int]], temperature: float, length: int, known: list[list[Any]]
) -> tuple[list[list[Any]], int]:
    """As `without_drafts`; drafts are right, wrong in the middle, or missing. Also return how many were kept."""
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    generators = {row: torch.Generator().manual_seed(row) for row in range(len(prompts))}
    texts, found, num_kept, turn = [list(prompt) for prompt in prompts], [[] for _ in prompts], 0, 0
    while min(len(response) for response in found) < length:
        turn += 1
        drafts = []
        for row, response in enumerate(found):
            right = [token for token, _ in known[row][len(response) : len(response) + 3]]
            drafts.append([right, [*right[:1], (right[-1] + 1) % VOCABULARY] if right else [], []][(row + turn) % 3])
        if not any(drafts):
            drafts[0] = [0]
        about = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
        rows = [logits_after([*text, *of_one[:count]]) for text, of_one in zip(texts, drafts, strict=True)
                for count in range(len(of_one) + 1)]  # fmt: skip
        output = verifier(about, None, torch.stack(rows), metadata(generators, temperature, log_probs=True))
        tokens, log_probs = verifier.parse_output(
            output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors
        )
        for row, of_one in enumerate(tokens):
            values = log_probs.slice_request(row, len(of_one)).logprobs[:, 0].tolist()
            found[row] += zip(of_one, values, strict=True)
            texts[row] += of_one
            num_kept += len(of_one) - 1
    return [response[:length] for response in found], num_kept


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_first_runner_samples_the_same_tokens_with_and_without_drafts(temperature: float) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from ppojob_trainer.engines.rollout.seeded_verification import verify_by_seed

    runner = type("Runner", (), {})()
    sampler = Sampler(logprobs_mode="processed_logprobs")
    runner.rejection_sampler = RejectionSampler(sampler)
    verify_by_seed(runner, is_second_runner=False)
    prompts = [[row, 1] for row in range(6)]

    expected = without_drafts(sampler, prompts, temperature, 40)
    seen, num_kept = with_drafts(runner.rejection_sampler, prompts, temperature, 40, expected)

    assert [[token for token, _ in response] for response in seen] == [
        [token for token, _ in response] for response in expected
    ]
    for mine, theirs in zip(seen, expected, strict=True):
        assert [value for _, value in mine] == pytest.approx([value for _, value in theirs], abs=1e-6)
    assert num_kept > 50


class Speculator:
    """vLLM's, as far as the second runner's verification knows it."""

    def __init__(self) -> None:
        import torch

        self.drafts, self.calls = torch.arange(12).view(4, 3), 0

    def propose(self, input_batch: Any, *_: Any, num_speculative_tokens: int | None = None) -> Any:
        self.calls += 1
        return self.drafts[: input_batch.num_reqs] + 100


@pytest.fixture
def second_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The second runner's verification, with the likeliest token in place of vLLM's kernel that needs a GPU."""
    from vllm.v1.worker.gpu.sample import gumbel
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    from ppojob_trainer.engines.rollout.seeded_verification import verify_by_seed

    def likeliest(logits: Any, *arguments: Any, **named: Any) -> Any:
        request_of_row, temperatures, seeds, positions = arguments
        assert named == {"apply_temperature": False, "is_drafting": False, "use_fp64": False}
        assert (temperatures.tolist(), seeds.tolist()) == ([1.0, 1.0, 1.0], [7, 8, 9])
        assert (request_of_row.tolist(), positions.tolist()) == ([2, 2, 2, 0, 1, 1], [5, 6, 7, 3, 8, 9])
        return logits.argmax(-1)

    monkeypatch.setattr(gumbel, "gumbel_sample", likeliest)
    # What verify_by_seed sets is restored after the test.
    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sampler.rejection_sample)
    runner = type("Runner", (), {})()
    runner.speculator = Speculator()
    verify_by_seed(runner, is_second_runner=True)
    return runner


def test_vllms_verification_of_the_second_runner_keeps_what_is_sampled(second_runner: Any) -> None:
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    # Three requests, the first with two drafts, of which one is kept; the last's draft is kept.
    sampled, inputs = [4, 1, 6, 3, 5, 2], [0, 4, 7, 0, 0, 5]
    logits = torch.nn.functional.one_hot(torch.tensor(sampled), VOCABULARY).float()
    state = type("State", (), {})
    verifier, sampler, states = RejectionSampler.__new__(RejectionSampler), state(), state()
    states.temperature, states.seeds = state(), state()
    states.temperature.gpu, states.seeds.gpu = torch.ones(3), torch.tensor([7, 8, 9])
    sampler.apply_sampling_params = lambda given, *_: given
    sampler.sampling_states, sampler.use_fp64_gumbel = states, False
    verifier.sampler, verifier.num_speculative_steps, verifier.watermark_key = sampler, 2, None
    verifier.synthetic_conditional_rates, verifier.use_block_verification = None, False
    requests, drafts = torch.tensor([2, 0, 1]), torch.tensor(inputs, dtype=torch.int32)

    _, tokens, counts = verifier._verify(
        logits,
        None,
        drafts,
        torch.tensor([5, 6, 7, 3, 8, 9]),
        torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        requests,
        requests.numpy(),
        torch.tensor([2, 2, 2, 0, 1, 1]),
        torch.tensor([0, 1, 2, 0, 0, 1]),
        np.array([8, 4, 10]),
        drafts,
    )

    assert counts.tolist() == [2, 1, 2]
    assert [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)] == [[4, 1], [3], [5, 2]]
    assert tokens.shape == (3, 3)


def test_a_step_without_drafts_drafts_nothing(second_runner: Any) -> None:
    batch, speculator = type("Batch", (), {"num_reqs": 2})(), second_runner.speculator

    assert speculator.propose(batch, None, num_speculative_tokens=0).shape == (2, 3)
    assert speculator.calls == 0
    assert speculator.propose(batch, None, num_speculative_tokens=3).tolist() == [[100, 101, 102], [103, 104, 105]]
