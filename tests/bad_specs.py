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
            node[last] = copy.deepcopy(value)
    return manifest


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


_REWARD_MODEL = {_spec("model", "reward"): {"path": "/data/rm"}}
_BOTH = {**_REWARD_MODEL, _spec("reward", "type"): "Both"}
_WORKER = {"name": "shaper", "path": "/data/shaper.py", "className": "Shaper", "pool": "critic",
           "hooks": [{"after": "Score", "method": "shape"}]}  # fmt: skip


def _worker(**changes: Any) -> dict[tuple[Step, ...], Any]:
    return {_spec("workers"): [{name: value for name, value in {**_WORKER, **changes}.items() if value is not GONE}]}


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
    # The network of a pool.
    BadSpec("variable of another kind in a pool's network",
            {_spec("pools", 0, "network"): {"nccl": {"NCLL_DEBUG": "INFO"}}},
            "spec.pools[0].network.nccl", "begin with NCCL_, UCX_, GLOO_ only", shows="NCLL_DEBUG"),
    BadSpec("network interface twice",
            {_spec("pools", 0, "network"): {"interface": "eth0", "nccl": {"NCCL_SOCKET_IFNAME": "ib0"}}},
            "spec.pools[0].network.interface", "leave interface out", shows="'eth0'"),
    BadSpec("network interface with a space", {_spec("pools", 0, "network"): {"interface": "eth0 eth1"}},
            "spec.pools[0].network.interface", "pattern", shows="'eth0 eth1'"),
    BadSpec("RDMA resource without a domain", {_spec("pools", 0, "network"): {"rdma": {"resourceName": "hca"}}},
            "spec.pools[0].network.rdma.resourceName", "pattern", shows="'hca'"),
    BadSpec("no RDMA devices", {_spec("pools", 0, "network"): {"rdma": {"resourceName": "rdma/hca", "count": 0}}},
            "spec.pools[0].network.rdma.count", "greater than or equal to 1", shows="0"),
    # Devices of a pool.
    BadSpec("two MIG slices in a pod", {_spec("pools", 0, "gpuResourceName"): "nvidia.com/mig-3g.71gb"},
            "spec.pools[0].gpusPerNode", "use gpusPerNode 1, and more nodes", shows="2"),
    BadSpec("claims without a word about the GPUs",
            {_spec("pools", 0, "resourceClaims"): [{"name": "gpus", "resourceClaimTemplateName": "two-h200"}]},
            "spec.pools[0].resourceClaims", "say where the GPUs come from", shows="['gpus']"),
    BadSpec("claim twice",
            {_spec("pools", 0, "gpuResourceName"): "",
             _spec("pools", 0, "resourceClaims"): [{"name": "gpus", "resourceClaimTemplateName": "a"},
                                                   {"name": "gpus", "resourceClaimTemplateName": "b"}]},
            "spec.pools[0].resourceClaims", "taken by another claim", shows="'gpus'"),
    BadSpec("claim without a template",
            {_spec("pools", 0, "gpuResourceName"): "", _spec("pools", 0, "resourceClaims"): [{"name": "gpus"}]},
            "spec.pools[0].resourceClaims[0].resourceClaimTemplateName", "equired"),
    BadSpec("ServiceAccount that is no name", {_spec("serviceAccountName"): "Trainer_1"},
            "spec.serviceAccountName", "pattern", shows="'Trainer_1'"),
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
    BadSpec("critic's mini batch above the batch", {_spec("critic", "miniBatchSize"): 32},
            "spec.critic.miniBatchSize", "is above data.trainBatchSize (16): use 16", shows="32"),
    BadSpec("actor's mini batch above the batch", {_spec("actor", "miniBatchSize"): GONE},
            "spec.actor.miniBatchSize", "is above data.trainBatchSize (16): use 16", shows="256"),
    BadSpec("grpo with one response", {_spec("algorithm"): {"advantageEstimator": "grpo"}},
            "spec.rollout.samplesPerPrompt", "use 2 or more", shows="1"),
    BadSpec("rloo with one response",
            {_spec("algorithm"): {"advantageEstimator": "rloo"}, _spec("rollout"): {"samplesPerPrompt": 1}},
            "spec.rollout.samplesPerPrompt", "use 2 or more", shows="1"),
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
    BadSpec("reward model without a path", {_spec("reward"): {"type": "Model"}, _spec("model", "reward"): {}},
            "spec.model.reward.path", "required"),
    BadSpec("type Model without a reward model", {_spec("reward"): {"type": "Model"}},
            "spec.model.reward", "needs the block model.reward"),
    BadSpec("type Both without a reward model", {_spec("reward", "type"): "Both"},
            "spec.model.reward", "needs the block model.reward"),
    BadSpec("reward model that nobody asks", _REWARD_MODEL,
            "spec.model.reward.path", "reads no model", shows="/data/rm"),
    BadSpec("type Function without a function", {_spec("reward"): {"type": "Function"}},
            "spec.reward.function", "needs the block function"),
    BadSpec("type Both without a function", {**_REWARD_MODEL, _spec("reward"): {"type": "Both"}},
            "spec.reward.function", "needs the block function"),
    BadSpec("type Model with a function", {**_REWARD_MODEL, _spec("reward", "type"): "Model"},
            "spec.reward.function", "reads no function"),
    BadSpec("weights that make every score 0", {**_BOTH, _spec("reward", "weights"): {"function": 0, "model": 0}},
            "spec.reward.weights", "every score would be 0"),
    BadSpec("weights without a sum", {_spec("reward", "weights"): {"function": 2}},
            "spec.reward.weights", "only type Both reads weights", shows="2"),
    BadSpec("negative label", {**_BOTH, _spec("model", "reward", "label"): -1},
            "spec.model.reward.label", "greater than or equal to 0", shows="-1"),
    BadSpec("input that does not exist", {**_BOTH, _spec("model", "reward", "input"): "Tokens"},
            "spec.model.reward.input", "'Chat'", shows="'Tokens'"),
    # Users' own workers.
    BadSpec("worker in a missing pool", _worker(pool="cpu"),
            "spec.workers[0].pool", "there is no pool of this name", shows="'cpu'"),
    BadSpec("worker with the name of a role", _worker(name="critic"),
            "spec.workers[0].name", "built-in worker group", shows="'critic'"),
    BadSpec("worker twice", {_spec("workers"): [_WORKER, _WORKER]},
            "spec.workers[1].name", "taken by another worker", shows="'shaper'"),
    BadSpec("worker of no file", _worker(path=GONE),
            "spec.workers[0]", "either module or path"),
    BadSpec("worker of module and file", _worker(module="shapers"),
            "spec.workers[0]", "either module or path", shows="shapers"),
    BadSpec("worker without a class", _worker(className=GONE),
            "spec.workers[0].className", "required"),
    BadSpec("worker that nobody calls", _worker(hooks=[]),
            "spec.workers[0].hooks", "at least 1 item"),
    BadSpec("hook at no point", _worker(hooks=[{"after": "Reward", "method": "shape"}]),
            "spec.workers[0].hooks[0].after", "'Score'", shows="'Reward'"),
    BadSpec("hook that is no name", _worker(hooks=[{"after": "Score", "method": "shape()"}]),
            "spec.workers[0].hooks[0].method", "pattern", shows="'shape()'"),
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
    # Telemetry.
    BadSpec("port of Ray's own", {_spec("telemetry"): {"prometheusPort": 8265}},
            "spec.telemetry.prometheusPort", "Ray's own", shows="8265"),
    BadSpec("tracker that does not exist", {_spec("telemetry"): {"trackers": ["Aim"]}},
            "spec.telemetry.trackers[0]", "'WandB' or 'MLflow'", shows="'Aim'"),
    BadSpec("profile of no step", {_spec("telemetry"): {"profile": {"steps": []}}},
            "spec.telemetry.profile.steps", "at least 1 item"),
    BadSpec("profile of vLLM", {_spec("telemetry"): {"profile": {"steps": [2], "roles": ["rollout"]}}},
            "spec.telemetry.profile.roles[0]", "'actor'", shows="'rollout'"),
    BadSpec("too many samples", {_spec("telemetry"): {"samplesPerStep": 65}},
            "spec.telemetry.samplesPerStep", "less than or equal to 64", shows="65"),
    # Tensor and sequence parallelism. The actor's pool has 2 GPUs, the critic's one.
    BadSpec("tensor parallel size that does not divide the pool", {_spec("actor", "tensorParallelSize"): 3},
            "spec.actor.tensorParallelSize", "does not divide the 2 GPUs of pool actor", shows="3"),
    BadSpec("critic's slices for more GPUs than it has", {_spec("critic", "sequenceParallelSize"): 2},
            "spec.critic.sequenceParallelSize", "does not divide the 1 GPUs of pool critic", shows="2"),
    BadSpec("reference divided over a pool too small",
            {_spec("actor", "sequenceParallelSize"): 2, _spec("algorithm"): {"kl": {"inReward": True}}},
            "spec.actor.sequenceParallelSize", "set placement.ref to actor", shows="2", server_refuses=False),
    BadSpec("overlaps that the mode has not",
            {_spec("schedule", "mode"): "Serial", _spec("schedule", "without"): ["Values"]},
            "spec.schedule.without", "use Overlapped", shows="Values"),
    BadSpec("both kinds of peers",
            {_spec("actor", "tensorParallelSize"): 2, _spec("actor", "sequenceParallelSize"): 2,
             _spec("pools", 0, "gpusPerNode"): 4},
            "spec.actor.sequenceParallelSize", "set one of them to 1", shows="2"),
    BadSpec("adapters on divided layers",
            {_spec("actor", "tensorParallelSize"): 2, _spec("model", "actor", "lora"): {"rank": 8}},
            "spec.actor.tensorParallelSize", "does not go with model.actor.lora", shows="2"),
    BadSpec("replica on more GPUs than a node has",
            {_spec("rollout"): {"tensorParallelSize": 4}, _spec("pools", 0, "nodes"): 2},
            "spec.rollout.tensorParallelSize", "does not divide the 2 GPUs of a node of pool actor", shows="4"),
    BadSpec("replica divided over CPUs", {_spec("device"): "cpu", _spec("rollout"): {"tensorParallelSize": 2}},
            "spec.rollout.tensorParallelSize", "leave it at 1", shows="2"),
    BadSpec("no peers at all", {_spec("actor", "sequenceParallelSize"): 0},
            "spec.actor.sequenceParallelSize", "greater than or equal to 1", shows="0"),
    # Adapters and offloading.
    BadSpec("reference of adapters in another pool",
            {_spec("model", "actor", "lora"): {"rank": 8}, _spec("placement", "ref"): "critic"},
            "spec.placement.ref", "give model.ref.path", shows="'critic'"),
    BadSpec("offload of a reference that is the actor",
            {_spec("model", "actor", "lora"): {}, _spec("model", "ref"): {"offload": {"parameters": True}}},
            "spec.model.ref.offload.parameters", "set model.actor.offload", shows="True"),
    BadSpec("adapters of rank 0", {_spec("model", "critic"): {"lora": {"rank": 0}}},
            "spec.model.critic.lora.rank", "greater than or equal to 1", shows="0"),
    BadSpec("offload of the CPU",
            {_spec("device"): "cpu", _spec("model", "critic"): {"offload": {"optimizer": True}}},
            "spec.model.critic.offload.optimizer", "in the host's memory already", shows="True"),
    BadSpec("activation offload without checkpointing",
            {_spec("model", "critic"): {"activationOffload": True, "gradientCheckpointing": False}},
            "spec.model.critic.activationOffload", "gradientCheckpointing", shows="True"),
    BadSpec("offload of a reference's optimizer", {_spec("model", "ref"): {"offload": {"optimizer": True}}},
            "spec.model.ref.offload.optimizer", "there is no such field"),
    # Scalars of another type.
    BadSpec("text for an integer", {_spec("data", "trainBatchSize"): "16"},
            "spec.data.trainBatchSize", "valid integer", shows="'16'"),
    BadSpec("truth for an integer", {_spec("pools", 0, "nodes"): True},
            "spec.pools[0].nodes", "valid integer", shows="True"),
    BadSpec("number for a boolean", {_spec("data", "shuffle"): 1},
            "spec.data.shuffle", "valid boolean", shows="1"),
    BadSpec("text for a boolean", {_spec("data", "shuffle"): "yes"},
            "spec.data.shuffle", "valid boolean", shows="'yes'"),
    BadSpec("text for a number", {_spec("actor", "learningRate"): "0.1"},
            "spec.actor.learningRate", "valid number", shows="'0.1'"),
    BadSpec("fraction for an integer", {_spec("trainer"): {"totalSteps": 1.5}},
            "spec.trainer.totalSteps", "valid integer", shows="1.5"),
    BadSpec("number for a text", {_spec("model", "actor", "path"): 7},
            "spec.model.actor.path", "valid string", shows="7"),
    BadSpec("text for an integer in a list", {_spec("telemetry"): {"profile": {"steps": ["2"]}}},
            "spec.telemetry.profile.steps[0]", "valid integer", shows="'2'"),
    # Beyond what can be meant.
    BadSpec("learning rate above 1", {_spec("actor", "learningRate"): 5.0},
            "spec.actor.learningRate", "less than or equal to 1", shows="5.0"),
    BadSpec("steps that no integer holds", {_spec("trainer"): {"totalSteps": 2**31}},
            "spec.trainer.totalSteps", "less than or equal to 2147483647", shows="2147483648"),
    BadSpec("limit of more than a year", {_spec("trainer"): {"phaseTimeoutSeconds": 10**9}},
            "spec.trainer.phaseTimeoutSeconds", "less than or equal to 31536000", shows="1000000000"),
    # Columns and templates.
    BadSpec("column without a name", {_spec("data", "train"): {
                "type": "JSONL", "files": {"paths": ["/data/a.jsonl"], "groundTruthColumn": ""}}},
            "spec.data.train.files.groundTruthColumn", "at least 1 character"),
    BadSpec("empty chat template", {_spec("data", "chatTemplate"): ""},
            "spec.data.chatTemplate", "at least 1 character"),
    BadSpec("number for a save in the background", {_spec("checkpoint"): {"async": 1}},
            "spec.checkpoint.async", "valid boolean", shows="1"),
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
    *(
        BadSpec(f"checkpoints at {why}", {_spec("checkpoint"): {"path": path}},
                "spec.checkpoint.path", "pattern", shows=f"'{path}'")
        for why, path in {
            "a folder": "/data/checkpoints",
            "another kind of store": "hdfs://name/path",
            "an address without a bucket": "s3://",
            "no name of a bucket": "s3://-/prefix",
            "a slash at the end": "s3://bucket/prefix/",
            "an empty segment": "gs://bucket//prefix",
            "a parent": "s3://bucket/../prefix",
        }.items()
    ),
    BadSpec("negative retries", {_spec("runPolicy"): {"backoffLimit": -1}},
            "spec.runPolicy.backoffLimit", "greater than or equal to 0", shows="-1"),
    BadSpec("fewest nodes above the nodes", {_spec("pools", 0, "minNodes"): 2},
            "spec.pools[0].minNodes", "is above nodes, which is 1: lower it", shows="2"),
    BadSpec("most nodes below the nodes", {_spec("pools", 0, "nodes"): 3, _spec("pools", 0, "maxNodes"): 2},
            "spec.pools[0].maxNodes", "is below nodes, which is 3: raise it", shows="2"),
    BadSpec("no time to stop in order", {_spec("runPolicy"): {"stopGracePeriodSeconds": 0}},
            "spec.runPolicy.stopGracePeriodSeconds", "greater than or equal to 1", shows="0"),
    BadSpec("pool with Kueue's name for the head", {
                _spec("runPolicy"): {"queueName": "gpus"}, _spec("pools", 1, "name"): "head",
                _spec("placement", "critic"): "head"},
            "spec.pools[1].name", "rename the pool", shows="'head'"),
    BadSpec("priority without a queue", {_spec("runPolicy"): {"queuePriorityClass": "high"}},
            "spec.runPolicy.queuePriorityClass", "set runPolicy.queueName too, or take it out", shows="'high'"),
    BadSpec("gang scheduler's queue without it", {_spec("runPolicy"): {"gangSchedulerQueue": "team"}},
            "spec.runPolicy.gangSchedulerQueue", "set gangScheduler, or take it out", shows="'team'"),
    BadSpec("KAI without a queue", {_spec("runPolicy"): {"gangScheduler": "KAI"}},
            "spec.runPolicy.gangScheduler", "gangSchedulerQueue", shows="'KAI'"),
    BadSpec("queue without a name", {_spec("runPolicy"): {"queueName": ""}},
            "spec.runPolicy.queueName", "at least 1 character", shows="''"),
    BadSpec("a word for suspend", {_spec("runPolicy"): {"suspend": "yes"}},
            "spec.runPolicy.suspend", "valid boolean", shows="'yes'"),
)  # fmt: skip
"""Every mistake is refused; none is refused for another reason."""
