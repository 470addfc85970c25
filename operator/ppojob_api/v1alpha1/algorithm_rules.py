"""Rules of the algorithm: the blocks of users' functions, dynamic sampling, and the penalty of length.

`rules.py` puts them beside the others, each in CEL and in Python. Whether a user's function can be called, only the
trainer knows, which tries it before it loads any model.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.algorithm import GROUP_ESTIMATORS, AdvantageEstimator, PolicyLoss, UserFunction
from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.batch_rules import NEEDS_GROUPS
from ppojob_api.v1alpha1.spec import PPOJobSpec

_BLOCKS = {"advantageEstimator": "advantageFunction", "policyLoss": "policyLossFunction"}
"""The block that value Function of a field reads."""

ALGORITHM_RULES = [
    *(
        Rule(
            rule=f"(self.algorithm.{field} == 'Function') == has(self.algorithm.{block})",
            message=f"algorithm.{field} Function needs the block {block}, and only Function reads it",
            field_path=f".algorithm.{block}",
        )
        for field, block in _BLOCKS.items()
    ),
    Rule(
        rule=f"!has(self.algorithm.dynamicSampling) || {NEEDS_GROUPS}",
        message="dynamicSampling needs an advantageEstimator that compares the responses to one prompt",
        field_path=".algorithm.dynamicSampling",
    ),
    Rule(
        rule="!has(self.reward.overlongPenalty) || self.reward.overlongPenalty.buffer <= self.data.maxResponseLength",
        message="reward.overlongPenalty.buffer must not be above data.maxResponseLength",
        field_path=".reward.overlongPenalty.buffer",
    ),
]


def user_functions(spec: PPOJobSpec) -> Iterator[tuple[str, UserFunction]]:
    """Yield the path and the block of each of the user's functions of the algorithm."""
    algorithm = spec.algorithm
    if algorithm.advantage_function is not None:
        yield "algorithm.advantageFunction", algorithm.advantage_function
    if algorithm.policy_loss_function is not None:
        yield "algorithm.policyLossFunction", algorithm.policy_loss_function


def _functions_are_read(spec: PPOJobSpec) -> Iterator[Problem]:
    given = {path.rpartition(".")[2] for path, _ in user_functions(spec)}
    algorithm = spec.algorithm
    chosen = {
        "advantageEstimator": (algorithm.advantage_estimator, AdvantageEstimator.FUNCTION),
        "policyLoss": (algorithm.policy_loss, PolicyLoss.FUNCTION),
    }
    for field, (value, own) in chosen.items():
        block = _BLOCKS[field]
        if value is own and block not in given:
            yield f"algorithm.{block}", None, f"{field} Function needs this block with a module or a path: add it"
        if value is not own and block in given:
            remedy = f"{field} {value.value} reads no function: remove the block, or set {field}: Function"
            yield f"algorithm.{block}", None, remedy


def _functions_are_module_or_file(spec: PPOJobSpec) -> Iterator[Problem]:
    for where, function in user_functions(spec):
        if (function.module is None) == (function.path is None):
            yield where, {"module": function.module, "path": function.path}, "set exactly one of module and path"


def _dynamic_sampling_has_groups(spec: PPOJobSpec) -> Iterator[Problem]:
    sampling, algorithm = spec.algorithm.dynamic_sampling, spec.algorithm
    if sampling is not None and not algorithm.needs_groups:
        names = ", ".join(GROUP_ESTIMATORS)
        remedy = (
            f"advantageEstimator {algorithm.advantage_estimator.value} does not compare the responses to one prompt: "
            f"use one of {names}, set advantageFunction.needsGroups, or remove dynamicSampling"
        )
        yield "algorithm.dynamicSampling", sampling.to_wire(), remedy


def _overlong_buffer_is_within_a_response(spec: PPOJobSpec) -> Iterator[Problem]:
    penalty, longest = spec.reward.overlong_penalty, spec.data.max_response_length
    if penalty is not None and penalty.buffer > longest:
        remedy = f"is above data.maxResponseLength ({longest}): use a part of it, say {max(1, longest // 5)}"
        yield "reward.overlongPenalty.buffer", penalty.buffer, remedy


ALGORITHM_CHECKS = (
    _functions_are_read,
    _functions_are_module_or_file,
    _dynamic_sampling_has_groups,
    _overlong_buffer_is_within_a_response,
)
