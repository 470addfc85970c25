"""A process did not get what another one had for it, because that one is gone: which one, and why?

Rows stay where they were computed, and go from there to whom the next phase is of. Ray tells the reader no more than
that the owner died, and the owner may have nothing to do at that moment, so no call on it fails. It is the same with
the weights, where one end's call may fail before the other's; of a receiver, which is vLLM's, the error's class is lost
on its way here. `run` asks here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from ray.exceptions import ObjectLostError

from ppojob_trainer.engines.errors import RolloutError
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.errors import WorkerGroupError
from ppojob_trainer.worker_groups.futures import rank_of_explanation
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["explained"]

_ASK_S: Final = 20.0
"""Who computes answers when he is done; who is gone is known at once."""


async def explained(error: WorkerGroupError, groups: Sequence[WorkerGroup[Any]]) -> WorkerGroupError:
    """Return the failure of the process that was missed; any other error, and an unclear one, as it is."""
    cause = error.__cause__
    if not isinstance(cause, ObjectLostError) and type(cause) is not RolloutError and not is_of_communication(cause):
        return error
    asked = (asyncio.wait_for(_is_there(group), _ASK_S) for group in groups)
    found = await asyncio.gather(*asked, return_exceptions=True)
    gone = [failure for failure in found if isinstance(failure, WorkerGroupError)]
    return min(gone, key=rank_of_explanation, default=error)


async def _is_there(group: WorkerGroup[Any]) -> None:
    await group.is_there()
