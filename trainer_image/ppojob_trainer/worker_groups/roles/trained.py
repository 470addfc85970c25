"""What actor, critic, ref and reward model have in common: ranks that compute one model together.

Base classes of those roles' workers. A rank joins the process group before it loads anything; a missing path
is found before any process has spent minutes on loading.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ppojob_api.v1alpha1.engine import Engine
from ppojob_api.v1alpha1.model import LoRA
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import Trained
from ppojob_trainer.engines.errors import EngineError
from ppojob_trainer.engines.network import connect, listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.engine import EngineSetup, TrainEngine
from ppojob_trainer.engines.train.loader import make_engine, parameters_of_adapters, parameters_of_stages
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.engines.transports import Transports, log_connections
from ppojob_trainer.protocol import DataProto, Keys
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.errors import NotRenewableError
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from transformers import PretrainedConfig

__all__ = ["EngineWorker", "ModelSize", "ModelSource", "TrainedWorker", "check_fit", "dims_of", "join", "size_of"]

logger = logging.getLogger(__name__)

W = TypeVar("W", bound="TrainedWorker")

_POLL_S = 0.1


def check_fit(role: str, source: ModelSource, spec: PPOJobSpec) -> None:
    """Compare a model's configuration with the lengths of the data and with the actor's vocabulary.

    Raises:
        ModelNotFoundError: there is no model.
        ModelMismatchError: its context is too short, or its vocabulary differs.
    """
    # Imported here: transformers takes seconds, and the driver imports this module too.
    from ppojob_trainer.engines.train.model_fit import check_context, check_vocabulary, read_config

    config = read_config(source.path, trust_remote_code=source.trust_remote_code)
    check_context(role, source.path, config, spec.data)
    if source.path != spec.model.actor.path:
        check_vocabulary(role, source.path, config, spec.model)


@dataclass(frozen=True)
class ModelSource:
    """Which checkpoint a role loads, and the adapters that it trains."""

    path: str
    trust_remote_code: bool
    has_output_layer: bool = True
    lora: LoRA | None = None


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters of a model (tied ones count once), and memory of a GPU for it, in bytes.

    layers, hidden, intermediate: sizes of the decoder, for the memory of activations; 0 if the configuration does not
    have them. in_experts: parameters of fused experts; experts_per_token: those that compute a token; 0 if the model is
    no mixture. in_embeddings: parameters of a language model's embedding and output layer. host, host_bytes: address of
    the first rank's pod or machine, and its memory in bytes. stages: number of parameters of each pipeline stage, or of
    all stages that a rank has; empty without a pipeline. in_adapters: parameters of adapters, which no number above
    has; in_expert_adapters: those of them that are adapters of experts.
    """

    num_parameters: int
    gpu_bytes: int
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    in_experts: int = 0
    experts_per_token: int = 0
    in_embeddings: int = 0
    host: str = ""
    host_bytes: int = 0
    stages: tuple[int, ...] = ()
    in_adapters: int = 0
    in_expert_adapters: int = 0

    @property
    def largest_stage(self) -> int:
        """The most of `stages`; without a pipeline, of the model."""
        return max(self.stages, default=self.num_parameters)


