"""A push of the weights while the engines of a pool generate."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from tests.unit.trainer.worker_groups.fake_processes import as_group
from tests.unit.trainer.worker_groups.test_elastic_rollout import LOST, A, B, actor, pool_of, spec_of


async def test_a_push_in_flight_is_repeated_if_the_generation_found_the_loss_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, sender = pool_of(1, A, B), actor()
    weights = WeightsGroup(as_group(sender), [pool.rollout], spec_of())
    await pool.rollout.load()
    await weights.connect()
    generating = pool.rollout.begin(2, is_validation=False)
    pool.replicas.answers |= {("update_weights", 1): LOST, ("collect", 1): LOST}
    send = weights._sent

    async def sent(version: int) -> dict[str, float]:
        # The push has begun before the generation finds the loss, and fails after it.
        moved, _ = await asyncio.gather(send(version), generating.exchange(1, [], None, 1), return_exceptions=True)
        if isinstance(moved, BaseException):
            raise moved
        return moved

    weights._sent = sent  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        await weights.push(2)

    assert pool.rollout.ranks == [0]
    assert (pool.replicas.killed, pool.rollout.num_lost) == ([1], 1)
    assert "the weights are sent again, without the engines that were lost meanwhile" in caplog.text


async def test_an_engine_whose_loss_is_found_twice_is_lost_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(1, A, B)
    await pool.rollout.load()

    with caplog.at_level(logging.WARNING):
        pool.rollout.lose(1, LOST)
        pool.rollout.lose(1, LOST)

    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
