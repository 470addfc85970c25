"""The columns that each method declares: all methods of the roles do, and what they compute needs no others."""

from __future__ import annotations

from inspect import getmembers_static
from typing import Any

import pytest

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_trainer.protocol import Keys
from ppojob_trainer.worker_groups.advantages import READ_BY_ADVANTAGES, AdvantageSettings, unread_by_advantages
from ppojob_trainer.worker_groups.dispatch import Dispatch, RemoteMethod, register
from ppojob_trainer.worker_groups.roles.actor import READ_BY_UPDATE, ActorWorker, unread_by_update
from ppojob_trainer.worker_groups.roles.critic import CriticWorker
from ppojob_trainer.worker_groups.roles.data import DataWorker
from ppojob_trainer.worker_groups.roles.ref import RefWorker
from ppojob_trainer.worker_groups.roles.reward import RewardWorker
from ppojob_trainer.worker_groups.roles.reward_model import RewardModelWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker

WORKERS = (ActorWorker, CriticWorker, DataWorker, RefWorker, RewardModelWorker, RewardWorker, RolloutWorker)
Method = RemoteMethod[Any, Any, Any, Any, Any]
KNOWN = {value for name, value in vars(Keys).items() if name.isupper()}


def methods_with_rows() -> list[Method]:
    found = [member for worker in WORKERS for _, member in getmembers_static(worker)]
    return [member for member in found if isinstance(member, RemoteMethod) and member.dispatch.sends_rows]


@pytest.mark.parametrize("method", methods_with_rows(), ids=lambda method: method.__qualname__)
def test_every_method_that_gets_rows_declares_its_columns(method: Method) -> None:
    assert method.reads, f"{method.__qualname__} fetches all columns: add `reads` to its @register"
    assert method.reads <= KNOWN


def test_there_are_methods_of_every_role() -> None:
    assert {method.__qualname__.split(".")[0] for method in methods_with_rows()} == {one.__name__ for one in WORKERS}


def test_a_method_without_a_declaration_gets_all_columns() -> None:
    class Own:
        @register(dispatch=Dispatch.DP_COMPUTE_METRIC)
        def count(self, batch):
            return {}

    assert Own.count.reads is None


@pytest.mark.parametrize(
    ("algorithm", "unread"),
    [
        ({}, {Keys.REF_LOG_PROB, Keys.ROLLOUT_LOG_PROBS}),
        ({"kl": {"inLoss": True}}, {Keys.ROLLOUT_LOG_PROBS}),
        ({"rolloutCorrection": {}}, {Keys.REF_LOG_PROB}),
    ],
)
def test_an_update_gets_what_its_losses_read(algorithm: dict[str, object], unread: set[str]) -> None:
    assert unread_by_update(AlgorithmSpec.model_validate(algorithm)) == unread
    assert unread < set(READ_BY_UPDATE)


@pytest.mark.parametrize(
    ("algorithm", "unread"),
    [
        ({"kl": {"inReward": True}}, {Keys.UID}),
        ({}, {Keys.UID, Keys.OLD_LOG_PROBS, Keys.REF_LOG_PROB}),
        ({"advantageEstimator": "GRPO"}, {Keys.VALUES, Keys.OLD_LOG_PROBS, Keys.REF_LOG_PROB}),
    ],
)
def test_advantages_get_what_the_estimator_and_a_mixture_read(algorithm: dict[str, object], unread: set[str]) -> None:
    parsed = AlgorithmSpec.model_validate(algorithm)
    assert unread_by_advantages(AdvantageSettings(parsed, 8)) == unread | {Keys.SOURCE}
    assert unread_by_advantages(AdvantageSettings(parsed, 8, sources=("a", "b"))) == unread
    assert unread | {Keys.SOURCE} < set(READ_BY_ADVANTAGES)
