"""Ways to set up a rollout's engine that `bench_generation` compares.

A variant is what differs from the job: fields of `rollout`, variables of the process, and arguments of vLLM, also those
that the API keeps for the trainer. Called by `generation` in the engine's process, before vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.rollout.options import RolloutOptions

EXTENSION: Final = "tests.bench.engine_extension.MeasuringExtension"


@dataclass(frozen=True)
class Variant:
    """See the module's docstring. calls: methods of `MeasuringExtension` after the start."""

    about: str
    rollout: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[str, ...] = ()

    def spec(self, spec: PPOJobSpec) -> PPOJobSpec:
        """Return a job's spec with this variant's fields."""
        wire = spec.to_wire()
        return PPOJobSpec.model_validate({**wire, "rollout": {**wire["rollout"], **self.rollout}})

    def options(self, options: RolloutOptions) -> RolloutOptions:
        """Return an engine's options with this variant's arguments."""
        arguments = {**options.engine_args, **self.arguments, "worker_extension_cls": EXTENSION}
        return replace(options, engine_args=arguments)


def _compiled(**settings: Any) -> dict[str, Any]:
    return {"compilation_config": settings}


VARIANTS: Final[Mapping[str, Variant]] = {
    "default": Variant("as a job without settings has it"),
    "drafts": Variant("rollout.speculative: on and off by itself", {"speculative": {}}),
    "drafts-2": Variant("two tokens for each draft", {"speculative": {"numSpeculativeTokens": 2}}),
    "drafts-8": Variant("eight tokens for each draft", {"speculative": {"numSpeculativeTokens": 8}}),
    "drafts-always": Variant(
        "drafts in every step, to see what they cost", {"speculative": {"maxNumSeqs": 1024}}, calls=("draft_always",)
    ),
    "drafts-never": Variant(
        "set up for drafts, but none, to see what that costs", {"speculative": {}}, calls=("draft_never",)
    ),
    "fp8": Variant("linear layers in FP8", {"quantization": "FP8"}),
    "log-probs": Variant("log-probs of each token", {"logProbs": True}),
    "vllm-scheduler": Variant("vLLM's scheduler in place of ours", arguments={"async_scheduling": True}),
    "one-process-more": Variant(
        "vLLM's worker in a process of its own, so that it prepares inputs while the scheduler runs",
        arguments={"distributed_executor_backend": "mp"},
    ),
    "no-collector": Variant("Python's garbage collector off in the engine's process", calls=("stop_collector",)),
    "first-runner": Variant("vLLM's first model runner", environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "full-graphs": Variant("CUDA graphs of whole steps only", arguments=_compiled(cudagraph_mode="FULL")),
    "decode-graphs": Variant(
        "CUDA graphs of whole decoding steps only", arguments=_compiled(cudagraph_mode="FULL_DECODE_ONLY")
    ),
    "large-blocks": Variant("blocks of 64 tokens in the cache", arguments={"block_size": 64}),
    "no-prefix-cache": Variant("no blocks are hashed", {"enablePrefixCaching": False}),
    "flashinfer-attention": Variant("FlashInfer's attention", arguments={"attention_backend": "FLASHINFER"}),
    "triton-attention": Variant("Triton's attention", arguments={"attention_backend": "TRITON_ATTN"}),
}
