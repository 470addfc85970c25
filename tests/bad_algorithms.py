"""Bad PPOJobs whose algorithm or training engine cannot be computed; `bad_specs.py` has them beside all others."""

from typing import Any

from tests.good_spec import BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


def _algorithm(**fields: Any) -> dict[tuple[Step, ...], Any]:
    return {_spec("algorithm"): fields}


_SAMPLES = {_spec("rollout"): {"samplesPerPrompt": 4}}
_OWN = {"module": "own"}

BAD_ALGORITHMS = (
    BadSpec("policy loss that does not exist", _algorithm(policyLoss="gspo"),
            "spec.algorithm.policyLoss", "'PPO', 'GSPO', 'CISPO' or 'Function'", shows="'gspo'"),
    BadSpec("own estimator without its function", _algorithm(advantageEstimator="Function"),
            "spec.algorithm.advantageFunction", "needs this block"),
    BadSpec("own policy loss without its function", _algorithm(policyLoss="Function"),
            "spec.algorithm.policyLossFunction", "needs this block"),
    BadSpec("function that no estimator reads", _algorithm(advantageFunction=_OWN),
            "spec.algorithm.advantageFunction", "GAE reads no function"),
    BadSpec("function that no policy loss reads", _algorithm(policyLossFunction=_OWN),
            "spec.algorithm.policyLossFunction", "PPO reads no function"),
    BadSpec("estimator of no file", _algorithm(advantageEstimator="Function", advantageFunction={}),
            "spec.algorithm.advantageFunction", "exactly one of module and path"),
    BadSpec("policy loss of module and file",
            _algorithm(policyLoss="Function", policyLossFunction={"module": "own", "path": "/data/own.py"}),
            "spec.algorithm.policyLossFunction", "exactly one of module and path", shows="/data/own.py"),
    BadSpec("own estimator that compares one response",
            _algorithm(advantageEstimator="Function", advantageFunction={**_OWN, "needsGroups": True}),
            "spec.rollout.samplesPerPrompt", "use 2 or more", shows="1"),
    BadSpec("critic of an own estimator whose mini batch does not divide",
            {**_algorithm(advantageEstimator="Function", advantageFunction={**_OWN, "needsValues": True}),
             _spec("critic", "miniBatchSize"): 6},
            "spec.critic.miniBatchSize", "does not divide data.trainBatchSize (16): use 4", shows="6"),
    BadSpec("training engine that does not exist", {_spec("actor", "engine"): "Megatron"},
            "spec.actor.engine", "'FSDP' or 'Class'", shows="'Megatron'"),
    BadSpec("own training engine without its class", {_spec("critic", "engine"): "Class"},
            "spec.critic.engineClass", "needs this block"),
    BadSpec("class that no training engine reads",
            {_spec("actor", "engineClass"): {"module": "own", "className": "Own"}},
            "spec.actor.engineClass", "FSDP reads no class: remove the block, or set actor.engine: Class"),
    BadSpec("training engine of module and file",
            {_spec("critic"): {"engine": "Class",
                               "engineClass": {"module": "own", "path": "/data/own.py", "className": "Own"}}},
            "spec.critic.engineClass", "exactly one of module and path", shows="/data/own.py"),
    BadSpec("dynamic sampling without groups", {**_SAMPLES, **_algorithm(dynamicSampling={})},
            "spec.algorithm.dynamicSampling", "use one of GRPO, DrGRPO, RLOO", shows="'maxGenerationBatches': 10"),
    BadSpec("dynamic sampling that never generates",
            {**_SAMPLES, **_algorithm(advantageEstimator="GRPO", dynamicSampling={"maxGenerationBatches": 0})},
            "spec.algorithm.dynamicSampling.maxGenerationBatches", "greater than or equal to 1", shows="0"),
    BadSpec("overlong buffer above the longest response",
            {_spec("reward", "overlongPenalty"): {"buffer": 100_000}, _spec("data", "maxResponseLength"): 1000},
            "spec.reward.overlongPenalty.buffer", "is above data.maxResponseLength (1000): use a part of it, say 200",
            shows="100000"),
)  # fmt: skip
