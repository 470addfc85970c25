"""Models as the engines train them: from HuggingFace, cut to a pipeline stage, sharded by FSDP2.

Called by the engine. `modules` has the forward pass on packed tokens. The model's own output layer is not called:
`maths.log_probs` goes from hidden states to log-probs in chunks. Each rank reads its own shards of the checkpoint
(`loading`), so a host holds the model once however many ranks it has. It refuses models whose output is more than a
linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from ppojob_api.v1alpha1.model import FrozenModel, LoRA, TrainedModel
from ppojob_trainer.engines.errors import ModelNotFoundError, ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp.attention import IMPLEMENTATION
from ppojob_trainer.engines.train.fsdp.experts import IMPLEMENTATION as EXPERTS_IMPLEMENTATION
from ppojob_trainer.engines.train.fsdp.experts import add_counts, divide_experts, ready_parameters, shard_experts
from ppojob_trainer.engines.train.fsdp.families import refuse_unsupported
from ppojob_trainer.engines.train.fsdp.layers import prepare_layer
from ppojob_trainer.engines.train.fsdp.loading import (
    Conversions,
    allocate,
    find_tensors,
    load_weights,
    open_weights,
    without_memory,
    write_shard,
)
from ppojob_trainer.engines.train.fsdp.lora import add_adapters, initial_adapters
from ppojob_trainer.engines.train.fsdp.modules import PolicyModule, ValueModule
from ppojob_trainer.engines.train.fsdp.routing import prepare_routers
from ppojob_trainer.engines.train.fsdp.stages import Elsewhere, Stage, cut, parts_of
from ppojob_trainer.engines.train.fsdp.tensor_parallel import divide, gather_parts, local
from ppojob_trainer.engines.train.fsdp.token_slices import TokenSlices
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import read_config

# A value head's weight and bias in the checkpoints of transformers (token classification), OpenRLHF and TRL.
VALUE_HEAD_NAMES: Final = ("score", "value_head", "v_head.summary")

MESSAGE_BYTES: Final = 256 * 2**20
"""Layers that stay gathered are sent in one message up to this many bytes: NVLink takes about a millisecond for them,
as the CPU does to launch a message of any size and to wait for the other ranks' launch."""

# A progress bar for every rank would fill the logs.
disable_progress_bar()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. `dtype` is that of the computation; gradient sums and what is trained are float32.

    is_frozen: nothing is trained; lora: only adapters are. Frozen weights are loaded in `dtype`, whatever the
    checkpoint has: that is what is computed with. stays_gathered: the layers are gathered once, several in one message,
    and freed by `reshard` alone.
    """

    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    dtype: torch.dtype = torch.bfloat16
    is_frozen: bool = False
    lora: LoRA | None = None
    activation_offload: bool = False
    stays_gathered: bool = False

    @classmethod
    def of(cls, model: TrainedModel | FrozenModel, dtype: torch.dtype, *, stays_gathered: bool = False) -> LoadOptions:
        """Return the options of a role's model."""
        if isinstance(model, FrozenModel):
            return cls(
                trust_remote_code=model.trust_remote_code,
                compile=bool(model.compile),
                dtype=dtype,
                is_frozen=True,
                stays_gathered=stays_gathered,
            )
        return cls(
            trust_remote_code=model.trust_remote_code,
            gradient_checkpointing=model.gradient_checkpointing,
            compile=model.compile,
            dtype=dtype,
            lora=model.lora,
            activation_offload=model.activation_offload,
            stays_gathered=stays_gathered,
        )


def load_policy(path: str, options: LoadOptions, parallel: ParallelMesh, *, seed: int = 0) -> PolicyModule:
    """Load a causal language model and shard it; `seed` is that of new adapters.

    Raises:
        ModelNotFoundError: no readable model in `path`.
        ModelUnsupportedError: it has a part that is not computed here.
    """
    config = read_config(path, trust_remote_code=options.trust_remote_code)
    module, conversions = build_policy(config, options, parallel)
    allocate(module, parallel.device)
    _fill(path, module, conversions, _initial_adapters(AutoModelForCausalLM, module, config, options, seed))
    return module


def build_policy(
    config: PretrainedConfig, options: LoadOptions, parallel: ParallelMesh
) -> tuple[PolicyModule, Conversions]:
    """Build and shard a causal language model without memory.

    Raises:
        ModelUnsupportedError: it has a part that is not computed here.
    """
    refuse_unsupported(config)
    language_model = _build(AutoModelForCausalLM, config, options)
    module = PolicyModule(language_model, activation_offload=options.activation_offload)
    if module.output_layer.bias is not None:
        raise ModelUnsupportedError(
            f"{config.model_type} in {config.name_or_path} has a bias in its output layer, which is not supported: use "
            "a model without it"
        )
    module.stage = _cut(AutoModelForCausalLM, language_model, module.backbone, options, parallel)
    conversions = Conversions(language_model)
    _divide(module, parallel)
    _shard(module, options, parallel)
    return module, conversions


