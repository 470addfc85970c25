"""Rules of the batch: minibatches against the batch, micro-batches against a sequence, samples against the estimator.

`rules.py` puts them beside the others, each in CEL and in Python.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.algorithm import GROUP_ESTIMATORS
from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.engine import Engine
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

IS_IDLE = {"actor": "", "critic": f"!{NEEDS_CRITIC} || "}
"""The beginning of a rule on a trained role in CEL: it holds if there is no such role."""

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
    *(
        Rule(
            rule=(
                f"{is_idle}self.{role}.engine != 'FSDP' || "
                f"self.{role}.maxTokensPerGPU * self.{role}.sequenceParallelSize >= "
                "self.data.maxPromptLength + self.data.maxResponseLength"
            ),
            message=(
                f"{role}.maxTokensPerGPU times sequenceParallelSize must be at least data.maxPromptLength plus "
                "data.maxResponseLength: a micro-batch holds at least one sequence"
            ),
            field_path=f".{role}.maxTokensPerGPU",
        )
        for role, is_idle in IS_IDLE.items()
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


def _a_micro_batch_holds_the_longest_sequence(spec: PPOJobSpec) -> Iterator[Problem]:
    longest = spec.data.max_prompt_length + spec.data.max_response_length
    for role, training in (("actor", spec.actor), ("critic", spec.critic)):
        if (role == "critic" and not spec.algorithm.needs_critic) or training.engine is not Engine.FSDP:
            continue
        tokens, slices = training.max_tokens_per_gpu, training.sequence_parallel_size
        if tokens * slices < longest:
            of_group = f" times sequenceParallelSize ({slices})" if slices > 1 else ""
            yield (
                f"{role}.maxTokensPerGPU",
                tokens,
                f"{of_group} is less than the longest sequence, data.maxPromptLength + data.maxResponseLength = "
                f"{longest}: use {-(-longest // slices)} or more, or shorter sequences".lstrip(),
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
BATCH_CHECKS_OF_NEW_JOBS = (_a_micro_batch_holds_the_longest_sequence,)
"""A job whose responses stay shorter than allowed runs all the same."""
