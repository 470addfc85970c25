"""Bad PPOJobs whose prompts come from no source or from too many; `bad_specs.py` has them beside all others."""

from typing import Any

from tests.good_spec import BadSpec, Step

_GYM = {"reasoningGym": {"task": "gcd"}}
_SUMS, _GCD = {"name": "sums", "reasoningGym": {"task": "chain_sum"}}, {"name": "gcd", **_GYM}


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


def _mixture(*sources: dict[str, Any], **beside: Any) -> dict[tuple[Step, ...], Any]:
    return {_spec("data", "train"): {"mixture": [*sources], **beside}}


def _files(name: str, *paths: str) -> dict[str, Any]:
    return {"name": name, "files": {"paths": [*paths]}}


BAD_DATA = (
    BadSpec("data without a source", {_spec("data", "train"): {"systemPrompt": "Answer."}},
            "spec.data.train", "exactly one of reasoningGym, files, huggingFace and mixture"),
    BadSpec("two sources of validation data", {_spec("data", "validation"): {
                **_GYM, "files": {"paths": ["/data/a.jsonl"]}}},
            "spec.data.validation", "exactly one of reasoningGym, files and", shows="['reasoningGym', 'files']"),
    BadSpec("kind of data with a type", {_spec("data", "train", "type"): "ReasoningGym"},
            "spec.data.train.type", "no such field", shows="'ReasoningGym'"),
    BadSpec("no files", {_spec("data", "train"): {"files": {"paths": []}}},
            "spec.data.train.files.paths", "at least 1 item"),
    BadSpec("column without a name", {_spec("data", "train"): {
                "files": {"paths": ["/data/a.jsonl"], "groundTruthColumn": ""}}},
            "spec.data.train.files.groundTruthColumn", "at least 1 character"),
    BadSpec("source beside a mixture", _mixture(_SUMS, _GCD, **_GYM),
            "spec.data.train", "exactly one of reasoningGym, files, huggingFace and mixture",
            shows="['reasoningGym', 'mixture']"),
    BadSpec("system prompt beside a mixture", _mixture(_SUMS, _GCD, systemPrompt="Answer."),
            "spec.data.train.systemPrompt", "each source of a mixture has its own systemPrompt: move it there",
            shows="'Answer.'"),
    BadSpec("mixture of one source", _mixture(_SUMS),
            "spec.data.train.mixture", "at least 2 items"),
    BadSpec("mixture of 17 sources", _mixture(*({**_GCD, "name": f"s{index}"} for index in range(17))),
            "spec.data.train.mixture", "at most 16 items"),
    BadSpec("mixture for validation", {_spec("data", "validation"): {"mixture": [_SUMS, _GCD]}},
            "spec.data.validation.mixture", "no such field"),
    BadSpec("source of a mixture without a block", _mixture(_SUMS, {"name": "gcd"}),
            "spec.data.train.mixture[1]", "exactly one of reasoningGym, files and huggingFace"),
    BadSpec("source of a mixture with two blocks", _mixture(_SUMS, {**_GCD, "files": {"paths": ["/data/a.jsonl"]}}),
            "spec.data.train.mixture[1]", "exactly one of reasoningGym, files and", shows="['reasoningGym', 'files']"),
    BadSpec("source of a mixture without a name", _mixture(_SUMS, _GYM),
            "spec.data.train.mixture[1].name", "required"),
    BadSpec("source of a mixture twice", _mixture(_SUMS, _GCD, _SUMS),
            "spec.data.train.mixture[2].name", "another source has this name: give each", shows="'sums'"),
    BadSpec("name of a source with a slash", _mixture(_SUMS, {**_GCD, "name": "openai/gsm8k"}),
            "spec.data.train.mixture[1].name", "must have lower-case letters", shows="'openai/gsm8k'"),
    BadSpec("source of a mixture without a share", _mixture(_SUMS, {**_GCD, "weight": 0}),
            "spec.data.train.mixture[1].weight", "greater than 0", shows="0"),
    BadSpec("negative weight of a source", _mixture(_SUMS, {**_GCD, "weight": -0.5}),
            "spec.data.train.mixture[1].weight", "greater than 0", shows="-0.5"),
    BadSpec("weight of a source that is too large", _mixture(_SUMS, {**_GCD, "weight": 1e7}),
            "spec.data.train.mixture[1].weight", "less than or equal to 1000000", shows="10000000.0"),
    BadSpec("weight of a source as a text", _mixture(_SUMS, {**_GCD, "weight": "0.5"}),
            "spec.data.train.mixture[1].weight", "valid number", shows="'0.5'"),
    BadSpec("relative path in a mixture", _mixture(_SUMS, _files("own", "/data/a.jsonl", "b.jsonl")),
            "spec.data.train.mixture[1].files.paths[1]", "must be an absolute path such as /data/train.parquet",
            shows="'b.jsonl'"),
    BadSpec("files of two formats in one source of a mixture",
            _mixture(_files("a", "/data/a.jsonl"), _files("b", "/data/b.parquet", "/data/b.jsonl")),
            "spec.data.train.mixture[1].files.paths[1]", "the first file is Parquet", shows="'/data/b.jsonl'"),
    BadSpec("data set of the hub without its scheme in a mixture",
            _mixture(_SUMS, {"name": "gsm8k", "huggingFace": {"path": "openai/gsm8k"}}),
            "spec.data.train.mixture[1].huggingFace.path", "write hf://openai/gsm8k", shows="'openai/gsm8k'"),
    BadSpec("more files than all sources may name",
            _mixture(*(_files(name, *(f"/data/{name}/{number}.jsonl" for number in range(129))) for name in "ab")),
            "spec.data.train.mixture", "may name at most 256 files: join files", shows="258"),
)  # fmt: skip
