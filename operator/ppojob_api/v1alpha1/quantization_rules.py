"""Rules of `spec.rollout.quantization`: what engines with rounded weights need, and what they are not tested with.

`rules.py` puts them beside the others, each in CEL and in Python. The trainer knows whether a model is a mixture of
experts, and the engine knows its GPU: they refuse those.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec

_IS_ABSENT = "!has(self.rollout.quantization)"
_CORRECTION = "self.algorithm.rolloutCorrection"
_PATH = ".rollout.quantization"

QUANTIZATION_RULES = [
    Rule(
        rule=f"{_IS_ABSENT} || self.device != 'CPU'",
        message="quantization needs GPUs with FP8 units: remove rollout.quantization, or set device to CUDA",
        field_path=_PATH,
    ),
    Rule(
        rule=f"{_IS_ABSENT} || (has({_CORRECTION}) && {_CORRECTION}.method != 'None')",
        message=(
            "an engine with rounded weights samples from slightly different probabilities than the trainer computes: "
            "add algorithm.rolloutCorrection with a method other than None, for example {method: Truncate}, or remove "
            "rollout.quantization"
        ),
        field_path=_PATH,
    ),
    Rule(
        rule=f"{_IS_ABSENT} || !self.rollout.routingReplay",
        message=(
            "quantization is for dense models, and routingReplay for mixtures of experts: remove "
            "rollout.quantization, or set rollout.routingReplay to false"
        ),
        field_path=_PATH,
    ),
]


def _gpus_have_the_format(spec: PPOJobSpec) -> Iterator[Problem]:
    format_ = spec.rollout.quantization
    if format_ is not None and spec.device is Device.CPU:
        yield (
            "rollout.quantization",
            format_.value,
            "it needs GPUs with FP8 units, and device is CPU: remove rollout.quantization, or set device: CUDA",
        )


def _rounded_weights_are_corrected(spec: PPOJobSpec) -> Iterator[Problem]:
    format_ = spec.rollout.quantization
    algorithm = spec.algorithm
    if format_ is not None and algorithm.correction is None and not algorithm.bypasses_old_log_probs:
        remedy = (
            "the engine samples from slightly different probabilities than the trainer computes: add "
            "algorithm.rolloutCorrection with a method other than None, for example {method: Truncate}, or remove "
            "rollout.quantization"
        )
        yield "rollout.quantization", format_.value, remedy


def _experts_are_not_rounded(spec: PPOJobSpec) -> Iterator[Problem]:
    format_ = spec.rollout.quantization
    if format_ is not None and spec.rollout.routing_replay:
        remedy = (
            "it is for dense models, and rollout.routingReplay for mixtures of experts: remove rollout.quantization, "
            "or set rollout.routingReplay: false"
        )
        yield "rollout.quantization", format_.value, remedy


QUANTIZATION_CHECKS = (_gpus_have_the_format, _rounded_weights_are_corrected, _experts_are_not_rounded)
