"""The settings of a rollout engine, its sampling options, and the environment that vLLM needs.

Called by the rollout role before vLLM is imported; this module does not import it. It refuses nothing, because the spec
was checked before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ppojob_api.v1alpha1.rollout import Quantization
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.speculative import SpeculativeSpec
from ppojob_trainer.engines.environment import base_environment
from ppojob_trainer.engines.precision import precision_of

WORKER_EXTENSION: Final = "ppojob_trainer.engines.rollout.worker_extension.WeightReceiverExtension"
SCHEDULER: Final = "ppojob_trainer.engines.rollout.scheduler.ResponseScheduler"
GPU_WORKER: Final = "ppojob_trainer.engines.rollout.waiting_worker.WaitingWorker"

GPU_FREE_FILE: Final = "PPOJOB_GPU_FREE_FILE"
"""Variable with the path of a file. Once it exists, vLLM's processes may measure their GPU's memory."""
OWNER: Final = "PPOJOB_ENGINE_OWNER"
"""Variable with the number of the process that starts vLLM, for processes that wait for the file."""
WORKER_FAILURE: Final = "ppojob_failure"
"""Key of the message in what a worker of vLLM returns instead of raising; see the worker extension."""
WORKER_ADDRESS: Final = "ppojob_address"
"""Key of the address of the worker's node beside it, in an engine of several nodes; else None."""
HOST_ADDRESS: Final = "VLLM_HOST_IP"
"""vLLM's variable with the address of a node, in an engine of several nodes."""
AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable that says that another process has opened the store in which the ranks meet."""
VLLM_QUANTIZATION: Final[Mapping[Quantization, str]] = {Quantization.FP8: "fp8_per_channel"}
"""Name of vLLM's online quantization: vLLM loads bfloat16 and rounds it. A scale for each output of a layer and one for
each token: of vLLM's three FP8 formats, the one whose kernels are in its package and need no compiler at run time."""
RECORDS_EXPERTS: Final = "ppojob_records_experts"
"""Entry of vLLM's `additional_config` on the CPU: the scheduler returns the experts that `routed_experts` records."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled. temperature 0 takes the most likely token; top_k -1 keeps all tokens.

    log_probs: whether the log-prob of each token is returned; experts: whether the experts of each token are.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    log_probs: bool = True
    experts: bool = False

    @classmethod
    def training(cls, spec: PPOJobSpec) -> SamplingOptions:
        """Sampling for training."""
        rollout = spec.rollout
        return cls(
            max_tokens=spec.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
            ignore_eos=rollout.ignore_eos,
            log_probs=rollout.log_probs,
            experts=rollout.routing_replay,
        )

    @classmethod
    def validation(cls, spec: PPOJobSpec) -> SamplingOptions:
        """Sampling for validation."""
        return cls(
            max_tokens=spec.data.max_response_length,
            temperature=spec.rollout.validation.temperature,
            top_p=spec.rollout.validation.top_p,
            stop=tuple(spec.rollout.stop),
            log_probs=False,
        )


@dataclass(frozen=True)
class RolloutOptions:
    """Settings of one replica. Lengths are in tokens; `sleeps`: it releases memory, because the GPU is shared.

    tensor_parallel_size: workers that divide each layer. pipeline_parallel_size: stages of layers, each with so many
    workers. On CUDA, a worker has a GPU, and the replica's process must see all GPUs of its node before it starts.
    enable_expert_parallel: workers divide the experts of each layer, and not each expert; on CUDA only.
    updates_in_flight: its weights may change while it generates. routing_replay: it records the experts of each token.
    quantization: of its linear layers.
    """

    path: str
    device: Device
    max_model_len: int
    gpu_memory_utilization: float = 0.5
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    cpu_cache_gib: int = 1
    trust_remote_code: bool = False
    sleeps: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    seed: int = 0
    timeout_seconds: float = 1800.0
    speculative: SpeculativeSpec | None = None
    updates_in_flight: bool = False
    routing_replay: bool = False
    quantization: Quantization | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """The user's arguments for vLLM's AsyncEngineArgs; none of those that `engine_arguments` sets."""

    @property
    def num_workers(self) -> int:
        """vLLM's workers of the replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def from_spec(cls, spec: PPOJobSpec, pool: str) -> RolloutOptions:
        """Take the settings of the replicas in a pool from a resolved spec."""
        rollout = spec.rollout
        return cls(
            path=spec.model.actor.path,
            device=spec.device,
            max_model_len=spec.data.max_prompt_length + spec.data.max_response_length,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            enable_prefix_caching=rollout.enable_prefix_caching,
            enforce_eager=rollout.enforce_eager,
            cpu_cache_gib=rollout.cpu_cache_gib,
            trust_remote_code=spec.model.actor.trust_remote_code,
            sleeps=spec.engines_sleep_in(pool),
            tensor_parallel_size=rollout.tensor_parallel_size,
            pipeline_parallel_size=rollout.pipeline_parallel_size,
            enable_expert_parallel=rollout.enable_expert_parallel,
            seed=spec.trainer.seed,
            timeout_seconds=float(spec.trainer.phase_timeout_seconds),
            speculative=rollout.speculative,
            updates_in_flight=spec.schedule.updates_in_flight,
            routing_replay=rollout.routing_replay,
            quantization=rollout.quantization,
            engine_args=rollout.engine_args,
        )