def size_of(config: PretrainedConfig, source: ModelSource, gpu_bytes: int, training: Trained | None) -> ModelSize:
    """Count the parameters of a model without its weights; `training` has the sizes that divide it.

    Raises:
        ModelUnsupportedError: the model has no layers of a name in `source.lora.targetModules`.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from ppojob_trainer.engines.train.model_fit import active_intermediate, embedding_parameters

    kind: Any = AutoModelForCausalLM if source.has_output_layer else AutoModel
    with torch.device("meta"):
        module = kind.from_config(config, trust_remote_code=source.trust_remote_code)
    num_ranks, virtual = 1, 1
    if training is not None:
        num_ranks, virtual = training.pipeline_parallel_size, training.virtual_pipeline_parallel_size

    def number(name: str) -> int:
        return int(getattr(config, name, None) or 0)

    is_fsdp = training is None or training.engine is Engine.FSDP
    size = ModelSize(
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        gpu_bytes=gpu_bytes,
        layers=number("num_hidden_layers"),
        hidden=number("hidden_size"),
        intermediate=active_intermediate(config),
        experts_per_token=number("num_experts_per_tok"),
        in_experts=sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 3),
        in_embeddings=embedding_parameters(config) if source.has_output_layer else 0,
        stages=parameters_of_stages(module, num_ranks, virtual) if num_ranks > 1 else (),
    )
    if source.lora is None or not is_fsdp:
        return size
    # After all other counts: the module gets the adapters.
    in_adapters, of_experts = parameters_of_adapters(module, source.lora)
    return replace(size, in_adapters=in_adapters, in_expert_adapters=of_experts)


def dims_of(training: Trained | None, world_size: int, per_host: int, config: PretrainedConfig | None) -> ParallelDims:
    """Return how a role's ranks are divided.

    Args:
        training: has the sizes; None: FSDP shards over all ranks.
        per_host: ranks on a host.
        config: of the model, whose heads decide how many sequence-parallel ranks gather keys; None: none of them.
    """
    if training is None:
        return ParallelDims.of(world_size)
    sequence, context = training.sequence_parallel_size, 1
    if config is not None and sequence > 1:
        from ppojob_trainer.engines.train.model_fit import split_sequence

        sequence, context = split_sequence(config, sequence, training.tensor_parallel_size, per_host)
    return ParallelDims.of(
        world_size,
        fsdp=training.fsdp_size,
        sequence=sequence,
        context=context,
        tensor=training.tensor_parallel_size,
        pipeline=training.pipeline_parallel_size,
        expert=training.expert_parallel_size,
        virtual=training.virtual_pipeline_parallel_size,
    )


class TrainedWorker:
    """A rank of a sharded model."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, training: Trained | None = None) -> None:
        """`training` has the sizes over which the model is divided; None: FSDP shards it over all ranks."""
        self.context = context
        self.spec = spec
        self.training = training
        self.source: ModelSource | None = None
        self._parallel: ParallelMesh | None = None
        self._store: TCPStore | None = None
        self._transports: Transports | None = None
        self._is_loaded = False

    def renew(self) -> None:
        """See `Renewable`."""
        if not self._is_loaded:
            raise NotRenewableError("its model was not loaded yet")
        self.free_cached_memory()
        if self.spec.device is Device.CUDA:
            import torch

            # Raises if the GPU has failed, so that this process is not kept.
            torch.cuda.synchronize()

    @property
    def parallel(self) -> ParallelMesh:
        """This rank's position in the process group."""
        assert self._parallel is not None, "join() comes first"
        return self._parallel

    @register(dispatch=Dispatch.RANK_ZERO)
    def rendezvous(self) -> tuple[str, int]:
        """Listen for the other ranks; return where."""
        self._store = self._store or listen(self.context.address, self.context.timeout_s)
        return self.context.address, self._store.port

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def join(self, address: str, port: int) -> Transports:
        """Join the process group, unless this rank is in it; return the transports by which it sends to others.

        Raises:
            RendezvousError: not all ranks joined in time, or NCCL could not connect.
            ValueError: the sizes do not divide the ranks, or a group that communicates in every layer would span hosts.
        """
        if self._transports is not None:
            return self._transports
        context = self.context
        dims = dims_of(self.training, context.world_size, context.local_world_size, self._config_of_split())
        if self.spec.device is Device.CUDA:
            log_connections(context.log_file.with_suffix(""))
        if self._store is None:
            self._store = connect(address, port, context.timeout_s)
        self._parallel = init_process_group(
            Device(self.spec.device), context.rank, dims, self._store, context.timeout_s, context.local_world_size
        )
        self._transports = self._parallel.connect()
        return self._transports

    def _config_of_split(self) -> PretrainedConfig | None:
        """Return the model's configuration if it decides how the ranks are divided; a user's engine decides itself."""
        training = self.training
        if training is None or training.sequence_parallel_size == 1 or training.engine is not Engine.FSDP:
            return None
        from ppojob_trainer.engines.train.model_fit import read_config

        assert self.source is not None, "the role says in its constructor which model it loads"
        return read_config(self.source.path, trust_remote_code=self.source.trust_remote_code)

    @register(dispatch=Dispatch.RANK_ZERO)
    def size(self) -> ModelSize:
        """Count the parameters of `source` without loading it; return them with the memory of GPU and host."""
        import torch

        from ppojob_trainer.engines.host import host_bytes
        from ppojob_trainer.engines.train.model_fit import read_config

        assert self.source is not None, "the role says in its constructor which model it loads"
        config = read_config(self.source.path, trust_remote_code=self.source.trust_remote_code)
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory
        size = size_of(config, self.source, gpu_bytes, self.training)
        return replace(size, host=self.context.address, host_bytes=host_bytes())

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def free_cached_memory(self) -> None:
        """Release the GPU memory that torch caches, because vLLM, a separate process, needs it."""
        import torch

        if self.spec.device is Device.CUDA:
            torch.cuda.empty_cache()


