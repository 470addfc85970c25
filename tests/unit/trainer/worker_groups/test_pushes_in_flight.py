"""A push of the weights while the engines of a pool generate."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import Any

import pytest

from ppojob_api.v1alpha1.training import ScheduleSpec
from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from tests.unit.trainer.worker_groups.fake_processes import Processes, actor, as_group, group_of, receipt, spec_of
from tests.unit.trainer.worker_groups.test_elastic_rollout import LOST, A, B, pool_of
from tests.unit.trainer.worker_groups.test_elastic_rollout import spec_of as elastic_spec


async def test_a_push_in_flight_is_repeated_if_the_generation_found_the_loss_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, sender = pool_of(1, A, B), actor()
    weights = WeightsGroup(as_group(sender), [pool.rollout], elastic_spec())
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


@pytest.mark.parametrize("mode", [{}, {"mode": "OneStepOff", "weight_updates": "InFlight"}], ids=["phase", "in flight"])
@pytest.mark.parametrize("is_right", [True, False])
async def test_engines_resume_in_flight_when_their_receipts_have_been_compared(
    replicas: Processes, holders: Processes, mode: dict[str, Any], is_right: bool
) -> None:
    spec = spec_of({"actor": "train", "rollout": ["write"]})
    spec = spec.model_copy(update={"schedule": ScheduleSpec(**mode)})
    sender = actor() if is_right else actor(lambda version: receipt(version + 1))
    weights = WeightsGroup(as_group(sender), [group_of(spec, replicas, holders)], spec)

    with nullcontext() if is_right else pytest.raises(WeightSyncError):
        await weights.push(1)

    assert RolloutWorker.update_weights in replicas.calls
    assert (RolloutWorker.resume in replicas.calls) is (is_right and bool(mode))


async def test_an_engine_whose_loss_is_found_twice_is_lost_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(1, A, B)
    await pool.rollout.load()

    with caplog.at_level(logging.WARNING):
        pool.rollout.lose(1, LOST)
        pool.rollout.lose(1, LOST)

    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
