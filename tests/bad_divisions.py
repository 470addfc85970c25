"""Bad PPOJobs whose models cannot be divided over their GPUs; `bad_specs.py` has them beside all others."""

from tests.good_spec import BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


# The actor's pool has 2 GPUs, the critic's one.
BAD_DIVISIONS = (
    BadSpec("tensor parallel size that does not divide the node", {_spec("actor", "tensorParallelSize"): 3},
            "spec.actor.tensorParallelSize", "does not divide the 2 GPUs of a node of pool actor", shows="3"),
    BadSpec("tensor parallel size that spans nodes",
            {_spec("actor", "tensorParallelSize"): 4, _spec("pools", 0, "nodes"): 2},
            "spec.actor.tensorParallelSize", "does not divide the 2 GPUs of a node of pool actor", shows="4"),
    BadSpec("critic's slices for more GPUs than it has", {_spec("critic", "sequenceParallelSize"): 2},
            "spec.critic.sequenceParallelSize", "does not divide the 1 GPUs of a node of pool critic", shows="2"),
    BadSpec("tensor and sequence parallelism for more GPUs than a node has",
            {_spec("actor", "tensorParallelSize"): 2, _spec("actor", "sequenceParallelSize"): 2},
            "spec.actor.tensorParallelSize", "tensorParallelSize x sequenceParallelSize = 4 does not divide the 2 GPUs",
            shows="2"),
    BadSpec("copies that do not fill the pool", {_spec("actor", "fsdpSize"): 3},
            "spec.actor.fsdpSize", "it does not divide the 2 GPUs of pool actor", shows="3"),
    BadSpec("copies that do not fill the critic's pool", {_spec("critic", "fsdpSize"): 2},
            "spec.critic.fsdpSize", "it does not divide the 1 GPUs of pool critic", shows="2"),
    BadSpec("copies of divided layers that do not fill the pool",
            {_spec("actor", "fsdpSize"): 2, _spec("actor", "tensorParallelSize"): 2},
            "spec.actor.fsdpSize", "times tensorParallelSize 2 it does not divide the 2 GPUs", shows="2"),
    BadSpec("copies that cut a sequence-parallel group",
            {_spec("actor", "fsdpSize"): 1, _spec("actor", "sequenceParallelSize"): 2},
            "spec.actor.fsdpSize", "sequenceParallelSize is 2: use a multiple of it", shows="1"),
    BadSpec("stages that do not divide the pool", {_spec("actor", "pipelineParallelSize"): 3},
            "spec.actor.pipelineParallelSize", "does not divide the 2 GPUs of pool actor: use a divisor", shows="3"),
    BadSpec("stages of the critic on one GPU", {_spec("critic", "pipelineParallelSize"): 2},
            "spec.critic.pipelineParallelSize", "does not divide the 1 GPUs of pool critic", shows="2"),
    BadSpec("stages of divided layers that do not divide the pool",
            {_spec("actor", "pipelineParallelSize"): 2, _spec("actor", "tensorParallelSize"): 2},
            "spec.actor.pipelineParallelSize",
            "times tensorParallelSize x sequenceParallelSize = 2 does not divide the 2 GPUs", shows="2"),
    BadSpec("copies of stages that do not fill the pool",
            {_spec("actor", "fsdpSize"): 2, _spec("actor", "pipelineParallelSize"): 2},
            "spec.actor.fsdpSize", "times pipelineParallelSize 2 it does not divide the 2 GPUs", shows="2"),
    BadSpec("stages of the reference in a pool too small",
            {_spec("actor", "pipelineParallelSize"): 2, _spec("algorithm"): {"kl": {"inReward": True}}},
            "spec.actor.pipelineParallelSize", "set placement.ref to actor", shows="2", server_refuses=False),
    BadSpec("copies of the reference in a pool too small",
            {_spec("actor", "fsdpSize"): 2, _spec("algorithm"): {"kl": {"inReward": True}}},
            "spec.actor.fsdpSize", "set placement.ref to actor", shows="2", server_refuses=False),
    BadSpec("reference divided over a pool too small",
            {_spec("actor", "sequenceParallelSize"): 2, _spec("algorithm"): {"kl": {"inReward": True}}},
            "spec.actor.sequenceParallelSize", "set placement.ref to actor", shows="2", server_refuses=False),
    BadSpec("replica on more GPUs than a node has",
            {_spec("rollout"): {"tensorParallelSize": 4}, _spec("pools", 0, "nodes"): 2},
            "spec.rollout.tensorParallelSize", "does not divide the 2 GPUs of a node of pool actor", shows="4"),
    BadSpec("replica divided over CPUs", {_spec("device"): "CPU", _spec("rollout"): {"tensorParallelSize": 2}},
            "spec.rollout.tensorParallelSize", "set it to 1", shows="2"),
    BadSpec("no peers at all", {_spec("actor", "sequenceParallelSize"): 0},
            "spec.actor.sequenceParallelSize", "greater than or equal to 1", shows="0"),
)  # fmt: skip
