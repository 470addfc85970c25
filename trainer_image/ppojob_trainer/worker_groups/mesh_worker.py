"""A base class for users' workers whose processes compute rows together: tensor parallelism, pipelines.

    class Judge(MeshWorker):
        def __init__(self, context, path):
            super().__init__(context)
            self.path = path

        def joined(self):
            stages, shards, tensor = self.sizes
            mesh = init_device_mesh("cuda", (stages, shards, tensor))
            ...

        @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=(Keys.INPUT_IDS, Keys.RESPONSE_MASK))
        def judge(self, batch: DataProto) -> DataProto: ...

`spec.workers[]` has the sizes (tensorParallelSize, pipelineParallelSize). Ranks are divided like those of actor and
critic: a stage is a consecutive part of the ranks, and in it consecutive ranks compute a layer together. Called by
`custom`.
"""

from __future__ import annotations

from torch._C._distributed_c10d import TCPStore

from ppojob_trainer.engines.network import connect, join_process_group, listen
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["MeshWorker"]


class MeshWorker:
    """A worker whose processes are one process group of torch.distributed: gloo, and NCCL with `usesGPU`.

    sizes: number of stages, of data-parallel ranks, and of ranks that compute a layer together; set before `joined`.
    """

    sizes: tuple[int, int, int]

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._store: TCPStore | None = None

    def joined(self) -> None:
        """Called in each process when all have joined, before the first step; a place to load a model."""
        return None

    @register(dispatch=Dispatch.RANK_ZERO)
    def rendezvous(self) -> tuple[str, int]:
        """Listen for the other ranks; return where."""
        self._store = self._store or listen(self.context.address, self.context.timeout_s)
        return self.context.address, self._store.port

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def join(self, address: str, port: int, stages: int, of_layer: int, uses_gpu: bool) -> None:
        """Join the process group, then call `joined`.

        Args:
            uses_gpu: a GPU is reserved for the process. Without one, it sees the node's GPUs.

        Raises:
            RendezvousError: rank 0 does not listen there, or not all ranks joined in time.
        """
        context = self.context
        self._store = self._store or connect(address, port, context.timeout_s)
        name = f"{context.role} rank {context.rank}"
        join_process_group(name, self._store, context.rank, context.world_size, context.timeout_s, is_cuda=uses_gpu)
        self.sizes = stages, context.world_size // (stages * of_layer), of_layer
        self.joined()