class EngineWorker(TrainedWorker):
    """A rank of actor, critic or ref: a model that a `TrainEngine` computes."""

    source: ModelSource

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, training: Trained) -> None:
        super().__init__(context, spec, training)
        self._engine: TrainEngine | None = None
        self._is_prepared = False

    @cached_property
    def setup(self) -> EngineSetup:
        """Which model the role's engine computes, and how. Each role has its own."""
        raise NotImplementedError

    @property
    def engine(self) -> TrainEngine:
        """The role's engine, which `load` loads."""
        if self._engine is None:
            self._engine = make_engine(self.setup)
        return self._engine

    def check_recording(self, batch: DataProto) -> None:
        """Raise a ProtocolError if the engine replays experts and the rollout recorded none."""
        if self.setup.replays_experts:
            batch.ragged(Keys.ROUTED_EXPERTS)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self, stays_gathered: bool, total_steps: int) -> None:
        """Load the model, after `join`; compile it if the spec asks for that, before the first step. Once.

        Args:
            stays_gathered: the parameters stay gathered through an optimizer step.
            total_steps: of the run, for the learning-rate schedule.
        """
        if self._is_loaded:
            return
        self.engine.load(self.parallel, total_steps=total_steps, stays_gathered=stays_gathered)
        if self.setup.model.compile:
            self.engine.warm_up(self.spec.data.max_prompt_length, self.spec.data.max_response_length)
        self.free_cached_memory()
        self._is_loaded = True

    def renew(self) -> None:
        """See `Renewable`. Nobody needs what a save in the background still writes."""
        super().renew()
        is_done = False
        while not is_done:
            time.sleep(_POLL_S)
            try:
                is_done = self.engine.is_saved()
            except EngineError as error:
                logger.info("a checkpoint of the last attempt was not written: %s", error)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def prepare_saves(self) -> None:
        """Prepare for saves in the background, in the background, if the engine can. Once."""
        if self._is_prepared:
            return
        self._is_prepared = True
        prepare = getattr(self.engine, "prepare_saves", None)
        if prepare is not None:
            prepare()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def save(self, location: str, in_background: bool = False) -> None:
        """Write this rank's part of a checkpoint to a new location; in the background, `is_saved` says when."""
        self.engine.save(location, in_background=in_background)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def is_saved(self) -> bool:
        """Whether this rank has finished the save that it started.

        Raises:
            CheckpointUnwritableError: the checkpoint could not be written.
        """
        return self.engine.is_saved()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def restore(self, location: str) -> None:
        """Resume from a checkpoint in a folder or at an address in an object store."""
        self.engine.restore(location)


async def join(group: WorkerGroup[W]) -> list[Transports]:
    """Let all ranks of a group join at rank 0's address; return the transports by which each sends to others."""
    address, port = await group.call(TrainedWorker.rendezvous)
    return await group.call(TrainedWorker.join, address, port)
