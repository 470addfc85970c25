"""The jobs that were measured, by what they have in common. Called by `measured_runs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

CHECKPOINTING: Final = {"gradientCheckpointing": True}
PLAIN: Final = {"gradientCheckpointing": False}
PHASES: Final = ("gen", "old_log_prob", "values", "ref", "update_critic", "update_actor", "update_weights")


@dataclass(frozen=True)
class MeasuredRun:
    """One run. spec: its job. sizes: of the model's configuration, where they are not those of the known model. gpu:
    its kind of GPU. sends_all: measured before pushes with adapters sent only what training changes.
    waits_for_moments: measured before offloaded moments arrived beside the first passes of an update. predicts: whether
    the seconds of other jobs are predicted from it; not if the plan does not know all that its layers compute.

    pools, roles: peak memory of a GPU of the pool (NVML, all processes), and of a role's process (torch), in GB (1e9).
    phases, step: in seconds.
    """

    name: str
    spec: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)
    gpu: str = "H200"
    pools: Mapping[str, float] = field(default_factory=dict)
    roles: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    step: float | None = None
    sends_all: bool = False
    waits_for_moments: bool = False
    predicts: bool = True


def workload_job(
    shape: str,
    pools: Mapping[str, int],
    options: Mapping[str, Any],
    tokens: int,
    **sections: Any,
) -> dict[str, Any]:
    """Return workload W of tests/bench: 256 prompts of 130 tokens, responses of 512, four minibatches."""
    training = {"miniBatchSize": 64, "maxTokensPerGPU": tokens}
    split = {"actor": "actor", "rollout": ["actor"], "critic": "critic", "ref": ["critic"], "reward": ["critic"]}
    spec: dict[str, Any] = {
        "image": "none",
        "model": {"actor": {"path": f"hf://{shape}", **options}, "critic": dict(options)},
        "data": {
            "train": {"reasoningGym": {"task": "products"}},
            "trainBatchSize": 256,
            "maxPromptLength": 130,
            "maxResponseLength": 512,
        },
        "reward": {"function": {"module": "none"}},
        "algorithm": {"kl": {"inReward": True}},
        "actor": training,
        "critic": dict(training),
        "rollout": {"gpuMemoryUtilization": 0.4, "sleep": False, "maxNumSeqs": 256},
        "pools": [{"name": name, "gpusPerNode": number} for name, number in pools.items()],
        "placement": split if "critic" in pools else {"actor": "all"},
        "schedule": {"mode": "Overlapped" if "critic" in pools else "Serial"},
        "storage": {"claimName": "none"},
    }
    for section, values in sections.items():
        spec[section] = {**spec.get(section, {}), **values}
    return spec


def all_phases(*seconds: float) -> dict[str, float]:
    """Return the seconds by phase: those of workload W in the order of a step."""
    return dict(zip(PHASES, seconds, strict=True))


def update_job(
    shape: str, ranks: int, model: Mapping[str, Any], batch: tuple[int, int, int], **actor: Any
) -> dict[str, Any]:
    """Return a job whose actor does what a test of an update did; batch: prompts, prompt and response tokens."""
    sequences, prompt, response = batch
    return workload_job(
        shape,
        {"all": ranks},
        {**model, **RESHARDED},
        16_384,
        data={
            "train": {"reasoningGym": {"task": "products"}},
            "trainBatchSize": sequences,
            "maxPromptLength": prompt,
            "maxResponseLength": response,
        },
        algorithm={"advantageEstimator": "GRPO", "kl": {}},
        rollout={"samplesPerPrompt": 2},
        actor={"miniBatchSize": sequences, "maxTokensPerGPU": 16_384, **actor},
    )


SMALL, HALF, MIDDLE, LARGE = (
    "HuggingFaceTB/SmolLM2-135M",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7B",
)
ADAPTERS: Final = {"lora": {"rank": 16}}
COMPILED: Final = {"compile": True}
RESHARDED: Final = {"reshardAfterForward": True}
GATHERED: Final = {"reshardAfterForward": False}
OFFLOADED: Final = {"offload": {"optimizer": True}}

SPLIT: Final = {"actor": 1, "critic": 1}
SHARED: Final = {"rollout": ["actor", "critic"]}


def compiled_job(shape: str, pools: Mapping[str, int], **sections: Any) -> dict[str, Any]:
    """Return workload W with compiled layers and gradient checkpointing."""
    return workload_job(shape, pools, CHECKPOINTING | COMPILED, 49_152, **sections)


def large_job(
    tokens: int, of_actor: Mapping[str, Any], of_critic: Mapping[str, Any], **sections: Any
) -> dict[str, Any]:
    """Return a job of 7 B parameters in one pool of two GPUs, whose engines sleep and whose critic has adapters."""
    model = {"actor": {"path": f"hf://{LARGE}", **of_actor}, "critic": {**ADAPTERS, **of_critic}}
    given = {"rollout": {"sleep": True}, **sections, "model": {**model, **sections.get("model", {})}}
    return workload_job(LARGE, {"all": 2}, {}, tokens, **given)


def job_without_offload(critic: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job of 7.6 B parameters whose critic has passes of a quarter of the actor's tokens."""
    return large_job(
        24_576,
        COMPILED,
        {**COMPILED, **PLAIN, **critic},
        critic={"maxTokensPerGPU": 6_144},
        rollout={"sleep": True, "gpuMemoryUtilization": 0.25},
    )


def long_job(num_gpus: int, **actor: Any) -> dict[str, Any]:
    """Return a job with sequences of 32,768 tokens, one of them in each pass."""
    return workload_job(
        MIDDLE,
        {"all": num_gpus},
        CHECKPOINTING | COMPILED,
        32_768 // num_gpus,
        data={"trainBatchSize": 4, "maxPromptLength": 24_576, "maxResponseLength": 8_192},
        algorithm={"advantageEstimator": "GRPO", "kl": {"inLoss": True}},
        actor={"miniBatchSize": 1, **actor},
        critic={"miniBatchSize": 1},
        rollout={"samplesPerPrompt": 4, "sleep": True},
    )


EXPERTS: Final = "30B-A3B, one pool of two GPUs, experts divided, LoRA"


def mixture_job(
    tokens: int, model: Mapping[str, Any], shape: str = "Qwen/Qwen3-30B-A3B", **rollout: Any
) -> dict[str, Any]:
    """Return a job of a mixture in one pool of two GPUs, which divide its experts, with adapters on the attention."""
    return workload_job(
        shape,
        {"all": 2},
        CHECKPOINTING | {"lora": {"rank": 16, "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj"]}} | dict(model),
        tokens,
        data={"trainBatchSize": 16, "maxResponseLength": 1900},
        algorithm={"advantageEstimator": "GRPO", "kl": {"inLoss": True}},
        actor={"miniBatchSize": 4, "expertParallelSize": 2},
        critic={"miniBatchSize": 4},
        rollout={"samplesPerPrompt": 8, "tensorParallelSize": 2, "logProbs": True, **rollout},
    )
