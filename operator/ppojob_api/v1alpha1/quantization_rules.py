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
        message="quantization needs GPUs with FP8 units: remove it, or set device to CUDA",
        field_path=_PATH,
    ),
    Rule(
        rule=f"{_IS_ABSENT} || (has({_CORRECTION}) && {_CORRECTION}.method != 'None')",
        message=(
            "rounded weights generate with a policy that is not quite the trained one: add "
            "algorithm.rolloutCorrection, such as {method: Truncate}"
        ),
        field_path=_PATH,
    ),
    Rule(
        rule=f"{_IS_ABSENT} || !self.rollout.routingReplay",
        message="mixtures of experts are not quantized: remove quantization, or set routingReplay to false",
        field_path=_PATH,
    ),
]


def _gpus_have_the_format(spec: PPOJobSpec) -> Iterator[Problem]:
    format_ = spec.rollout.quantization
    if format_ is not None and spec.device is Device.CPU:
        yield "rollout.quantization", format_.value, "it needs GPUs with FP8 units: remove it, or set device: CUDA"


def _rounded_weights_are_corrected(spec: PPOJobSpec) -> Iterator[Problem]:
    format_ = spec.rollout.quantization
    if format_ is not None and spec.algorithm.correction is None:
        remedy = (
            "the engine's policy is not quite the one that is trained: add algorithm.rolloutCorrection, for example "
            "{method: Truncate}, or remove it"
        )
        yield "rollout.quantization", format_.value, remedy


def _experts_are_not_rounded(spec: PPOJobSpec) -> Iterator[Problem]:
    format_ = spec.rollout.quantization
    if format_ is not None and spec.rollout.routing_replay:
        remedy = "rollout.routingReplay is for mixtures of experts, which are not quantized: remove one of both"
        yield "rollout.quantization", format_.value, remedy


QUANTIZATION_CHECKS = (_gpus_have_the_format, _rounded_weights_are_corrected, _experts_are_not_rounded)
