"""The interface by which the controller sends the policy's weights to the engines. `roles.weights` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class WeightsPort(Protocol):
    """Sends the policy's weights to the rollout engines."""

    @property
    def are_released(self) -> bool:
        """Whether engines release the weights after generation, so that even unchanged weights must be sent again.

        If so, a push allocates memory in every pool that has engines.
        """
        ...

    @property
    def come_back(self) -> bool:
        """Whether a push waits for engines that come back, if none is left. Otherwise it fails."""
        ...

    @property
    def compared_version(self) -> int | None:
        """Version of the last weights that all engines read back and compared; None: none of this attempt."""
        ...

    async def wait_for_engine(self) -> None:
        """Wait until any engine can get the weights. Its caller may cancel it, unlike a push, when a stop is requested.

        Raises:
            Exception: no engine is left, and none comes back, or none did in time.
        """
        ...

    async def push(self, version: int) -> Mapping[str, float]:
        """Load the current policy into all engines and verify it. Return metrics of the transfer.

        Engines that generate pause meanwhile, if the job updates weights in flight; otherwise none may generate.
        """
        ...
