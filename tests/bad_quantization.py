"""Bad specs of engines with rounded weights: rows of the table of `bad_specs`."""

from tests.good_spec import BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


_FP8 = {_spec("rollout"): {"quantization": "FP8"}}
_CORRECTED = {**_FP8, _spec("algorithm", "rolloutCorrection"): {"method": "Truncate"}}
_WHERE = "spec.rollout.quantization"

BAD_QUANTIZATION = (
    BadSpec("a format in verl's spelling", {_spec("rollout"): {"quantization": "fp8"}}, _WHERE, "'FP8'", shows="'fp8'"),
    BadSpec("rounded weights without a correction", _FP8, _WHERE, "add algorithm.rolloutCorrection", shows="FP8"),
    BadSpec(
        "rounded weights whose correction is none",
        {**_FP8, _spec("algorithm", "rolloutCorrection"): {"method": "None"}},
        _WHERE,
        "{method: Truncate}",
        shows="FP8",
    ),
    BadSpec(
        "rounded weights without the log-probs that the correction reads",
        {**_CORRECTED, _spec("rollout", "logProbs"): False},
        "spec.rollout.logProbs",
        "set it to true",
        shows="False",
    ),
    BadSpec(
        "rounded weights on the CPU",
        {**_CORRECTED, _spec("device"): "CPU"},
        _WHERE,
        "set device: CUDA",
        shows="FP8",
    ),
    BadSpec(
        "rounded weights and recorded experts",
        {**_CORRECTED, _spec("rollout", "routingReplay"): True},
        _WHERE,
        "remove rollout.quantization, or set rollout.routingReplay: false",
        shows="FP8",
    ),
)
