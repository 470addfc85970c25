"""The processes in the bundles of a replica beside the first one. They reserve GPUs for its engine.

    node 0: RolloutWorker  GpuHolder  GpuHolder  GpuHolder      the engine's workers are children of the RolloutWorker
    node 1: GpuHolder      GpuHolder  GpuHolder  GpuHolder      ... of the first GpuHolder of the node
            has begin_load with a NodePart

Called by `rollout_group`, which gives the first process of each node the other GPUs that the engine has there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import EngineLostError
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode
from ppojob_trainer.engines.rollout.options import RolloutOptions
from ppojob_trainer.engines.transports import log_connections
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.errors import CallTimeoutError, NotRenewableError
from ppojob_trainer.worker_groups.worker_process import WorkerContext

if TYPE_CHECKING:
    # vLLM takes seconds to import.
    from ppojob_trainer.engines.rollout.follower import EngineFollower

__all__ = ["GpuHolder", "NodePart", "prepare_part"]

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class NodePart:
    """The part of an engine that the first process of a node starts there.

    other_gpus: of the node's other processes, for CUDA_VISIBLE_DEVICES. node: None if the engine has one node.
    """

    other_gpus: Sequence[str]
    node: EngineNode | None = None


def prepare_part(part: NodePart, device: Device, log_file: Path) -> None:
    """Make a node's GPUs visible to the processes that this one starts, and have NCCL log its connections."""
    if device is not Device.CUDA:
        return
    log_connections(log_file.with_suffix(""))
    if part.other_gpus:
        # Ray makes only the GPU of a process's bundle visible to it. vLLM has not read the variable yet.
        os.environ[_VISIBLE] = ",".join([os.environ[_VISIBLE], *part.other_gpus])


class GpuHolder:
    """See the module's docstring."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, pool: str) -> None:
        self.context, self.spec, self.pool = context, spec, pool
        self._follower: EngineFollower | None = None

    def renew(self) -> None:
        """See `Renewable`: workers of an engine continue."""
        try:
            self.check()
        except EngineLostError as error:
            raise NotRenewableError(f"{error}") from error

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def visible_gpu(self) -> str:
        """Return the GPU's identifier for CUDA_VISIBLE_DEVICES; on the CPU, nothing."""
        return os.environ[_VISIBLE] if self.spec.device is Device.CUDA else ""

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def begin_load(self, part: NodePart | None) -> None:
        """Start the engine's processes on this node; `load` continues. None: another process of the node does.

        Once: those of an earlier attempt continue.
        """
        if part is None or part.node is None or self._follower is not None:
            return
        # vLLM reads its environment at import.
        prepare_part(part, self.spec.device, self.context.log_file)
        from ppojob_trainer.engines.rollout.follower import EngineFollower

        options = RolloutOptions.from_spec(self.spec, self.pool)
        self._follower = EngineFollower(options, part.node, self.context.log_file)
        self._follower.start()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self) -> None:
        """Let the workers of this node allocate their memory, and wait until the engine's workers are all ready.

        Raises:
            CallTimeoutError: they were not ready in time.
            RolloutError: vLLM could not start them.
        """
        if self._follower is None:
            return
        try:
            self._follower.load(self.context.timeout_s)
        except TimeoutError as error:
            limit = f"{self.context.timeout_s:g} s"
            raise CallTimeoutError(f"vLLM's workers were not ready within {limit}: see this role's log") from error

    def check(self) -> None:
        """Raise an EngineLostError if an engine's workers on this node have exited."""
        if self._follower is not None:
            self._follower.check()
