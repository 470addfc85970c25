"""How responses are generated: `spec.rollout`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import RawObject, ShortText
from ppojob_api.v1alpha1.speculative import SpeculativeSpec

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2
"""vLLM 0.32 refuses more than the second, and takes the first for anything between 0 and it."""


class Quantization(StrEnum):
    """In which format an engine stores and multiplies the weights of its linear layers."""

    FP8 = "FP8"


class ValidationSampling(ApiModel):
    """Sampling for validation."""

    temperature: float = Field(default=0.0, ge=0, le=MAX_TEMPERATURE)
    """0: take the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this total probability."""
    samples_per_prompt: int = Field(default=1, ge=1, le=4096)
    """Responses for each prompt."""


class RolloutSpec(ApiModel):
    """Generating responses with vLLM."""

    samples_per_prompt: int = Field(default=1, ge=1, le=4096)
    """Responses for each prompt."""
    temperature: float = Field(
        default=1.0,
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        # The API server cuts off the fraction of a bound before it compares an integer, and so would take 0.
        json_schema_extra=rules(
            Rule(rule=f"self >= {MIN_TEMPERATURE}", message=f"must be greater than or equal to {MIN_TEMPERATURE}")
        ),
    )
    """Sampling temperature; log-probs use the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this total probability."""
    top_k: int = Field(default=-1, ge=-1, le=10_000_000)
    """Sample from this many most likely tokens; -1: from all."""
    stop: Annotated[list[ShortText], Field(max_length=16)] = Field(default_factory=list)
    """Strings that end a response."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token, for benchmarks."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU's memory for vLLM's weights and cache."""
    max_num_seqs: int = Field(default=1024, ge=1, le=1_048_576)
    """Sequences that one replica processes at the same time."""
    max_num_batched_tokens: int = Field(default=8192, ge=1, le=16_777_216)
    """Tokens per vLLM step."""
    enable_chunked_prefill: bool = True
    """Prefill long prompts in parts. No effect on CPU, because it would break per-request seeds there."""
    enable_prefix_caching: bool = True
    """Reuse the cache of common prefixes within a step."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """GPUs that divide each layer of a replica. A replica has tensorParallelSize times pipelineParallelSize GPUs: a
    part of a node, or whole nodes, for models that no node holds. The pool has as many replicas as its GPUs allow. With
    device CPU: nodes in place of GPUs, with one worker on each."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Stages of a replica: each has consecutive layers, on tensorParallelSize GPUs. For replicas of several nodes: a
    stage sends two vectors for each token to the next one, and tensor parallelism exchanges two in each layer. But the
    stages compute a token one after the other, and each needs other sequences meanwhile. Inside a node, prefer
    tensorParallelSize. Not with speculative or routingReplay."""
    enable_expert_parallel: bool = False
    """For mixtures of experts: the GPUs of a replica divide the experts of each layer, and each GPU holds whole ones.
    false: each GPU holds a slice of every expert. Attention is divided by heads in both cases. Set it to true if slices
    of experts get so small that their matrix products are slow. It needs tensorParallelSize above 1, which must divide
    the number of experts, and device CUDA."""
    log_probs: bool = True
    """The engine reports log-probs, which the trainer compares with its own. The default is true because a difference
    shows wrong weights or kernels, and because it costs little: a twentieth of the generation of a small model."""
    sleep: bool = True
    """Release GPU memory after each generation if a trained role shares the GPU. The default is true because it needs
    the least memory. false keeps it, which is faster. Set it to false if gpuMemoryUtilization leaves enough memory for
    the other roles."""
    cpu_cache_gib: int = Field(default=1, ge=1, le=4096)
    """With device CPU, memory for the key-value cache on each node of a replica, in GiB."""
    speculative: SpeculativeSpec | None = None
    """Draft tokens when few sequences are left, to shorten the tail of a generation; `{}` takes the defaults. Absent:
    no drafts."""
    routing_replay: bool = False
    """For mixtures of experts (Rollout Routing Replay, Ma et al. 2025): the engine records the experts of each token,
    and the actor's log-probs and updates use these instead of their own choice. Engine and trainer may choose
    differently where two experts score almost the same; log-probs then differ. The reference uses the recorded experts
    too, unless model.ref.path is another checkpoint, and the critic chooses its own. It costs a byte for each token,
    layer and chosen expert, and steps may be slower, because vLLM's own scheduler runs."""
    quantization: Quantization | None = None
    """FP8: the engine generates with linear layers in 8-bit floating point (E4M3), and rounds each push of the weights
    to it. The trainer keeps bfloat16 and float32, so the engine's policy is not quite the trained one: FP8 needs
    algorithm.rolloutCorrection, and GPUs with FP8 units (Ada, Hopper or later). Not for mixtures of
    experts, nor for latent attention (MLA). Absent: the engine computes with the trainer's weights."""
    engine_args: RawObject = Field(default_factory=dict)
    """More arguments of vLLM's AsyncEngineArgs, by their own names, such as block_size. Arguments that have a field
    here, or that the trainer sets itself, are rejected."""
    validation: ValidationSampling = ValidationSampling()
    """Sampling for validation."""

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of an engine; with device CPU, its nodes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
