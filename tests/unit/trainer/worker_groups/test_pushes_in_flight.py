"""A push of the weights while the engines of a pool generate."""

from __future__ import annotations

import asyncio

from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from tests.unit.trainer.worker_groups.fake_processes import as_group
from tests.unit.trainer.worker_groups.test_elastic_rollout import LOST, A, B, actor, pool_of, spec_of


async def test_a_push_in_flight_is_repeated_if_the_generation_found_the_loss_first() -> None:
    pool, sender = pool_of(1, A, B), actor()
    weights = WeightsGroup(as_group(sender), [pool.rollout], spec_of())
    await pool.rollout.load()
    await weights.connect()
    generating = pool.rollout.begin(2, is_validation=False)
    pool.replicas.answers |= {("update_weights", 1): LOST, ("collect", 1): LOST}
    send = weights._sent

    async def sent(version: int) -> dict[str, float]:
        found = await asyncio.gather(generating.exchange(1, [], None, 1), send(version), return_exceptions=True)
        if isinstance(found[1], BaseException):
            raise found[1]
        return found[1]

    weights._sent = sent  # type: ignore[method-assign]
    await weights.push(2)

    assert pool.rollout.ranks == [0]
    assert (pool.replicas.killed, pool.rollout.num_lost) == ([1], 1)
