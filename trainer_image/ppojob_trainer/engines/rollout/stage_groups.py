"""Divides the sequences of an engine with stages into groups: each stage has one to compute. Called by `scheduler`.

        step      1    2    3    4         With two stages: while the last one computes group A,
        group     A    B    A    B         the first one computes group B.

Sequences that vLLM 0.32 schedules in the same step stay together, because each of them has to wait until its token has
passed all stages. vLLM admits as many to a step as its tokens allow, so with short prompts all would be in one group,
and all stages but one would wait. Groups are not balanced again when sequences end; new ones go into the smaller group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

__all__ = ["admitting_a_share"]


@contextmanager
def admitting_a_share(scheduler: Scheduler) -> Iterator[None]:
    """If there are stages, admit new sequences to the step of the block only up to the share of one stage."""
    if not scheduler.use_pp:
        yield
        return
    most = scheduler.max_num_active_reqs
    num_running = len(scheduler.running)
    num_sequences = min(most, num_running + len(scheduler.waiting))
    share = -(-num_sequences // scheduler.parallel_config.pipeline_parallel_size)
    num_ready = sum(_is_ready(scheduler, request) for request in scheduler.running)
    scheduler.max_num_active_reqs = min(most, num_running + max(0, share - num_ready))
    try:
        yield
    finally:
        scheduler.max_num_active_reqs = most


def _is_ready(scheduler: Scheduler, request: Request) -> bool:
    """Whether a sequence will be in the next step. With asynchronous scheduling, vLLM counts the steps of each."""
    if scheduler.scheduler_config.async_scheduling:
        return bool(request.next_decode_eligible_step <= scheduler.current_step + 1)
    return not request.num_in_flight_tokens