def load_critic(path: str, options: LoadOptions, parallel: ParallelMesh, *, seed: int) -> ValueModule:
    """Load a decoder with the value head that its checkpoint holds, else with a new one drawn from `seed`.

    New adapters are drawn from `seed` too; the value head is trained beside them.

    Raises:
        ModelNotFoundError: no readable model in `path`.
        ModelUnsupportedError: it has a part that is not computed here.
    """
    config = read_config(path, trust_remote_code=options.trust_remote_code)
    module, conversions = build_critic(config, options, parallel)
    allocate(module, parallel.device)
    adapters = _initial_adapters(AutoModel, module, config, options, seed)
    _fill(path, module, conversions, adapters, head_seed=seed)
    return module


def build_critic(
    config: PretrainedConfig, options: LoadOptions, parallel: ParallelMesh
) -> tuple[ValueModule, Conversions]:
    """Build and shard a decoder with a value head without memory.

    Raises:
        ModelUnsupportedError: it has a part that is not computed here.
    """
    refuse_unsupported(config)
    language_model = _build(AutoModel, config, options)
    head = nn.Linear(config.hidden_size, 1, device="meta")
    module = ValueModule(language_model, head, activation_offload=options.activation_offload)
    module.stage = _cut(AutoModel, language_model, module.backbone, options, parallel)
    if module.stage is not None and not module.stage.peers.is_last:
        module.value_head = None
    conversions = Conversions(language_model)
    _divide(module, parallel)
    in_float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if module.value_head is not None:
        # It is so small that a second message for it would cost more than keeping it.
        fully_shard(module.value_head, mesh=parallel.mesh, mp_policy=in_float32, reshard_after_forward=False)
    _shard(module, options, parallel)
    return module, conversions


def _cut(
    auto: Any, language_model: PreTrainedModel, backbone: nn.Module, options: LoadOptions, parallel: ParallelMesh
) -> Stage | None:
    """Cut a whole model to this rank's pipeline stages, if there is a pipeline.

    Raises:
        ModelUnsupportedError: the model cannot be divided into stages.
    """
    if parallel.pipeline is None:
        return None
    layers = _layers(backbone)
    whole = _whole(auto, language_model.config, options)
    peers = parallel.pipeline
    return cut(language_model, backbone, parts_of(whole, len(layers), peers.size, peers.virtual), peers)


def _whole(auto: Any, config: PretrainedConfig, options: LoadOptions) -> PreTrainedModel:
    """Build a whole model with its adapters, without memory: for the names and shapes of all stages."""
    whole = _build(auto, config, options)
    if options.lora is not None:
        add_adapters(whole, _layers(whole.base_model), options.lora)
    return whole


