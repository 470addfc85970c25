"""Checks drafts in vLLM's workers so that a seed samples the same response with and without them.

vLLM accepts a draft at random, with the probability that the model gives it, and samples another token if it refuses.
The distribution is the model's, but which token a seed gives then depends on whether there was a draft. Here the model
samples each position as it does without drafts, and a draft is kept if it is the sampled token:

    draft          a  b  c  d
    sampled        a  b  x  .  .      response: a b x, two drafts kept

A draft is one token and not a distribution, so it is kept as often as by vLLM: with the probability that the model
gives it. Called by `WeightReceiverExtension`. It knows vLLM's two model runners: the second draws by seed and position,
the first (on the CPU) from a generator for each request, which advances by one draw for each token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def verify_by_seed(model_runner: Any, *, is_second_runner: bool) -> None:
    """Let a model runner check drafts as the module's docstring says."""
    if is_second_runner:
        _verify_in_second_runner(model_runner)
    else:
        model_runner.rejection_sampler.__class__ = SeededRejectionSampler


def keep_sampled(
    tokens: torch.Tensor, inputs: torch.Tensor, first_rows: torch.Tensor, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each response up to the first that is not its draft, and how many they are.

    Args:
        tokens: [rows] sampled after each input token; a response has a row for its last token and one for each draft.
        inputs: [rows] the input tokens: the last token, then the drafts; -1: no draft.
        first_rows: [responses + 1] the first row of each response, and the number of rows.
        num_drafts: the most drafts of a response.

    Returns:
        [responses, num_drafts + 1], of which the rest is undefined, and [responses] int32.
    """
    last = tokens.shape[0] - 1
    rows = first_rows[:-1, None] + torch.arange(num_drafts + 1, device=tokens.device)
    following = rows + 1
    sampled = tokens[rows.clamp(max=last)]
    is_kept = (following < first_rows[1:, None]) & (inputs[following.clamp(max=last)] == sampled)
    return sampled, is_kept.int().cumprod(1).sum(1, dtype=torch.int32) + 1


def _verify_in_second_runner(model_runner: Any) -> None:
    # They need Triton, which vLLM for the CPU does not have.
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    def rejection_sample(
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        inputs: torch.Tensor,
        first_rows: torch.Tensor,
        positions: torch.Tensor,
        *others: Any,
        use_fp64: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place of vLLM's, with its arguments; the logits have been divided by the temperature."""
        assert draft_logits is None, "drafts of an n-gram have no distribution"
        _, request_of_row, _, temperatures, seeds, num_drafts, _ = others
        # As vLLM's sampler does without drafts.
        tokens = gumbel_sample(
            logits,
            request_of_row,
            temperatures,
            seeds,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=use_fp64,
        )
        return keep_sampled(tokens, inputs, first_rows, num_drafts)

    vars(rejection_sampler)["rejection_sample"] = rejection_sample
    speculator = model_runner.speculator
    draft = speculator.propose

    def propose(input_batch: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        # vLLM drafts in every step, also where the scheduler wants no drafts, and overwrites them with -1.
        if named.get("num_speculative_tokens") == 0:
            found: torch.Tensor = speculator.drafts[: input_batch.num_reqs]
            return found
        drafted: torch.Tensor = draft(input_batch, *arguments, **named)
        return drafted

    speculator.propose = propose


class SeededRejectionSampler(RejectionSampler):
    """That of the first runner. It samples one position of all responses after the other."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """See vLLM."""
        assert draft_probs is None, "drafts of an n-gram have no distribution"
        drafts = [part.tolist() for part in torch.split(metadata.draft_token_ids, metadata.num_draft_tokens)]
        first_rows = metadata.cu_num_sampled_tokens - torch.tensor([len(of_one) + 1 for of_one in drafts])
        tokens = torch.full((len(drafts), metadata.max_spec_len + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        columns: list[LogprobsTensors | None] = []
        open_ones = set(range(len(drafts)))
        for column in range(metadata.max_spec_len + 1):
            found = self._sample(logits, first_rows + column, open_ones, sampling_metadata)
            columns.append(found.logprobs_tensors)
            sampled = found.sampled_token_ids[:, 0].tolist()
            for one in open_ones:
                tokens[one, column] = sampled[one]
            open_ones = {one for one in open_ones if drafts[one][column : column + 1] == [sampled[one]]}
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=_side_by_side(columns))

    def _sample(
        self, logits: torch.Tensor, rows: torch.Tensor, open_ones: set[int], sampling_metadata: SamplingMetadata
    ) -> SamplerOutput:
        """Sample from a row of each response. Only the generators of open ones advance."""
        generators = {one: of_one for one, of_one in sampling_metadata.generators.items() if one in open_ones}
        chosen = logits[rows.clamp(max=logits.shape[0] - 1)]
        found: SamplerOutput = self.sampler(chosen, replace(sampling_metadata, generators=generators))
        return found


def _side_by_side(columns: list[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Join the log-probs of columns of tokens to those of all tokens, one response after the other."""
    given = [column for column in columns if column is not None]
    if not given:
        return None
    ids, values, ranks = (
        torch.stack([getattr(column, name) for column in given], dim=1).flatten(0, 1)
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")
    )
    return LogprobsTensors(ids, values, ranks)
