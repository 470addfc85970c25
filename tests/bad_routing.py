"""Bad specs of mixtures of experts: rows of the table of `bad_specs`."""

from tests.bad_off_policy import APART
from tests.good_spec import BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


BAD_ROUTING = (
    BadSpec(
        "recorded experts of prompts that are not kept",
        {_spec("rollout"): {"routingReplay": True, "enablePrefixCaching": False}},
        "spec.rollout.enablePrefixCaching",
        "set rollout.enablePrefixCaching: true",
        shows="False",
    ),
    BadSpec(
        "recorded experts of drafts",
        {_spec("rollout"): {"routingReplay": True, "speculative": {}}},
        "spec.rollout.speculative",
        "remove rollout.speculative, or set rollout.routingReplay: false",
    ),
    BadSpec(
        "recorded experts of several weights",
        {**APART, _spec("schedule", "weightUpdates"): "InFlight", _spec("rollout", "routingReplay"): True},
        "spec.schedule.weightUpdates",
        "set BetweenGenerations, or set rollout.routingReplay: false",
        shows="InFlight",
    ),
    BadSpec(
        "recorded experts for an engine that does not read them",
        {
            _spec("rollout"): {"routingReplay": True},
            _spec("actor", "engine"): "Class",
            _spec("actor", "engineClass"): {"module": "mine", "className": "Engine"},
        },
        "spec.rollout.routingReplay",
        "set rollout.routingReplay: false",
        shows="True",
    ),
    BadSpec(
        "balanced experts of an engine that does not balance them",
        {
            _spec("actor", "routerAuxLossCoefficient"): 0.5,
            _spec("actor", "engine"): "Class",
            _spec("actor", "engineClass"): {"module": "mine", "className": "Engine"},
        },
        "spec.actor.routerAuxLossCoefficient",
        "set it to 0",
        shows="0.5",
    ),
    BadSpec(
        "balanced experts of compiled layers",
        {_spec("actor", "routerAuxLossCoefficient"): 0.5, _spec("model", "actor", "compile"): True},
        "spec.model.actor.compile",
        "set it to false",
        shows="True",
    ),
    BadSpec(
        "experts divided over one GPU",
        {_spec("rollout"): {"enableExpertParallel": True}},
        "spec.rollout.enableExpertParallel",
        "set it above 1, or rollout.enableExpertParallel: false",
        shows="True",
    ),
    BadSpec(
        "experts divided over CPUs",
        {_spec("rollout"): {"enableExpertParallel": True, "tensorParallelSize": 2}, _spec("device"): "CPU"},
        "spec.rollout.enableExpertParallel",
        "set rollout.enableExpertParallel: false, or device: CUDA",
        shows="True",
    ),
    BadSpec(
        "vLLM's argument for divided experts",
        {_spec("rollout"): {"engineArgs": {"enable_expert_parallel": True}}},
        "spec.rollout.engineArgs.enable_expert_parallel",
        "use rollout.enableExpertParallel",
        shows="True",
        server_refuses=False,
    ),
    BadSpec(
        "experts that vLLM moves",
        {_spec("rollout"): {"engineArgs": {"enable_eplb": True}}},
        "spec.rollout.engineArgs.enable_eplb",
        "remove it",
        shows="True",
        server_refuses=False,
    ),
    BadSpec(
        "experts that do not follow one another",
        {_spec("rollout"): {"engineArgs": {"expert_placement_strategy": "round_robin"}}},
        "spec.rollout.engineArgs.expert_placement_strategy",
        "some of vLLM's kernels need consecutive experts on each GPU: remove it",
        shows="round_robin",
        server_refuses=False,
    ),
    BadSpec(
        "experts recorded by one stage",
        {_spec("rollout"): {"routingReplay": True, "pipelineParallelSize": 2}},
        "spec.rollout.pipelineParallelSize",
        "set it to 1, or rollout.routingReplay: false",
        shows="2",
    ),
    BadSpec(
        "drafts of engines with stages",
        {_spec("rollout"): {"speculative": {}, "pipelineParallelSize": 2}},
        "spec.rollout.pipelineParallelSize",
        "set it to 1, or remove rollout.speculative",
        shows="2",
    ),
    BadSpec(
        "vLLM's argument for stages",
        {_spec("rollout"): {"engineArgs": {"pipeline_parallel_size": 2}}},
        "spec.rollout.engineArgs.pipeline_parallel_size",
        "use rollout.pipelineParallelSize",
        shows="2",
        server_refuses=False,
    ),
    BadSpec(
        "vLLM's argument for the nodes of an engine",
        {_spec("rollout"): {"engineArgs": {"nnodes": 2}}},
        "spec.rollout.engineArgs.nnodes",
        "use rollout.pipelineParallelSize or tensorParallelSize, of more GPUs than a node has",
        shows="2",
        server_refuses=False,
    ),
    BadSpec(
        "vLLM's argument for recorded experts",
        {_spec("rollout"): {"engineArgs": {"enable_return_routed_experts": True}}},
        "spec.rollout.engineArgs.enable_return_routed_experts",
        "use rollout.routingReplay",
        shows="True",
        server_refuses=False,
    ),
)
