"""If a call misses the rows of a process that has ended, the end of that process is reported."""

from __future__ import annotations

from typing import Any, cast

import pytest
from ray.exceptions import OwnerDiedError
from torch.distributed import DistNetworkError

from ppojob_trainer.engines.errors import RolloutError, WeightLinkError
from ppojob_trainer.worker_groups.errors import WorkerFailedError, WorkerLostError, WorkerOutOfMemoryError
from ppojob_trainer.worker_groups.lost_objects import explained
from ppojob_trainer.worker_groups.worker_group import WorkerGroup


class _Group:
    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    async def is_there(self) -> list[str]:
        if self._failure is not None:
            raise self._failure
        return ["10.0.0.1"]


def groups(*failures: Exception | None) -> list[WorkerGroup[Any]]:
    return [cast("WorkerGroup[Any]", _Group(failure)) for failure in failures]


def missed(cause: Exception) -> WorkerFailedError:
    error = WorkerFailedError("critic rank 0 failed in compute_advantages: OwnerDiedError")
    error.__cause__ = cause
    return error


MISSED = OwnerDiedError("00", owner_address=None, call_site="")
MEMORY = WorkerOutOfMemoryError("ref rank 0 was terminated because its node ran out of memory")
LOST = WorkerLostError("rollout rank 1 was lost")


@pytest.mark.parametrize(
    ("failures", "told"), [((None, LOST), LOST), ((LOST, None, MEMORY), MEMORY), ((None, TimeoutError()), None)]
)
async def test_the_end_of_the_process_whose_rows_are_missed_is_reported(
    failures: tuple[Exception | None, ...], told: Exception | None
) -> None:
    error = missed(MISSED)
    assert await explained(error, groups(*failures)) is (told or error)


@pytest.mark.parametrize(
    "cause",
    [
        WeightLinkError("stopped receiving"),
        DistNetworkError("the store is gone"),
        RolloutError("vLLM's workers failed in ppojob_receive_weights: Connection closed by peer"),
    ],
)
async def test_a_lost_process_explains_why_the_others_do_not_reach_it(cause: Exception) -> None:
    error = missed(cause)
    assert await explained(error, groups(None, MEMORY)) is MEMORY
    assert await explained(error, groups(None, None)) is error


@pytest.mark.parametrize(
    ("cause", "told"), [(MISSED, True), (WeightLinkError("stopped receiving"), False), (ValueError("shapes"), False)]
)
async def test_an_engine_that_the_run_went_on_without_explains_only_that_its_rows_are_missing(
    cause: Exception, told: bool
) -> None:
    error = missed(cause)
    assert await explained(error, groups(None), [LOST]) is (LOST if told else error)


async def test_another_failure_stays_as_it_is() -> None:
    error = missed(ValueError("shapes"))
    assert await explained(error, groups(LOST)) is error
