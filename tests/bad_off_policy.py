"""Bad specs of training that is not on-policy: rows of the table of `bad_specs`."""

from tests.good_spec import BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


_OFF = {_spec("schedule", "mode"): "OneStepOff", _spec("algorithm", "rolloutCorrection"): {"method": "Truncate"}}
APART = {
    **_OFF,
    _spec("pools"): [{"name": name, "gpusPerNode": 2} for name in ("actor", "critic", "rollout")],
    _spec("placement", "rollout"): ["rollout"],
}

BAD_OFF_POLICY = (
    BadSpec(
        "older weights without a correction",
        {**APART, _spec("algorithm"): {}},
        "spec.schedule.mode",
        "add algorithm.rolloutCorrection",
        shows="OneStepOff",
    ),
    BadSpec(
        "generation in the actor's pool while it trains",
        {**_OFF},
        "spec.schedule.mode",
        "pool actor of placement.rollout has the actor",
        shows="OneStepOff",
    ),
    BadSpec(
        "generation in the critic's pool while it trains",
        {**_OFF, _spec("placement", "rollout"): ["critic"]},
        "spec.schedule.mode",
        "pool critic of placement.rollout has the critic",
        shows="OneStepOff",
    ),
    BadSpec(
        "generation that shares a pool that trains",
        {**APART, _spec("placement", "rollout"): ["rollout", "critic"]},
        "spec.schedule.mode",
        "pool critic of placement.rollout has the critic",
        shows="OneStepOff",
    ),
    BadSpec(
        "prompts that are replaced while older weights generate",
        {
            **APART,
            _spec("algorithm", "advantageEstimator"): "GRPO",
            _spec("algorithm", "dynamicSampling"): {},
            _spec("rollout", "samplesPerPrompt"): 4,
        },
        "spec.schedule.mode",
        "remove algorithm.dynamicSampling",
        shows="OneStepOff",
    ),
    BadSpec(
        "overlaps of another mode",
        {**APART, _spec("schedule", "disabledOverlaps"): ["Values"]},
        "spec.schedule.disabledOverlaps",
        "use Overlapped",
        shows="Values",
    ),
    BadSpec(
        "staleness on-policy",
        {_spec("schedule"): {"mode": "Overlapped", "maxStaleness": 2}},
        "spec.schedule.maxStaleness",
        "set schedule.mode: OneStepOff",
        shows="2",
    ),
    BadSpec(
        "weights that change under engines of an on-policy job, which may sleep",
        {_spec("schedule"): {"mode": "Overlapped", "weightUpdates": "InFlight"}},
        "spec.schedule.weightUpdates",
        "set schedule.mode: OneStepOff",
        shows="InFlight",
    ),
    BadSpec(
        "weights that change under engines that sleep while the critic trains",
        {
            **APART,
            _spec("schedule", "weightUpdates"): "InFlight",
            _spec("placement", "rollout"): ["rollout", "critic"],
        },
        "spec.schedule.mode",
        "pool critic of placement.rollout has the critic",
        shows="OneStepOff",
    ),
    BadSpec(
        "weights that change under a scheduler that does not know it",
        {
            **APART,
            _spec("schedule", "weightUpdates"): "InFlight",
            _spec("rollout", "engineArgs"): {"scheduling_policy": "priority"},
        },
        "spec.rollout.engineArgs.scheduling_policy",
        "remove rollout.engineArgs.scheduling_policy, or schedule.weightUpdates: InFlight",
        shows="priority",
        server_refuses=False,
    ),
    BadSpec(
        "an unknown time of weight updates",
        {**APART, _spec("schedule", "weightUpdates"): "Sometimes"},
        "spec.schedule.weightUpdates",
        "InFlight",
        shows="Sometimes",
    ),
    BadSpec(
        "too old weights",
        {**APART, _spec("schedule", "maxStaleness"): 5},
        "spec.schedule.maxStaleness",
        "less than or equal to 4",
        shows="5",
    ),
    BadSpec(
        "a correction without the engine's log-probs",
        {_spec("algorithm", "rolloutCorrection"): {}, _spec("rollout", "logProbs"): False},
        "spec.rollout.logProbs",
        "set it to true, or remove the correction",
        shows="False",
    ),
    BadSpec(
        "the engine's log-probs in place of the trainer's, and there are none",
        {_spec("algorithm", "rolloutCorrection"): {"method": "Bypass"}, _spec("rollout", "logProbs"): False},
        "spec.rollout.logProbs",
        "set it to true, or remove the correction",
        shows="False",
    ),
    BadSpec(
        "a lower bound that nothing reads",
        {_spec("algorithm", "rolloutCorrection"): {"lower": 0.5}},
        "spec.algorithm.rolloutCorrection.lower",
        "use method Mask",
        shows="0.5",
    ),
    BadSpec(
        "bounds that let nothing through",
        {_spec("algorithm", "rolloutCorrection"): {"method": "Mask", "lower": 3.0}},
        "spec.algorithm.rolloutCorrection.upper",
        "set upper above lower",
        shows="2",
    ),
    BadSpec(
        "an upper bound below the default of the lower one",
        {_spec("algorithm", "rolloutCorrection"): {"method": "Mask", "upper": 0.4}},
        "spec.algorithm.rolloutCorrection.upper",
        "set upper above lower",
        shows="0.4",
    ),
)