@dataclass(frozen=True)
class Drafts:
    """How responses were generated with `rollout.speculative`.

    num_steps: one for each response and step of it. num_drafted: those of them that checked drafts. num_accepted:
    drafted tokens that the responses took over.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @classmethod
    def total(cls, parts: Iterable[Drafts]) -> Drafts:
        """Return the sums."""
        found = list(parts)
        return cls(
            sum(part.num_steps for part in found),
            sum(part.num_drafted for part in found),
            sum(part.num_accepted for part in found),
        )


NO_DRAFTS: Final = Drafts()


@dataclass(frozen=True)
class Capacity:
    """How much an engine computes at the same time: sequences, and tokens in the cache. 0 tokens: unknown."""

    num_sequences: int
    cache_tokens: int


def environment(options: RolloutOptions, num_threads: int | None = None) -> dict[str, str]:
    """Return the environment variables for the engine's process; see `engines.environment`."""
    common = base_environment(options.device, num_threads) | {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if options.device is Device.CPU:
        return common | {
            # One process less; the engine's core has a separate process in either case.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Ray and the other roles share the cores: vLLM must not pin its threads to some of them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_cache_gib),
            # Eager mode still compiles a few small functions with g++: seven seconds more for each start, for no gain.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return common | {
        # vLLM's processes wait for the other roles' models too.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(options.timeout_seconds)),
        # FlashInfer builds its sampler at the first use, which needs a compiler in the image.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # The first runner samples seeded requests one by one, which takes longer than the model's step at a few hundred
        # sequences; the second samples them in one kernel. It is the default of later versions.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # All-reduce over a replica's GPUs without NVLink multicast, which many machines lack; NCCL's is off as well.
        # FlashInfer's is also built at the first use, for more than a minute.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }


def engine_arguments(options: RolloutOptions) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's AsyncEngineArgs, the same for all versions that are supported."""
    is_cuda = options.device is Device.CUDA
    longest_prefill = options.max_model_len
    # vLLM warms up with as many tokens as it may batch, and takes for granted that no request is longer than
    # max_model_len: beyond what all sequences can have, attention would read outside its block table.
    most_tokens = options.max_num_seqs * options.max_model_len
    arguments: dict[str, Any] = {
        "model": str(Path(options.path)),
        "trust_remote_code": options.trust_remote_code,
        "dtype": precision_of(options.device),
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": min(max(options.max_num_batched_tokens, longest_prefill), most_tokens),
        # On the CPU, chunked prefill of a prompt breaks the random generator of its request's seed.
        "enable_chunked_prefill": options.enable_chunked_prefill and is_cuda,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager or not is_cuda,
        # The trainer compares its log-probs with these, so they must be of the distribution that was sampled.
        "logprobs_mode": "processed_logprobs",
        # The model folder's own sampling defaults must not change what the spec says.
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
    if is_cuda:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["enable_sleep_mode"] = options.sleeps
    if is_cuda or options.num_workers > 1:
        arguments |= {
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            "enable_expert_parallel": options.enable_expert_parallel,
            # Inside a placement group of more than one worker, vLLM would choose its Ray executor.
            "distributed_executor_backend": "uni" if options.num_workers == 1 else "mp",
        }
    if options.quantization is not None:
        # vLLM quantizes no float32, so neither on the CPU, where tests alone do it.
        arguments |= {"quantization": VLLM_QUANTIZATION[options.quantization], "dtype": "bfloat16"}
    if options.speculative is not None:
        arguments |= _speculative_arguments(options.speculative, options)
    arguments |= options.engine_args
    if not is_cuda and "attention_config" not in options.engine_args:
        # On processors with AMX, vLLM's default for latent attention (MLA) refuses float32, which this engine uses on
        # CPUs. Models without latent attention ignore the argument.
        arguments.setdefault("attention_backend", "CPU_MLA")
    if options.routing_replay and is_cuda:
        arguments["enable_return_routed_experts"] = True
    elif options.routing_replay:
        # vLLM refuses its own argument for the model runner of the CPU; see `routed_experts`.
        arguments["additional_config"] = {**arguments.get("additional_config", {}), RECORDS_EXPERTS: True}
    if options.tensor_parallel_size > 1:
        # The fused kernel is FlashInfer's, which is built at the first use and needs NVLink multicast.
        passes = {"pass_config": {"fuse_allreduce_rms": False}}
        arguments["compilation_config"] = {**passes, **arguments.get("compilation_config", {})}
    return arguments


def _speculative_arguments(speculative: SpeculativeSpec, options: RolloutOptions) -> dict[str, Any]:
    num_tokens, most = speculative.num_speculative_tokens, min(speculative.max_num_seqs, options.max_num_seqs)
    # Batches that have no drafts need CUDA graphs too. The scheduler decides which of the others have drafts.
    sizes = [(1, most, num_tokens), (most + 1, options.max_num_seqs, 0)]
    return {
        "speculative_config": {
            # The second model runner and asynchronous scheduling need the drafts on the GPU.
            "method": "ngram_gpu" if options.device is Device.CUDA else "ngram",
            "num_speculative_tokens": num_tokens,
            "prompt_lookup_min": speculative.prompt_lookup_min,
            "prompt_lookup_max": speculative.prompt_lookup_max,
            "num_speculative_tokens_per_batch_size": [size for size in sizes if size[0] <= size[1]],
        },
        "per_request_spec_decode_metrics": "summary",
    }
