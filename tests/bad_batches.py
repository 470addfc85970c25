"""Bad PPOJobs whose batches, minibatches or micro-batches do not fit; `bad_specs.py` has them beside all others."""

from tests.good_spec import GONE, BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


BAD_BATCHES = (
    BadSpec("actor's mini batch does not divide", {_spec("actor", "miniBatchSize"): 6},
            "spec.actor.miniBatchSize", "does not divide data.trainBatchSize (16): use 4", shows="6"),
    BadSpec("critic's mini batch above the batch", {_spec("critic", "miniBatchSize"): 32},
            "spec.critic.miniBatchSize", "is above data.trainBatchSize (16): use 16", shows="32"),
    BadSpec("actor's mini batch above the batch", {_spec("actor", "miniBatchSize"): GONE},
            "spec.actor.miniBatchSize", "is above data.trainBatchSize (16): use 16", shows="256"),
    BadSpec("actor's micro-batch below a sequence", {_spec("actor", "maxTokensPerGPU"): 1023},
            "spec.actor.maxTokensPerGPU",
            "is less than the longest sequence, data.maxPromptLength + data.maxResponseLength = 1024: use 1024 or more",
            shows="1023"),
    BadSpec("micro-batch of two slices below a sequence",
            {_spec("actor", "maxTokensPerGPU"): 511, _spec("actor", "sequenceParallelSize"): 2},
            "spec.actor.maxTokensPerGPU", "times sequenceParallelSize (2) is less than the longest sequence",
            shows="511"),
    BadSpec("critic's micro-batch below a sequence",
            {_spec("data", "maxResponseLength"): 32_300, _spec("actor", "maxTokensPerGPU"): 65_536},
            "spec.critic.maxTokensPerGPU", "use 32812 or more, or shorter sequences", shows="32768"),
)  # fmt: skip
