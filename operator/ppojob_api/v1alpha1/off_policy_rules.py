"""Rules of training that is not on-policy: `schedule.mode: OneStepOff`, and `algorithm.rolloutCorrection`.

`rules.py` puts them beside the others, each in CEL and in Python.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.algorithm import CorrectionMethod
from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.batch_rules import NEEDS_CRITIC
from ppojob_api.v1alpha1.placement_rules import ACTOR_POOL, CRITIC_POOL, ROLLOUT_POOLS
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ScheduleMode

_CORRECTION = "self.algorithm.rolloutCorrection"

OFF_POLICY_RULES = [
    Rule(
        rule=f"self.schedule.mode != 'OneStepOff' || has({_CORRECTION})",
        message="OneStepOff needs algorithm.rolloutCorrection; its method None trains without a correction",
        field_path=".schedule.mode",
    ),
    Rule(
        rule=(
            f"self.schedule.mode != 'OneStepOff' || !{ROLLOUT_POOLS}.exists(p, p == {ACTOR_POOL} || "
            f"({NEEDS_CRITIC} && p == {CRITIC_POOL}))"
        ),
        message=(
            "OneStepOff generates while actor and critic train: name a pool in placement.rollout that has neither"
        ),
        field_path=".schedule.mode",
    ),
    Rule(
        rule="self.schedule.mode != 'OneStepOff' || !has(self.algorithm.dynamicSampling)",
        message="mode OneStepOff has no dynamic sampling: use Overlapped, or remove algorithm.dynamicSampling",
        field_path=".schedule.mode",
    ),
    Rule(
        rule=f"!has({_CORRECTION}) || {_CORRECTION}.method == 'None' || self.rollout.logProbs",
        message="algorithm.rolloutCorrection reads the engine's log-probs: set rollout.logProbs to true",
        field_path=".rollout.logProbs",
    ),
]

STALENESS_RULES = [
    Rule(
        rule="!has(self.maxStaleness) || self.mode == 'OneStepOff'",
        message="only mode OneStepOff reads maxStaleness: remove it, or set mode to OneStepOff",
        field_path=".maxStaleness",
    ),
    Rule(
        rule="!has(self.weightUpdates) || self.mode == 'OneStepOff'",
        message="only mode OneStepOff reads weightUpdates: remove it, or set mode to OneStepOff",
        field_path=".weightUpdates",
    ),
]
"""Of `schedule` alone."""

CORRECTION_RULES = [
    Rule(
        rule="!has(self.lower) || self.method == 'Mask'",
        message="only method Mask reads lower: remove it, or set method to Mask",
        field_path=".lower",
    ),
    Rule(
        rule="self.method != 'Mask' || (has(self.lower) ? self.lower : 0.5) < self.upper",
        message="method Mask needs a lower (0.5 if absent) below upper",
        field_path=".upper",
    ),
]
"""Of `algorithm.rolloutCorrection` alone."""


def _old_weights_are_corrected(spec: PPOJobSpec) -> Iterator[Problem]:
    mode = spec.schedule.mode
    if mode is ScheduleMode.ONE_STEP_OFF and spec.algorithm.rollout_correction is None:
        remedy = (
            "it trains on responses of older weights: add algorithm.rolloutCorrection, for example "
            "{method: Truncate}, or {method: None} to train without a correction"
        )
        yield "schedule.mode", mode.value, remedy


def _generation_has_its_own_pool(spec: PPOJobSpec) -> Iterator[Problem]:
    mode, placement = spec.schedule.mode, spec.placement
    if mode is not ScheduleMode.ONE_STEP_OFF:
        return
    critic = (placement.critic or placement.actor) if spec.algorithm.needs_critic else placement.actor
    for pool in placement.rollout_pools:
        if pool in (placement.actor, critic):
            role = "actor" if pool == placement.actor else "critic"
            remedy = (
                f"it generates while actor and critic train, and pool {pool} of placement.rollout has the {role}: give "
                "the rollout a pool without them, or use Overlapped"
            )
            yield "schedule.mode", mode.value, remedy
            return


def _every_batch_is_used_whole(spec: PPOJobSpec) -> Iterator[Problem]:
    mode = spec.schedule.mode
    if mode is ScheduleMode.ONE_STEP_OFF and spec.algorithm.dynamic_sampling is not None:
        yield (
            "schedule.mode",
            mode.value,
            "it has no dynamic sampling: use Overlapped, or remove algorithm.dynamicSampling",
        )


def _only_one_step_off_is_stale(spec: PPOJobSpec) -> Iterator[Problem]:
    schedule = spec.schedule
    if schedule.max_staleness is not None and schedule.mode is not ScheduleMode.ONE_STEP_OFF:
        remedy = f"mode {schedule.mode} is on-policy and does not read it: remove it, or set schedule.mode: OneStepOff"
        yield "schedule.maxStaleness", schedule.max_staleness, remedy
    if schedule.weight_updates is not None and schedule.mode is not ScheduleMode.ONE_STEP_OFF:
        remedy = (
            f"mode {schedule.mode} trains on-policy, and its engines may sleep: remove it, or set schedule.mode: "
            "OneStepOff"
        )
        yield "schedule.weightUpdates", schedule.weight_updates.value, remedy


def _correction_has_what_it_reads(spec: PPOJobSpec) -> Iterator[Problem]:
    given = spec.algorithm.rollout_correction
    if given is None:
        return
    where = "algorithm.rolloutCorrection"
    if given.method is not CorrectionMethod.NONE and not spec.rollout.log_probs:
        remedy = f"{where} reads the engine's log-probs: set it to true, or remove the correction"
        yield "rollout.logProbs", False, remedy
    if given.lower is not None and given.method is not CorrectionMethod.MASK:
        yield f"{where}.lower", given.lower, f"method {given.method} does not read it: remove it, or use method Mask"
    if given.method is CorrectionMethod.MASK and given.lower_bound >= given.upper:
        remedy = f"method Mask keeps weights from lower ({given.lower_bound:g}) to upper: set upper above lower"
        yield f"{where}.upper", given.upper, remedy


OFF_POLICY_CHECKS = (
    _old_weights_are_corrected,
    _generation_has_its_own_pool,
    _every_batch_is_used_whole,
    _only_one_step_off_is_stale,
    _correction_has_what_it_reads,
)
