"""Retries with backoff for reward functions that call a service. A user's function imports it:

    from ppojob_trainer.rewards.retries import with_retries

    @with_retries(attempts=4)
    async def ask_judge(client, text): ...

Built on tenacity. The waits count towards `reward.function.timeoutSeconds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import httpx
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

F = TypeVar("F", bound=Callable[..., Any])

TRANSIENT_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


def with_retries(
    attempts: int = 4, first_wait_seconds: float = 1.0, longest_wait_seconds: float = 30.0
) -> Callable[[F], F]:
    """Return a decorator that calls a plain or coroutine function again after a transient failure.

    Before call n + 1 it waits a random time of up to first_wait_seconds * 2^(n - 1), at most longest_wait_seconds. The
    last failure is raised as it is.

    Raises:
        ValueError: attempts is below 1.
    """
    if attempts < 1:
        raise ValueError(f"attempts is {attempts}: it must be at least 1")
    return retry(  # type: ignore[return-value]
        stop=stop_after_attempt(attempts),
        wait=wait_random_exponential(multiplier=first_wait_seconds, max=longest_wait_seconds),
        retry=retry_if_exception(is_transient),
        reraise=True,
    )


def is_transient(error: BaseException) -> bool:
    """Whether a call may succeed when it is repeated: no connection, no answer in time, or a status that says so."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in TRANSIENT_STATUS
    return isinstance(error, (httpx.TransportError, ConnectionError, TimeoutError))
