"""Runs that docs/measured.md describes, as jobs with what was measured. Data alone; called by `comparison`.

Without the memory of jobs whose frozen weights had a second copy in the version that was measured: LoRA on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["RUNS", "MeasuredRun"]

_CHECKPOINTING: Final = {"gradientCheckpointing": True}
_PLAIN: Final = {"gradientCheckpointing": False}
_PHASES: Final = ("gen", "old_log_prob", "values", "ref", "update_critic", "update_actor", "update_weights")


@dataclass(frozen=True)
class MeasuredRun:
    """One run. spec: its job. sizes: of the model's configuration, where they are not those of the known model. gpu:
    its kind of GPU. sends_all: measured before pushes with adapters sent only what training changes.
    waits_for_moments: measured before offloaded moments arrived beside the first passes of an update.

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


def _workload(
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


def _phases(*seconds: float) -> dict[str, float]:
    return dict(zip(_PHASES, seconds, strict=True))


def _update(
    shape: str, ranks: int, model: Mapping[str, Any], batch: tuple[int, int, int], **actor: Any
) -> dict[str, Any]:
    """Return a job whose actor does what a test of an update did; batch: prompts, prompt and response tokens."""
    sequences, prompt, response = batch
    return _workload(
        shape,
        {"all": ranks},
        {**model, **_RESHARDED},
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


_SMALL, _HALF, _MIDDLE, _LARGE = (
    "HuggingFaceTB/SmolLM2-135M",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7B",
)
_ADAPTERS: Final = {"lora": {"rank": 16}}
_COMPILED: Final = {"compile": True}
_RESHARDED: Final = {"reshardAfterForward": True}
_GATHERED: Final = {"reshardAfterForward": False}
_OFFLOADED: Final = {"offload": {"optimizer": True}}

_SPLIT: Final = {"actor": 1, "critic": 1}
_SHARED: Final = {"rollout": ["actor", "critic"]}


def _compiled(shape: str, pools: Mapping[str, int], **sections: Any) -> dict[str, Any]:
    return _workload(shape, pools, _CHECKPOINTING | _COMPILED, 49_152, **sections)


def _large(tokens: int, of_actor: Mapping[str, Any], of_critic: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a job of 7 B parameters in one pool of two GPUs, whose engines sleep and whose critic has adapters."""
    model = {"actor": {"path": f"hf://{_LARGE}", **of_actor}, "critic": {**_ADAPTERS, **of_critic}}
    given = {"rollout": {"sleep": True}, **sections, "model": {**model, **sections.get("model", {})}}
    return _workload(_LARGE, {"all": 2}, {}, tokens, **given)


def _without_offload(critic: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job of 7.6 B parameters whose critic has passes of a quarter of the actor's tokens."""
    return _large(
        24_576,
        _COMPILED,
        {**_COMPILED, **_PLAIN, **critic},
        critic={"maxTokensPerGPU": 6_144},
        rollout={"sleep": True, "gpuMemoryUtilization": 0.25},
    )


def _long(num_gpus: int, **actor: Any) -> dict[str, Any]:
    """Return a job with sequences of 32,768 tokens, one of them in each pass."""
    return _workload(
        _MIDDLE,
        {"all": num_gpus},
        _CHECKPOINTING | _COMPILED,
        32_768 // num_gpus,
        data={"trainBatchSize": 4, "maxPromptLength": 24_576, "maxResponseLength": 8_192},
        algorithm={"advantageEstimator": "GRPO", "kl": {"inLoss": True}},
        actor={"miniBatchSize": 1, **actor},
        critic={"miniBatchSize": 1},
        rollout={"samplesPerPrompt": 4, "sleep": True},
    )


_EXPERTS: Final = "30B-A3B, one pool of two GPUs, experts divided, LoRA"


def _experts(tokens: int, **model: Any) -> dict[str, Any]:
    return _workload(
        "Qwen/Qwen3-30B-A3B",
        {"all": 2},
        _CHECKPOINTING | {"lora": {"rank": 16, "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj"]}} | model,
        tokens,
        data={"trainBatchSize": 16, "maxResponseLength": 1900},
        algorithm={"advantageEstimator": "GRPO", "kl": {"inLoss": True}},
        actor={"miniBatchSize": 4, "expertParallelSize": 2},
        critic={"miniBatchSize": 4},
        rollout={"samplesPerPrompt": 8, "tensorParallelSize": 2, "logProbs": True},
    )


RUNS: Final[tuple[MeasuredRun, ...]] = (
    MeasuredRun("135 M, update, no option", _update(_SMALL, 1, _PLAIN, (8, 128, 384)), roles={"actor": 9.893}),
    MeasuredRun(
        "135 M, update, checkpointing", _update(_SMALL, 1, _CHECKPOINTING, (8, 128, 384)), roles={"actor": 4.090}
    ),
    MeasuredRun("0.5 B, update, one GPU", _update(_HALF, 1, _CHECKPOINTING, (4, 256, 3840)), roles={"actor": 12.3}),
    MeasuredRun("0.5 B, update, data 2", _update(_HALF, 2, _CHECKPOINTING, (4, 256, 3840)), roles={"actor": 6.7}),
    MeasuredRun(
        "0.5 B, update, sequence 2",
        _update(_HALF, 2, _CHECKPOINTING, (4, 256, 3840), sequenceParallelSize=2),
        roles={"actor": 6.7},
    ),
    MeasuredRun(
        "0.5 B, update, tensor 2",
        _update(_HALF, 2, _CHECKPOINTING, (4, 256, 3840), tensorParallelSize=2),
        roles={"actor": 9.1},
    ),
    MeasuredRun(
        "0.5 B, one pool of two GPUs, compiled, no checkpointing",
        _workload(
            _HALF,
            {"all": 2},
            {},
            16_384,
            model={
                "actor": {"path": f"hf://{_HALF}", **_PLAIN, **_COMPILED, **_RESHARDED},
                "critic": {**_PLAIN, **_COMPILED, **_RESHARDED},
                "ref": _RESHARDED,
            },
        ),
        roles={"actor": 17.8, "critic": 15.4, "ref": 2.9},
    ),
    MeasuredRun(
        "0.5 B, one GPU, compiled, no checkpointing",
        _workload(_HALF, {"all": 1}, _PLAIN | _COMPILED, 16_384),
        pools={"all": 124},
        phases=_phases(4.02, 0.45, 0.33, 0.41, 1.10, 1.37, 0.07),
        step=7.91,
    ),
    MeasuredRun(
        "0.5 B, split 1+1, critic's GPU shared with the rollout",
        _compiled(_HALF, _SPLIT, placement=_SHARED),
        pools={"critic": 85},
        phases=_phases(1.13, 0.43, 0.32, 0.41, 1.13, 1.51, 0.08),
        step=3.48,
    ),
    MeasuredRun(
        "0.5 B, split 1+1, ParallelUpdate",
        _compiled(_HALF, _SPLIT, schedule={"mode": "ParallelUpdate"}),
        pools={"actor": 78},
        phases=_phases(1.47, 0.41, 0.30, 0.40, 1.12, 1.51, 0.06),
        step=4.28,
    ),
    MeasuredRun(
        "0.5 B, one pool of two GPUs",
        _compiled(_HALF, {"all": 2}),
        pools={"all": 93},
        phases=_phases(1.10, 0.22, 0.17, 0.22, 0.62, 0.81, 0.07),
        step=3.34,
    ),
    MeasuredRun(
        "1.5 B, split 1+1, critic's GPU shared with the rollout",
        _compiled(_MIDDLE, _SPLIT, placement=_SHARED),
        pools={"critic": 115},
        phases=_phases(1.55, 1.00, 0.82, 1.00, 3.17, 3.72, 0.10),
        step=7.27,
    ),
    MeasuredRun(
        "1.5 B, one pool of two GPUs",
        _compiled(_MIDDLE, {"all": 2}),
        pools={"all": 124},
        phases=_phases(1.70, 0.50, 0.45, 0.51, 1.72, 2.01, 0.10),
        step=7.14,
    ),
    MeasuredRun(
        "0.5 B, split 1+1 on H100s, critic's GPU shared with the rollout",
        _compiled(_HALF, _SPLIT, placement=_SHARED),
        gpu="H100",
        phases=_phases(1.85, 0.47, 0.36, 0.46, 1.21, 1.58, 0.10),
        step=4.37,
    ),
    MeasuredRun(
        "0.5 B, split 1+1 on H100s, ParallelUpdate",
        _compiled(_HALF, _SPLIT, schedule={"mode": "ParallelUpdate"}),
        gpu="H100",
        phases=_phases(2.17, 0.45, 0.35, 0.44, 1.22, 1.59, 0.12),
        step=5.36,
    ),
    MeasuredRun(
        "0.5 B, one pool of two H100s",
        _compiled(_HALF, {"all": 2}),
        gpu="H100",
        phases=_phases(1.69, 0.24, 0.19, 0.24, 0.67, 0.85, 0.09),
        step=4.15,
    ),
    MeasuredRun(
        "7 B (26 layers), one pool of two GPUs, critic with LoRA",
        # The trainer that ran this kept critic and reference gathered; the current one would not keep both.
        _large(49_152, _OFFLOADED, _OFFLOADED | _GATHERED, model={"ref": _GATHERED}),
        sizes={"num_hidden_layers": 26},
        waits_for_moments=True,
        pools={"all": 126},
        phases=_phases(3.6, 2.2, 2.4, 1.9, 7.8, 9.9, 0.44),
        step=28.4,
    ),
    MeasuredRun(
        "7 B (26 layers), one pool of two GPUs, critic with LoRA, compiled",
        # The trainer that ran this kept the actor gathered; the current one would not.
        _large(24_576, _OFFLOADED | _COMPILED | _GATHERED, _OFFLOADED | _COMPILED),
        sizes={"num_hidden_layers": 26},
        waits_for_moments=True,
        pools={"all": 124.7},
        roles={"actor": 77.1, "critic": 22.6, "ref": 12.6},
        phases=_phases(3.55, 1.9, 2.01, 2.17, 5.79, 8.71, 0.56),
        step=25.0,
    ),
    MeasuredRun(
        "7.6 B, one pool of two GPUs, critic with LoRA, compiled, no checkpointing",
        _large(8_192, _OFFLOADED | _COMPILED | _PLAIN, _OFFLOADED | _COMPILED | _PLAIN),
        pools={"all": 150.2},
        roles={"actor": 100.3, "critic": 42.4, "ref": 13.0},
        phases=_phases(3.72, 2.29, 2.28, 2.22, 5.17, 8.97, 0.65),
        step=25.7,
        waits_for_moments=True,
    ),
    MeasuredRun(
        "7.6 B, one pool of two GPUs, critic with LoRA, compiled, no offload",
        # The trainer that ran this kept the critic gathered; the current one does not.
        _without_offload(_GATHERED),
        pools={"all": 150.5},
        roles={"actor": 69.0, "critic": 45.7, "ref": 13.1},
        phases=_phases(3.71, 2.16, 2.10, 2.13, 4.63, 8.35, 0.71),
        step=24.0,
    ),
    MeasuredRun(
        "7.6 B, one pool of two GPUs, critic with LoRA, compiled, no offload, nothing gathered",
        _without_offload({}),
        pools={"all": 145.8},
        roles={"actor": 69.0, "critic": 33.4, "ref": 13.1},
        phases=_phases(3.63, 2.10, 2.33, 2.07, 5.14, 7.91, 0.66),
        step=24.1,
    ),
    MeasuredRun(
        "1.5 B, one GPU, compiled, 32k tokens",
        _long(1),
        pools={"all": 88.5},
        phases={"gen": 33.9, "old_log_prob": 6.9, "ref": 6.9, "update_actor": 29.9, "update_weights": 0.19},
        step=78.0,
    ),
    MeasuredRun(
        "1.5 B, one pool of two GPUs, compiled, 32k tokens, sequence 2",
        _long(2, sequenceParallelSize=2),
        pools={"all": 80.0},
        roles={"actor": 23.2, "ref": 6.9},
        phases={"gen": 24.06, "old_log_prob": 3.93, "ref": 3.90, "update_actor": 16.39, "update_weights": 0.32},
        step=48.8,
    ),
    MeasuredRun(
        "32 B, one pool of two GPUs, GRPO with LoRA, compiled",
        _workload(
            "Qwen/Qwen2.5-32B",
            {"all": 2},
            _CHECKPOINTING | _ADAPTERS | _COMPILED,
            16_384,
            data={"trainBatchSize": 8, "maxResponseLength": 1900},
            algorithm={"advantageEstimator": "GRPO", "kl": {"inLoss": True}},
            actor={"miniBatchSize": 2},
            critic={"miniBatchSize": 2},
            rollout={"samplesPerPrompt": 8, "tensorParallelSize": 2, "logProbs": True},
        ),
        pools={"all": 132.8},
        roles={"actor": 61.0},
        phases={"gen": 27.83, "old_log_prob": 7.76, "ref": 7.31, "update_actor": 22.19, "update_weights": 2.29},
        step=67.5,
    ),
    MeasuredRun(
        "7.6 B, one GPU, LoRA, 64 responses",
        _workload(
            _LARGE,
            {"all": 1},
            _CHECKPOINTING | _ADAPTERS,
            16_384,
            data={
                "train": {"reasoningGym": {"task": "products"}},
                "trainBatchSize": 64,
                "maxPromptLength": 130,
                "maxResponseLength": 512,
            },
            actor={"miniBatchSize": 16},
            critic={"miniBatchSize": 16},
        ),
        phases=_phases(2.89, 1.31, 1.26, 1.14, 4.03, 4.22, 0.29),
        step=15.2,
        sends_all=True,
    ),
    MeasuredRun(
        f"{_EXPERTS}, compiled",
        _experts(32_768, **_COMPILED),
        pools={"all": 136.0},
        roles={"actor": 50.4},
        phases={"gen": 19.94, "old_log_prob": 2.82, "ref": 2.78, "update_actor": 8.28, "update_weights": 0.77},
        step=35.0,
    ),
    MeasuredRun(
        "7B-A1B, one pool of two GPUs, compiled",
        _workload(
            "Qwen/Qwen3-30B-A3B",
            {"all": 2},
            _CHECKPOINTING | _COMPILED | _OFFLOADED,
            24_576,
            rollout={"sleep": True},
        ),
        sizes={
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_experts": 64,
            "moe_intermediate_size": 1024,
        },
        pools={"all": 114.2},
        roles={"actor": 64.4, "critic": 61.3, "ref": 11.8},
        phases=_phases(2.46, 0.63, 0.56, 0.60, 3.10, 3.49, 1.36),
        step=12.3,
    ),
    # Measured with an earlier version, whose other phases were slower.
    MeasuredRun(f"{_EXPERTS}, all weights sent", _experts(12_288), phases={"update_weights": 5.72}, sends_all=True),
)
