"""The options of vLLM on each device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ppojob_api.v1alpha1.engine_rules import RESERVED_ENGINE_ARGS
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.rollout import Quantization
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.speculative import SpeculativeSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.engines.rollout.options import RECORDS_EXPERTS, RolloutOptions, engine_arguments, environment
from tests.bad_specs import with_changes

CPU = RolloutOptions(path="/models/m", device=Device.CPU, max_model_len=300, max_num_batched_tokens=256)
CUDA = dataclasses.replace(CPU, device=Device.CUDA, sleeps=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (CPU, {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 300}),
        (CUDA, {"enforce_eager": False, "enable_chunked_prefill": True, "enable_sleep_mode": True}),
        # No more tokens than two sequences can have: vLLM's warm-up would read outside their block tables.
        (dataclasses.replace(CUDA, max_num_batched_tokens=8192, max_num_seqs=2), {"max_num_batched_tokens": 600}),
        (dataclasses.replace(CUDA, max_num_batched_tokens=8192), {"max_num_batched_tokens": 8192}),
        (
            CUDA,
            {"tensor_parallel_size": 1, "distributed_executor_backend": "uni", "enable_expert_parallel": False},
        ),
        (
            dataclasses.replace(CUDA, tensor_parallel_size=2),
            {
                "tensor_parallel_size": 2,
                "distributed_executor_backend": "mp",
                "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
            },
        ),
        (
            dataclasses.replace(CUDA, pipeline_parallel_size=2),
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        ),
        (
            dataclasses.replace(CPU, tensor_parallel_size=2, pipeline_parallel_size=2),
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        ),
        (
            dataclasses.replace(CUDA, tensor_parallel_size=2, enable_expert_parallel=True),
            {"enable_expert_parallel": True},
        ),
        (dataclasses.replace(CUDA, sleeps=False, gpu_memory_utilization=0.9), {"gpu_memory_utilization": 0.9}),
    ],
)
def test_arguments(options: RolloutOptions, expected: dict[str, Any]) -> None:
    arguments = engine_arguments(options)
    assert expected.items() <= arguments.items()
    assert arguments["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize(
    ("options", "method", "most", "sizes"),
    [
        (CUDA, "ngram_gpu", 16, [(1, 16, 3), (17, 1024, 0)]),
        (CPU, "ngram", 16, [(1, 16, 3), (17, 1024, 0)]),
        (dataclasses.replace(CUDA, max_num_seqs=16), "ngram_gpu", 16, [(1, 16, 3)]),
        (dataclasses.replace(CUDA, max_num_seqs=8), "ngram_gpu", 16, [(1, 8, 3)]),
    ],
)
def test_drafts_are_for_small_batches(
    options: RolloutOptions, method: str, most: int, sizes: list[tuple[int, int, int]]
) -> None:
    drafts = SpeculativeSpec(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=5, max_num_seqs=most)

    arguments = engine_arguments(dataclasses.replace(options, speculative=drafts))

    assert "speculative_config" not in engine_arguments(options)
    assert arguments["speculative_config"] == {
        "method": method,
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 5,
        "num_speculative_tokens_per_batch_size": sizes,
    }
    assert arguments.keys() - RESERVED_ENGINE_ARGS.keys() <= {"attention_backend"}


def test_experts_are_recorded_by_vllm_on_gpus_and_by_our_connection_on_the_cpu() -> None:
    own = {"additional_config": {"mine": 1}}
    on_gpu, on_cpu = (
        engine_arguments(dataclasses.replace(options, routing_replay=True, engine_args=own)) for options in (CUDA, CPU)
    )
    assert on_gpu["enable_return_routed_experts"] is True
    assert on_gpu["additional_config"] == {"mine": 1}
    assert "enable_return_routed_experts" not in on_cpu
    assert on_cpu["additional_config"] == {"mine": 1, RECORDS_EXPERTS: True}
    assert "additional_config" not in engine_arguments(CPU)


def test_vllm_rounds_the_weights_itself() -> None:
    arguments = engine_arguments(dataclasses.replace(CUDA, quantization=Quantization.FP8))

    assert {"quantization": "fp8_per_channel", "dtype": "bfloat16"}.items() <= arguments.items()
    assert arguments.keys() - RESERVED_ENGINE_ARGS.keys() <= {"attention_backend"}
    assert "quantization" not in engine_arguments(CUDA)


def test_the_users_own_arguments_are_passed_on() -> None:
    passes = {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}, "block_size": 32}
    divided = dataclasses.replace(CUDA, tensor_parallel_size=2, engine_args=passes)

    arguments = engine_arguments(divided)

    assert arguments["block_size"] == 32
    assert arguments["compilation_config"] == {
        "pass_config": {"fuse_allreduce_rms": False},
        "cudagraph_capture_sizes": [1, 2],
    }


def test_what_the_trainer_sets_is_not_the_users_to_give() -> None:
    ours = engine_arguments(CPU).keys() | engine_arguments(CUDA).keys()

    # Of the backend, the trainer sets no more than a default.
    assert sorted(ours - RESERVED_ENGINE_ARGS.keys()) == ["attention_backend"]


def test_latent_attention_on_a_cpu_computes_in_float32() -> None:
    own = {"attention_backend": "AMX_MLA"}, {"attention_config": {"backend": "AMX_MLA"}}
    by_name, by_config = (engine_arguments(dataclasses.replace(CPU, engine_args=given)) for given in own)

    assert engine_arguments(CPU)["attention_backend"] == "CPU_MLA"
    assert by_name["attention_backend"] == "AMX_MLA"
    assert "attention_backend" not in by_config
    assert "attention_backend" not in engine_arguments(CUDA)


def test_the_cpu_engine_has_no_argument_of_gpus() -> None:
    assert not {"gpu_memory_utilization", "enable_sleep_mode"} & engine_arguments(CPU).keys()


def test_the_environment_of_a_cpu_engine() -> None:
    variables = environment(dataclasses.replace(CPU, cpu_cache_gib=3), num_threads=2)
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_NUM_THREADS" not in environment(CPU)


def test_the_environment_of_a_cuda_engine() -> None:
    assert environment(CUDA)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment(CUDA)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    # Both need NVLink multicast.
    assert environment(CUDA)["VLLM_ALLREDUCE_USE_SYMM_MEM"] == environment(CUDA)["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
    assert "OMP_NUM_THREADS" not in environment(CUDA)


def test_the_spec_says_whether_gpus_divide_experts() -> None:
    given: dict[str, Any] = {"tensorParallelSize": 2, "enableExpertParallel": True}
    for rollout in (given, {**given, "enableExpertParallel": False}):
        spec = resolve(parse_manifest(with_changes({("spec", "rollout"): rollout}))[2])
        options = RolloutOptions.from_spec(spec, "actor")
        assert engine_arguments(options)["enable_expert_parallel"] is rollout["enableExpertParallel"]
