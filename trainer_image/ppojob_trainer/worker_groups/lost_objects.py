"""Finds the lost process behind the error of another process that could not get data from it.

Rows stay where they were computed, and the next phase's processes fetch them from there. Ray reports to the reader only
that the owner exited. The owner may have been idle, so no call on it fails. The same holds for weights: one end's call
may fail before the other's, and the error class of vLLM's receiver is lost on the way here. Called by `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from ray.exceptions import ObjectLostError

from ppojob_trainer.engines.errors import RolloutError, WeightReceiptError
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.errors import WorkerGroupError
from ppojob_trainer.worker_groups.futures import rank_of_explanation
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["explained"]

_ASK_S: Final = 20.0
"""Seconds. A process that computes answers when it is done; a process that exited is known at once."""


async def explained(
    error: WorkerGroupError, groups: Sequence[WorkerGroup[Any]], lost: Sequence[WorkerGroupError] = ()
) -> WorkerGroupError:
    """Return the failure of the lost process; any other error, or one without explanation, is returned unchanged.

    Args:
        lost: the failures of processes that the run continued without. They explain only that their rows are missing.
    """
    cause = error.__cause__
    if (
        not isinstance(cause, ObjectLostError)
        and type(cause) not in (RolloutError, WeightReceiptError)
        and not is_of_communication(cause)
    ):
        return error
    asked = (asyncio.wait_for(_is_there(group), _ASK_S) for group in groups)
    found = await asyncio.gather(*asked, return_exceptions=True)
    gone = [failure for failure in found if isinstance(failure, WorkerGroupError)]
    if isinstance(cause, ObjectLostError):
        gone += lost
    return min(gone, key=rank_of_explanation, default=error)


async def _is_there(group: WorkerGroup[Any]) -> None:
    await group.is_there()
