"""Bad PPOJobs whose models, data or code cannot be found; `bad_specs.py` has them beside all others."""

from tests.good_spec import BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


_WORKER = {"name": "shaper", "path": "shaper.py", "className": "Shaper", "pool": "critic",
           "hooks": [{"after": "Score", "method": "shape"}]}  # fmt: skip

BAD_PATHS = (
    BadSpec("path with a NUL", {_spec("model", "actor", "path"): "/data/model\x00"},
            "spec.model.actor.path", "control characters", shows=repr("/data/model\x00")),
    BadSpec("model of the hub without its scheme", {_spec("model", "actor", "path"): "Qwen/Qwen2.5-0.5B"},
            "spec.model.actor.path", "if it is a repository of the Hugging Face Hub, write hf://Qwen/Qwen2.5-0.5B",
            shows="'Qwen/Qwen2.5-0.5B'"),
    BadSpec("page of the hub", {_spec("model", "actor", "path"): "https://huggingface.co/Qwen/Qwen2.5-0.5B/tree/main"},
            "spec.model.actor.path", "write hf://Qwen/Qwen2.5-0.5B", shows="'https://huggingface.co/Qwen"),
    BadSpec("reward model by a relative path",
            {_spec("reward", "type"): "Both", _spec("model", "reward"): {"path": "rm"}},
            "spec.model.reward.path", "must be an absolute path such as /data/models/name, or hf://", shows="'rm'"),
    BadSpec("model in a bucket with a slash at its end", {_spec("model", "critic"): {"path": "s3://bucket/model/"}},
            "spec.model.critic.path", "remove the slash at its end", shows="'s3://bucket/model/'"),
    BadSpec("whole bucket as a model", {_spec("model", "ref"): {"path": "gs://bucket"}},
            "spec.model.ref.path", "s3://bucket/prefix or gs://bucket/prefix", shows="'gs://bucket'"),
    BadSpec("model on a disk of Windows", {_spec("model", "actor", "path"): "C:\\models\\tiny"},
            "spec.model.actor.path", "must be an absolute path such as /data/models/name, or hf://", shows="'C:"),
    BadSpec("relative path of prompts",
            {_spec("data", "train"): {"files": {"paths": ["/data/a.parquet", "b.parquet"]}}},
            "spec.data.train.files.paths[1]", "must be an absolute path such as /data/train.parquet, or hf://datasets/",
            shows="'b.parquet'"),
    BadSpec("file of the hub without its path",
            {_spec("data", "train"): {"files": {"paths": ["hf://datasets/openai/gsm8k.parquet"]}}},
            "spec.data.train.files.paths[0]", "hf://datasets/organisation/name[@revision]/path/file",
            shows="'hf://datasets/openai/gsm8k.parquet'"),
    BadSpec("data set of the hub without its scheme",
            {_spec("data", "train"): {"huggingFace": {"path": "openai/gsm8k"}}},
            "spec.data.train.huggingFace.path", "write hf://openai/gsm8k", shows="'openai/gsm8k'"),
    BadSpec("file of no known format", {_spec("data", "train"): {"files": {"paths": ["/data/train.csv"]}}},
            "spec.data.train.files.paths[0]", "must end with .parquet, or with", shows="'/data/train.csv'"),
    BadSpec("files of two formats",
            {_spec("data", "validation"): {"files": {"paths": ["/data/a.json", "/data/b.jsonl", "/data/c.parquet"]}}},
            "spec.data.validation.files.paths[2]", "the first file is JSON Lines", shows="'/data/c.parquet'"),
    BadSpec("reward that is not Python", {_spec("reward", "function"): {"path": "/data/reward.txt"}},
            "spec.reward.function.path", "must end with .py", shows="'/data/reward.txt'"),
    BadSpec("relative path of an estimator",
            {_spec("algorithm"): {"advantageEstimator": "Function", "advantageFunction": {"path": "own.py"}}},
            "spec.algorithm.advantageFunction.path", "must begin with /", shows="'own.py'"),
    BadSpec("policy loss that is no Python",
            {_spec("algorithm"): {"policyLoss": "Function", "policyLossFunction": {"path": "/data/own.txt"}}},
            "spec.algorithm.policyLossFunction.path", "must end with .py", shows="'/data/own.txt'"),
    BadSpec("relative path of a training engine",
            {_spec("actor"): {"engine": "Class", "engineClass": {"path": "own.py", "className": "Own"}}},
            "spec.actor.engineClass.path", "must begin with /", shows="'own.py'"),
    BadSpec("relative path of a worker", {_spec("workers"): [_WORKER]},
            "spec.workers[0].path", "must begin with /", shows="'shaper.py'"),
)  # fmt: skip
