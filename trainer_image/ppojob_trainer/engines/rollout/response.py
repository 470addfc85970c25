"""A response that `ResponseScheduler` keeps until it is complete, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from ppojob_trainer.engines.rollout.stop_strings import StopStrings
from ppojob_trainer.engines.rollout.weight_changes import TOKENS_AT_UPDATES


@dataclass(slots=True)
class Response:
    """What a request has generated and what ends it.

    limit: tokens of prompt and response at which it is complete. is_whole: its response is sent as one message.
    is_plain: nothing but a token, a string or a limit ends it. strings: those that the scheduler looks for.
    log_probs, ranks: of each token, if the request asks for them. prefill: vLLM's statistics, which it sends with the
    first token. tokens_at_updates: tokens that it had when the weights changed, each time. experts: of the tokens
    computed so far, if the engine records them, [tokens, layers, experts of a token] each.
    """

    request: Request
    limit: int
    is_whole: bool
    is_plain: bool
    eos: int | None
    stops: frozenset[int]
    has_log_probs: bool
    strings: StopStrings | None = None
    log_probs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    prefill: PrefillStats | None = None
    tokens_at_updates: list[int] = field(default_factory=list)
    experts: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def log_prob_lists(self) -> LogprobsLists | None:
        """Return the log-probs of all tokens as vLLM's messages have them."""
        if not self.has_log_probs:
            return None
        tokens = np.asarray(self.request.output_token_ids[:], dtype=np.int32).reshape(-1, 1)
        values = np.asarray(self.log_probs, dtype=np.float32).reshape(-1, 1)
        return LogprobsLists(tokens, values, np.asarray(self.ranks, dtype=np.int32))

    def record_of_updates(self, given: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return what the message of the complete response has as `kv_transfer_params`, beside what is `given`."""
        return {**(given or {}), TOKENS_AT_UPDATES: self.tokens_at_updates} if self.tokens_at_updates else given


def ends(response: Response, token: int, num_tokens: int) -> bool:
    """Whether the token ends the response; the request's status says why.

    The order is that of vLLM's `check_stop`; in vLLM's front end, a string goes before the limit of tokens.
    """
    request = response.request
    if token == response.eos:
        request.status = RequestStatus.FINISHED_STOPPED
    elif token in response.stops:
        request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, token
    elif response.strings is not None and (string := response.strings.ended_by(request._output_token_ids)) is not None:
        request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, string
    elif num_tokens >= response.limit:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    else:
        return False
    return True


def end_by_string(response: Response, tokens: list[int]) -> str | None:
    """Return the first stop string that tokens complete, and cut the tokens after it.

    Args:
        tokens: new ones, which the response does not have yet.
    """
    strings = response.strings
    if strings is None:
        return None
    for number, token in enumerate(tokens, 1):
        if not strings.may_be_ended_by(token):
            continue
        string = strings.ended_by([*response.request._output_token_ids, *tokens[:number]])
        if string is not None:
            del tokens[number:]
            return string
    return None


def columns_of(found: LogprobsLists | None) -> tuple[list[float], list[int]]:
    """Return the log-prob and the rank of each row's token."""
    if found is None:
        return [], []
    return found.logprobs[:, 0].tolist(), found.sampled_token_ranks.tolist()
