"""Rules of the batch: minibatches against the batch, samples against the estimator.

`rules.py` puts them beside the others, each in CEL and in Python.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.algorithm import GROUP_ESTIMATORS
from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.spec import PPOJobSpec

NEEDS_CRITIC = (
    "(self.algorithm.advantageEstimator == 'GAE' || "
    "(has(self.algorithm.advantageFunction) && self.algorithm.advantageFunction.needsValues))"
)
NEEDS_GROUPS = (
    f"(self.algorithm.advantageEstimator in {[kind.value for kind in GROUP_ESTIMATORS]} || "
    "(has(self.algorithm.advantageFunction) && self.algorithm.advantageFunction.needsGroups))"
)
"""`AlgorithmSpec.needs_critic` and `needs_groups` in CEL."""

BATCH_RULES = [
    Rule(
        rule="self.data.trainBatchSize % self.actor.miniBatchSize == 0",
        message="actor.miniBatchSize must divide data.trainBatchSize",
        field_path=".actor.miniBatchSize",
    ),
    Rule(
        rule=(f"!{NEEDS_CRITIC} || self.data.trainBatchSize % self.critic.miniBatchSize == 0"),
        message="critic.miniBatchSize must divide data.trainBatchSize",
        field_path=".critic.miniBatchSize",
    ),
    Rule(
        rule=f"!{NEEDS_GROUPS} || self.rollout.samplesPerPrompt > 1",
        message="this advantageEstimator compares the responses to one prompt: set samplesPerPrompt to 2 or more",
        field_path=".rollout.samplesPerPrompt",
    ),
]


def _mini_batches_divide_the_batch(spec: PPOJobSpec) -> Iterator[Problem]:
    batch = spec.data.train_batch_size
    sizes = {"actor": spec.actor.mini_batch_size}
    if spec.algorithm.needs_critic:
        sizes["critic"] = spec.critic.mini_batch_size
    for role, size in sizes.items():
        if size > batch:
            remedy = f"is above data.trainBatchSize ({batch}): use {batch} for one minibatch, or a divisor of it"
            yield f"{role}.miniBatchSize", size, remedy
        elif batch % size:
            fitting = max(n for n in range(1, size) if batch % n == 0)
            yield (
                f"{role}.miniBatchSize",
                size,
                f"does not divide data.trainBatchSize ({batch}): use {fitting}, for example",
            )


def _groups_have_two_responses(spec: PPOJobSpec) -> Iterator[Problem]:
    estimator, samples = spec.algorithm.advantage_estimator, spec.rollout.samples_per_prompt
    if spec.algorithm.needs_groups and samples < 2:
        remedy = (
            f"{estimator.value} compares the responses to one prompt with each other, so every advantage would be 0: "
            "use 2 or more, say 8"
        )
        yield "rollout.samplesPerPrompt", samples, remedy


BATCH_CHECKS = (_mini_batches_divide_the_batch, _groups_have_two_responses)