def _initial_adapters(
    auto: Any, module: PolicyModule | ValueModule, config: PretrainedConfig, options: LoadOptions, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial adapters of the module with their names in it, those of a stage as those of the whole model."""
    if options.lora is None or module.stage is None:
        yield from initial_adapters(module, seed)
        return
    mine = dict(module.named_parameters())
    for name, tensor in initial_adapters(_whole(auto, config, options), seed):
        if f"language_model.{name}" in mine:
            yield f"language_model.{name}", tensor


def _build(auto: Any, config: PretrainedConfig, options: LoadOptions) -> PreTrainedModel:
    """Build the architecture without memory, in the dtype of its parameters."""
    config.use_cache = False
    is_frozen = options.is_frozen or options.lora is not None
    with without_memory():
        model: PreTrainedModel = auto.from_config(
            config,
            # In another dtype, each use would make a copy in this one.
            dtype=options.dtype if is_frozen else torch.float32,
            attn_implementation=IMPLEMENTATION,
            experts_implementation=EXPERTS_IMPLEMENTATION,
            trust_remote_code=options.trust_remote_code,
        )
    model.tie_weights()
    _keep_in_float32(model)
    add_counts(model)
    if is_frozen:
        model.requires_grad_(False)
    return model


def _keep_in_float32(model: PreTrainedModel) -> None:
    """Keep the buffers in float32 that transformers' loader does, such as the bias of DeepSeek-V3's routers."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if name in kept and buffer is not None:
                module._buffers[name] = buffer.float()


def _divide(module: PolicyModule | ValueModule, parallel: ParallelMesh) -> None:
    """Divide layers and experts over the ranks that compute them together."""
    divide(module, module.language_model, module.backbone, parallel)
    divide_experts(module, parallel)
    # Around the routers' forward passes, which have been replaced by now.
    prepare_routers(module, TokenSlices.of(parallel))


def _shard(module: PolicyModule | ValueModule, options: LoadOptions, parallel: ParallelMesh) -> None:
    language_model, backbone = module.language_model, module.backbone
    if options.lora is not None:
        # The layers are divided by now, and each adapter is divided as its layer.
        add_adapters(language_model, _layers(backbone), options.lora)
    runs = [list(run) for is_elsewhere, run in groupby(_layers(backbone), _is_elsewhere) if not is_elsewhere]
    layers = list(chain.from_iterable(runs))
    precision = MixedPrecisionPolicy(param_dtype=options.dtype, reduce_dtype=torch.float32)
    for layer in layers:
        prepare_layer(
            layer,
            recomputes=options.gradient_checkpointing,
            compiles=options.compile,
            gathers_experts=parallel.experts is not None,
        )
    # A rank that holds everything has nothing to gather again.
    is_freed = parallel.dims.fsdp > 1 and not options.stays_gathered
    left = ready_parameters(module, parallel, precision)
    messages: Iterable[list[nn.Module]] = ([layer] for layer in layers)
    if options.stays_gathered:
        # A pass computes one stage of a rank, and its layers are not next to those of another.
        messages = chain.from_iterable(layers_of_messages(run, options.dtype, left) for run in runs)
    shard = partial(fully_shard, mesh=parallel.mesh, mp_policy=precision, ignored_params=left)
    for together in messages:
        shard_experts(together, parallel, precision, left, stays_gathered=options.stays_gathered)
        shard(together, reshard_after_forward=is_freed)
    sharded = shard(module)
    gather_parts(module)
    if options.stays_gathered:
        sharded.set_reshard_after_backward(False)


def _is_elsewhere(layer: nn.Module) -> bool:
    return isinstance(layer, Elsewhere)


def _layers(backbone: nn.Module) -> nn.ModuleList:
    """Return the decoder layers.

    Raises:
        ModelUnsupportedError: they are not where they are expected.
    """
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelUnsupportedError(f"{type(backbone).__name__} has no list `layers` of decoder layers to shard")
    return layers


def layers_of_messages(
    layers: Iterable[nn.Module], dtype: torch.dtype, left: Set[nn.Parameter]
) -> Iterator[list[nn.Module]]:
    """Yield the layers in order, in groups of about `MESSAGE_BYTES`, without the parameters of `left`: no message has
    them."""
    together: list[nn.Module] = []
    size = 0
    for layer in layers:
        together.append(layer)
        size += sum(local(one).numel() for one in layer.parameters() if one not in left) * dtype.itemsize
        if size >= MESSAGE_BYTES:
            yield together
            together, size = [], 0
    if together:
        yield together


def _fill(
    path: str,
    module: PolicyModule | ValueModule,
    conversions: Conversions,
    adapters: Iterable[tuple[str, Tensor]],
    head_seed: int | None = None,
) -> None:
    """Read this rank's shards of a checkpoint, and the value head if `head_seed` is given.

    Raises:
        ModelNotFoundError: the checkpoint cannot be read, or lacks a parameter.
    """
    with open_weights(path) as weights:
        aliases = {} if module.stage is None else module.stage.aliases
        missing = load_weights(module.language_model, weights, conversions, aliases)
    if missing:
        raise ModelNotFoundError(
            f"model path {path} has no weights for {', '.join(missing[:4])}: use the checkpoint of a "
            f"{module.language_model.config.model_type}"
        )
    parameters = module.state_dict()
    head: dict[str, Tensor] = {}
    # Of a pipeline, the last stage has it.
    if head_seed is not None and "value_head.weight" in parameters:
        head = _value_head(path, parameters["value_head.weight"].shape[1], head_seed)
    for name, tensor in chain(adapters, head.items()):
        write_shard(parameters[name], tensor, name)


def _value_head(path: str, hidden_size: int, seed: int) -> dict[str, Tensor]:
    """Return the value head of a folder, else one drawn from `seed`."""
    found = find_tensors(path, [f"{name}.{part}" for name in VALUE_HEAD_NAMES for part in ("weight", "bias")])
    for name in VALUE_HEAD_NAMES:
        if f"{name}.weight" in found:
            bias = found.get(f"{name}.bias", torch.zeros(1))
            return {"value_head.weight": found[f"{name}.weight"], "value_head.bias": bias}
    generator = torch.Generator().manual_seed(seed)
    # Small, so that the first values are near 0 and the first advantages are about the rewards.
    weight = torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)
    return {"value_head.weight": weight, "value_head.bias": torch.zeros(1)}
