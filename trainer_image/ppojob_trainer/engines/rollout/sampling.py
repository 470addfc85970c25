"""What vLLM gets for a response, and what the response has, as this project's types. Called by `engine`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from ppojob_trainer.engines.errors import RolloutError
from ppojob_trainer.engines.rollout.options import NO_DRAFTS, Drafts, SamplingOptions
from ppojob_trainer.engines.rollout.stop_strings import STOP_STRINGS


def sampling_parameters(sampling: SamplingOptions, seed: int, *, finds_stops: bool) -> SamplingParams:
    """Return vLLM's sampling parameters for one response.

    Args:
        finds_stops: the scheduler looks for stop strings, and not vLLM's front end.
    """
    by_vllm = bool(sampling.stop) and not finds_stops
    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop) if by_vllm else None,
        ignore_eos=sampling.ignore_eos,
        # A greedy request samples nothing; a random generator for it would only cost time.
        seed=None if sampling.temperature == 0 else seed,
        logprobs=0 if sampling.log_probs else None,
        flat_logprobs=sampling.log_probs,
        detokenize=by_vllm,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={STOP_STRINGS: list(sampling.stop)} if sampling.stop and finds_stops else None,
    )


def log_probs_of(flat: Any) -> list[float]:
    """Return the log-prob of each token, in nats, from vLLM's `flat_logprobs`.

    Raises:
        RolloutError: one is not finite.
    """
    # The first entry of each position is the sampled token's.
    values = [float(flat.logprobs[start]) for start in flat.start_indices]
    if not all(math.isfinite(value) for value in values):
        raise RolloutError("vLLM returned a log-prob that is not finite: the weights are broken")
    return values


def experts_of(completion: Any, num_tokens: int) -> np.ndarray[Any, Any]:
    """Return the experts of each token but the last one, [num_tokens - 1, layers, experts of a token].

    Args:
        num_tokens: of prompt and response.

    Raises:
        RolloutError: vLLM recorded other tokens.
    """
    recorded: np.ndarray[Any, Any] | None = completion.routed_experts
    if recorded is None or len(recorded) != num_tokens - 1:
        number = "no tokens" if recorded is None else f"{len(recorded)} tokens"
        raise RolloutError(f"vLLM recorded the experts of {number} of a sequence of {num_tokens}: report this as a bug")
    return recorded


def drafts_of(num_tokens: int, metrics: Any) -> Drafts:
    """Return how a response of so many tokens was generated; `metrics`: vLLM's, if it drafts."""
    if metrics is None:
        return NO_DRAFTS
    num_drafted = sum(metrics.histogram)
    num_accepted = sum(number * steps for number, steps in enumerate(metrics.histogram))
    # Drafts after the token that ended the response are counted as accepted, too.
    return Drafts(max(num_drafted, num_tokens - num_accepted), num_drafted, num_accepted)
