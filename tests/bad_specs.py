"""Bad PPOJobs, one mistake each: what `parse_manifest` says of it, and whether the API server refuses it too.

The unit tests of the contract and the integration test against the real API server read this table, so that both
languages of a rule, Python and CEL, are held to the same answer. `GOOD` is what all of them begin from.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GOOD: dict[str, Any] = {
    "apiVersion": "ppojob.dev/v1alpha1",
    "kind": "PPOJob",
    "metadata": {"name": "good"},
    "spec": {
        "image": "trainer:1",
        "model": {"actor": {"path": "/data/model"}},
        "data": {
            "train": {"type": "ReasoningGym", "reasoningGym": {"task": "chain_sum"}},
            "trainBatchSize": 16,
        },
        "reward": {"function": {"module": "ppojob_trainer.rewards.reasoning_gym"}},
        "actor": {"miniBatchSize": 8},
        "critic": {"miniBatchSize": 8},
        "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
        "placement": {"actor": "actor", "critic": "critic"},
        "storage": {"persistentVolumeClaim": "ppojob-data"},
    },
}

Step = str | int
GONE = object()
"""Takes the field out."""


@dataclass(frozen=True)
class BadSpec:
    """One mistake."""

    name: str
    changes: Mapping[tuple[Step, ...], Any]
    """New values by their places in `GOOD`."""
    path: str
    """The path of the field that is named."""
    says: str
    """What the message must contain: the remedy, or the bound."""
    shows: str = ""
    """The value that must be shown."""
    server_refuses: bool = True
    """Whether the API server refuses it, with strict field validation as kubectl asks for."""

    def manifest(self) -> dict[str, Any]:
        """Return the whole bad PPOJob."""
        return with_changes(self.changes)


def with_changes(changes: Mapping[tuple[Step, ...], Any]) -> dict[str, Any]:
    """Return `GOOD` with values changed, added or taken out."""
    manifest = copy.deepcopy(GOOD)
    for (*parents, last), value in changes.items():
        node: Any = manifest
        for step in parents:
            node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
        if value is GONE:
            del node[last]
        else:
            node[last] = value
    return manifest


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


_ONE_POOL = {_spec("pools", 1): GONE, _spec("placement", "critic"): "actor"}

BAD_SPECS = (
    # Pools and placement.
    BadSpec("pool name twice", {_spec("pools", 1, "name"): "actor", _spec("placement", "critic"): "actor"},
            "spec.pools[1].name", "taken by another pool", shows="'actor'"),
    BadSpec("placement to a missing pool", {_spec("placement", "critic"): "critics"},
            "spec.placement.critic", "use one of actor, critic", shows="'critics'"),
    BadSpec("reward placed in a missing pool", {_spec("placement", "reward"): "cpu"},
            "spec.placement.reward", "there is no pool of this name", shows="'cpu'"),
    BadSpec("no place for the actor", {_spec("placement", "actor"): GONE},
            "spec.placement.actor", "required"),
    BadSpec("zero GPUs", {_spec("pools", 0, "gpusPerNode"): 0},
            "spec.pools[0].gpusPerNode", "greater than or equal to 1", shows="0"),
    BadSpec("GPUs not given", {_spec("pools", 0, "gpusPerNode"): GONE},
            "spec.pools[0].gpusPerNode", "required"),
    BadSpec("negative nodes", {_spec("pools", 0, "nodes"): -1},
            "spec.pools[0].nodes", "greater than or equal to 1", shows="-1"),
    BadSpec("no pools", {_spec("pools"): []},
            "spec.pools", "at least 1 item"),
    BadSpec("eight pools", {_spec("pools"): [{"name": f"p{i}", "gpusPerNode": 1} for i in range(8)],
                            _spec("placement"): {"actor": "p0"}},
            "spec.pools", "at most 7 items"),
    BadSpec("pool name in capitals", {_spec("pools", 0, "name"): "Actor", _spec("placement", "actor"): "Actor"},
            "spec.pools[0].name", "pattern", shows="'Actor'"),
    BadSpec("memory that is no quantity", {_spec("pools", 0, "resourcesPerGPU"): {"memory": "64 gigabytes"}},
            "spec.pools[0].resourcesPerGPU.memory", "pattern", shows="'64 gigabytes'"),
    # The schedule.
    BadSpec("overlapped in one pool", {**_ONE_POOL, _spec("schedule"): {"mode": "Overlapped"}},
            "spec.schedule.mode", "different pools", shows="'Overlapped'"),
    BadSpec("parallel update without a pool for the critic",
            {_spec("placement", "critic"): GONE, _spec("schedule"): {"mode": "ParallelUpdate"}},
            "spec.schedule.mode", "use Serial or Auto", shows="'ParallelUpdate'"),
    BadSpec("schedule that does not exist", {_spec("schedule"): {"mode": "Fast"}},
            "spec.schedule.mode", "'Serial'", shows="'Fast'"),
    # Sizes.
    BadSpec("actor's mini batch does not divide", {_spec("actor", "miniBatchSize"): 6},
            "spec.actor.miniBatchSize", "does not divide data.trainBatchSize (16): use 4", shows="6"),
    BadSpec("critic's mini batch does not divide", {_spec("critic", "miniBatchSize"): 32},
            "spec.critic.miniBatchSize", "does not divide data.trainBatchSize (16): use 16", shows="32"),
    BadSpec("empty batch", {_spec("data", "trainBatchSize"): 0},
            "spec.data.trainBatchSize", "greater than or equal to 1", shows="0"),
    BadSpec("negative response length", {_spec("data", "maxResponseLength"): -5},
            "spec.data.maxResponseLength", "greater than or equal to 1", shows="-5"),
    BadSpec("no steps", {_spec("trainer"): {"totalSteps": 0}},
            "spec.trainer.totalSteps", "greater than or equal to 1", shows="0"),
    BadSpec("words for a number", {_spec("trainer"): {"totalSteps": "many"}},
            "spec.trainer.totalSteps", "valid integer", shows="'many'"),
    BadSpec("negative learning rate", {_spec("actor", "learningRate"): -1.0e-6},
            "spec.actor.learningRate", "greater than or equal to 0", shows="-1e-06"),
    BadSpec("temperature zero", {_spec("rollout"): {"temperature": 0}},
            "spec.rollout.temperature", "greater than 0", shows="0"),
    BadSpec("dual clip that clips all", {_spec("actor", "clipRatioDual"): 1.0},
            "spec.actor.clipRatioDual", "greater than 1", shows="1.0"),
    BadSpec("more than all of the memory", {_spec("rollout"): {"gpuMemoryUtilization": 1.5}},
            "spec.rollout.gpuMemoryUtilization", "less than or equal to 1", shows="1.5"),
    BadSpec("seed too large", {_spec("trainer"): {"seed": 2**31}},
            "spec.trainer.seed", "less than or equal to 2147483647", shows="2147483648"),
    # Data and reward.
    BadSpec("data without its block", {_spec("data", "train"): {"type": "Parquet"}},
            "spec.data.train.files", "type Parquet needs the block files"),
    BadSpec("data with another type's block",
            {_spec("data", "validation"): {"type": "ReasoningGym", "files": {"paths": ["/data/a.jsonl"]}}},
            "spec.data.validation.reasoningGym", "needs the block reasoningGym"),
    BadSpec("data of no type", {_spec("data", "train", "type"): GONE},
            "spec.data.train.type", "required"),
    BadSpec("unknown kind of data", {_spec("data", "train", "type"): "CSV"},
            "spec.data.train.type", "'ReasoningGym'", shows="'CSV'"),
    BadSpec("no files", {_spec("data", "train"): {"type": "JSONL", "files": {"paths": []}}},
            "spec.data.train.files.paths", "at least 1 item"),
    BadSpec("module and path both", {_spec("reward", "function", "path"): "/data/reward.py"},
            "spec.reward.function", "either module or path", shows="/data/reward.py"),
    BadSpec("neither module nor path", {_spec("reward", "function"): {"extract": "last_line"}},
            "spec.reward.function", "either module or path"),
    BadSpec("reward left out", {_spec("reward"): GONE},
            "spec.reward", "required"),
    BadSpec("reward that does not exist", {_spec("reward", "type"): "Oracle"},
            "spec.reward.type", "'Function'", shows="'Oracle'"),
    # Unknown fields and enums.
    BadSpec("unknown field", {_spec("actor", "learningRates"): 1.0e-6},
            "spec.actor.learningRates", "there is no such field"),
    BadSpec("snake case", {_spec("data", "train_batch_size_"): 16},
            "spec.data.train_batch_size_", "there is no such field"),
    BadSpec("unknown field at the root", {("specs",): {}},
            "specs", "there is no such field"),
    BadSpec("estimator that does not exist", {_spec("algorithm"): {"advantageEstimator": "GAE"}},
            "spec.algorithm.advantageEstimator", "'gae'", shows="'GAE'"),
    BadSpec("device that does not exist", {_spec("device"): "tpu"},
            "spec.device", "'cuda' or 'cpu'", shows="'tpu'"),
    # The object itself.
    BadSpec("name too long", {("metadata", "name"): "a" * 41},
            "metadata.name", "at most 40", shows="a" * 41),
    BadSpec("name in capitals", {("metadata", "name"): "Good"},
            "metadata.name", "lower-case", shows="'Good'"),
    BadSpec("name that begins with a digit", {("metadata", "name"): "1st"},
            "metadata.name", "beginning with a letter", shows="'1st'"),
    BadSpec("no name", {("metadata",): {}},
            "metadata.name", "required"),
    BadSpec("no spec", {("spec",): GONE},
            "spec", "required"),
    BadSpec("another kind", {("kind",): "RayJob"},
            "kind", "must be PPOJob", shows="'RayJob'"),
    BadSpec("another version", {("apiVersion",): "ppojob.dev/v2"},
            "apiVersion", "must be ppojob.dev/v1alpha1", shows="'ppojob.dev/v2'"),
    # The rest.
    BadSpec("no image", {_spec("image"): ""},
            "spec.image", "at least 1 character"),
    BadSpec("no model", {_spec("model", "actor", "path"): GONE},
            "spec.model.actor.path", "required"),
    BadSpec("variable given twice", {_spec("env"): [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
            "spec.env[1].name", "given twice", shows="'A'"),
    BadSpec("relative mount path", {_spec("storage", "mountPath"): "data"},
            "spec.storage.mountPath", "pattern", shows="'data'"),
    BadSpec("keep no checkpoint", {_spec("checkpoint"): {"keep": 0}},
            "spec.checkpoint.keep", "greater than or equal to 1", shows="0"),
    BadSpec("negative retries", {_spec("runPolicy"): {"backoffLimit": -1}},
            "spec.runPolicy.backoffLimit", "greater than or equal to 0", shows="-1"),
)  # fmt: skip
"""Every mistake is refused; none is refused for another reason."""
