"""The common part of actor, critic and ref: ranks that compute one sharded model together.

Base classes of those roles' workers and groups. A rank joins the process group before it loads anything; a missing path
is found before any process has spent minutes on loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import Trained
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.transports import Transports, log_connections
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

if TYPE_CHECKING:
    # Imports torch; the driver imports this module too.
    from ppojob_trainer.engines.train.fsdp.background_saves import BackgroundSaves

__all__ = ["ModelSize", "ModelSource", "TrainedWorker", "check_fit", "check_model", "join", "sizes_of"]

W = TypeVar("W", bound="TrainedWorker")


def check_model(path: str, trust_remote_code: bool, sizes: Mapping[str, int] | None = None) -> None:
    """Read the configuration of a model, seconds before its weights are loaded.

    Args:
        sizes: by field of the spec, over how many ranks the model will be divided.

    Raises:
        ModelNotFoundError: there is no model.
        ModelUnsupportedError: a part of it is not supported.
        ModelMismatchError: it cannot be divided by these sizes.
    """
    # Imported here: transformers takes seconds, and the driver imports this module too.
    from ppojob_trainer.engines.train.fsdp.divisions import check_divisions
    from ppojob_trainer.engines.train.fsdp.families import refuse_unsupported
    from ppojob_trainer.engines.train.fsdp.model import LoadOptions, read_config

    config = read_config(path, LoadOptions(trust_remote_code=trust_remote_code))
    refuse_unsupported(config)
    check_divisions(config, sizes or {})


def check_fit(role: str, path: str, trust_remote_code: bool, spec: PPOJobSpec) -> None:
    """Compare a model's configuration with the lengths of the data and with the actor's vocabulary.

    Raises:
        ModelMismatchError: its context is too short, or its vocabulary differs.
    """
    from ppojob_trainer.engines.train.fsdp.model import LoadOptions, read_config
    from ppojob_trainer.engines.train.model_fit import check_context, check_vocabulary

    config = read_config(path, LoadOptions(trust_remote_code=trust_remote_code))
    check_context(role, path, config, spec.data)
    if path != spec.model.actor.path:
        check_vocabulary(role, path, config, spec.model)


def sizes_of(role: str, training: Trained) -> dict[str, int]:
    """Return the `sizes` that `check_model` checks for a role that trains."""
    return {
        f"{role}.tensorParallelSize": training.tensor_parallel_size,
        f"{role}.sequenceParallelSize": training.sequence_parallel_size,
    }


@dataclass(frozen=True)
class ModelSource:
    """Which checkpoint a role loads."""

    path: str
    trust_remote_code: bool
    has_output_layer: bool = True


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters of a model (tied ones count once), and memory of a GPU for it, in bytes.

    layers, hidden, intermediate: sizes of the decoder, for the memory of activations; 0 if the configuration does not
    have them. host, host_bytes: address of the first rank's pod or machine, and its memory in bytes.
    """

    num_parameters: int
    gpu_bytes: int
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    host: str = ""
    host_bytes: int = 0


class HasWarmup(Protocol):
    """An engine that can compile before the first step."""

    def warm_up(self, prompt_tokens: int, response_tokens: int) -> None:
        """Run forward and backward as a step does, with sequences of these lengths, and change nothing."""
        ...


class TrainedWorker:
    """A rank of a sharded model."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, training: Trained | None = None) -> None:
        """`training` has the sizes over which the model is divided; None: FSDP shards it over all ranks."""
        self.context = context
        self.spec = spec
        self.training = training
        self.source: ModelSource | None = None
        self._parallel: ParallelMesh | None = None
        self._saves: BackgroundSaves | None = None

    @property
    def parallel(self) -> ParallelMesh:
        """This rank's position in the process group."""
        assert self._parallel is not None, "join() comes first"
        return self._parallel

    @register(dispatch=Dispatch.RANK_ZERO)
    def rendezvous(self) -> tuple[str, int]:
        """Return where rank 0 will listen."""
        from ppojob_trainer.engines.network import free_port

        return self.context.address, free_port(self.context.address)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def join(self, address: str, port: int) -> Transports:
        """Join the process group; return the transports by which this rank sends to others.

        Raises:
            RendezvousError: not all ranks joined in time, or NCCL could not connect.
            ValueError: the sizes do not divide the ranks, or a group that communicates in every layer would span hosts.
        """
        from ppojob_trainer.engines.train.mesh import ParallelDims, init_process_group

        context = self.context
        training = self.training
        dims = ParallelDims.of(context.world_size)
        if training is not None:
            sizes = {"sequence": training.sequence_parallel_size, "tensor": training.tensor_parallel_size}
            dims = ParallelDims.of(context.world_size, fsdp=training.fsdp_size, **sizes)
        if self.spec.device is Device.CUDA:
            log_connections(context.log_file.with_suffix(""))
        self._parallel = init_process_group(
            Device(self.spec.device), context.rank, dims, address, port, context.timeout_s, context.local_world_size
        )
        return self._parallel.connect()

    @register(dispatch=Dispatch.RANK_ZERO)
    def size(self) -> ModelSize:
        """Count the parameters of `source` without loading it; return them with the memory of GPU and host."""
        import torch
        from transformers import AutoModel, AutoModelForCausalLM

        from ppojob_trainer.engines.host import host_bytes
        from ppojob_trainer.engines.train.fsdp.experts import active_intermediate
        from ppojob_trainer.engines.train.fsdp.model import LoadOptions, read_config

        assert self.source is not None, "the role says in its constructor which model it loads"
        trust = self.source.trust_remote_code
        config = read_config(self.source.path, LoadOptions(trust_remote_code=trust))
        kind: Any = AutoModelForCausalLM if self.source.has_output_layer else AutoModel
        with torch.device("meta"):
            module = kind.from_config(config, trust_remote_code=trust)
        count = sum(parameter.numel() for parameter in module.parameters())

        def number(name: str) -> int:
            return int(getattr(config, name, None) or 0)

        return ModelSize(
            num_parameters=count,
            gpu_bytes=torch.cuda.get_device_properties(0).total_memory,
            layers=number("num_hidden_layers"),
            hidden=number("hidden_size"),
            intermediate=active_intermediate(config),
            host=self.context.address,
            host_bytes=host_bytes(),
        )

    def warm_up(self, engine: HasWarmup, *, is_compiled: bool) -> None:
        """Have an engine compile its layers before the first step; then release the memory that this needed."""
        if is_compiled:
            engine.warm_up(self.spec.data.max_prompt_length, self.spec.data.max_response_length)
        self.free_cached_memory()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def free_cached_memory(self) -> None:
        """Release the GPU memory that torch caches, because vLLM, a separate process, needs it."""
        import torch

        if self.spec.device is Device.CUDA:
            torch.cuda.empty_cache()

    def background_saves(self) -> BackgroundSaves:
        """The saves of this rank that run in the background."""
        from ppojob_trainer.engines.train.fsdp.background_saves import BackgroundSaves

        self._saves = self._saves or BackgroundSaves()
        return self._saves

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def is_saved(self) -> bool:
        """Whether this rank has finished the save that it started.

        Raises:
            CheckpointUnwritableError: the checkpoint could not be written.
        """
        return self._saves is None or self._saves.is_done()


async def join(group: WorkerGroup[W]) -> list[Transports]:
    """Let all ranks of a group join at rank 0's address; return the transports by which each sends to others."""
    address, port = await group.call(TrainedWorker.rendezvous)
    return await group.call(TrainedWorker.join, address, port)
