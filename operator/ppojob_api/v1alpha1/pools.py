"""`spec.pools`, `spec.placement`, `spec.head`: which GPUs each role gets, and on which nodes."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.network import PoolNetwork
from ppojob_api.v1alpha1.quantities import (
    DNSLabel,
    NodeLabel,
    ObjectName,
    Quantity,
    RawObject,
    RawObjects,
    ShortText,
    StringMap,
)


class Role(StrEnum):
    """What a worker group does."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"


IN_SEVERAL_POOLS = (Role.ROLLOUT, Role.REF, Role.REWARD)
"""The roles that may be placed in several pools."""

REWARD_MODEL = "reward_model"
"""Name of the processes of a reward model; those of a reward function are called reward."""

_WITH_COPIES = (Role.ROLLOUT.value, Role.REF.value, REWARD_MODEL)


def base_role(name: str) -> str:
    """Return the role of a name of processes: in a further pool of a model, they are called <role>_<pool>."""
    return next((role for role in _WITH_COPIES if name.startswith(f"{role}_")), name)


class Spread(StrEnum):
    """Whether a pool's pods must be on distinct hosts."""

    PREFERRED = "Preferred"
    REQUIRED = "Required"


class ResourcesPerGPU(ApiModel):
    """What a Ray worker pod gets for each of its GPUs."""

    cpu: Quantity = "8"
    """CPU cores per GPU."""
    memory: Quantity = "64Gi"
    """Memory per GPU, including the shared memory."""
    shm: Quantity = "16Gi"
    """Shared memory (/dev/shm) per GPU, for Ray's object store and NCCL."""


class Scheduling(ApiModel):
    """Where pods may go, and what else is in them."""

    node_selector: StringMap = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: RawObjects = Field(default_factory=list)
    """Tolerations of the pods (core/v1 Toleration)."""
    pod_template: RawObject = Field(default_factory=dict)
    """core/v1 PodTemplateSpec that is merged into the pods, lists by name. Settings that would break Ray are
    rejected."""


class ResourceClaim(ApiModel):
    """Devices by dynamic resource allocation (resource.k8s.io): each pod of the pool gets a claim of its own."""

    name: DNSLabel
    """Name of the claim in the pod."""
    resource_claim_template_name: ObjectName
    """ResourceClaimTemplate in the job's namespace."""


class Topology(ApiModel):
    """Nodes that are near each other, for Kueue's topology-aware scheduling: those with the same value of a label."""

    required: NodeLabel | None = None
    """Label of the nodes, a level of the queue's Topology. Kueue admits the job when all pods of the pool fit on nodes
    with the same value, such as one rack."""
    preferred: NodeLabel | None = None
    """The same if possible. Else the pods run on nodes with the same value of a higher level, or on as few as
    possible."""


class ElasticNodes(ApiModel):
    """How many pods a pool has whose pods may come and go while the job runs."""

    min_nodes: int = Field(ge=0, le=4096)
    """Pods that must be ready before the trainer starts. Later it continues with fewer, as long as any engine of the
    job is left or comes back."""
    max_nodes: int = Field(ge=1, le=4096)
    """Pods that are requested."""


class Pool(Scheduling):
    """GPUs of one kind: nodes x gpusPerNode."""

    name: DNSLabel
    """Name of the pool; placement refers to it."""
    nodes: int = Field(default=1, ge=1, le=4096)
    """Number of Ray worker pods. Leave it out with elastic."""
    elastic: ElasticNodes | None = None
    """The pool only generates, and its pods may be lost, pre-empted or added at any time without ending the attempt.
    Absent: the pods are fixed while an attempt runs."""
    min_nodes: int | None = Field(default=None, ge=1, le=4096)
    """Smallest number of pods for autoBalance. Absent: nodes."""
    max_nodes: int | None = Field(default=None, ge=1, le=4096)
    """Largest number of pods for autoBalance. Absent: nodes."""
    gpus_per_node: int = Field(ge=1, le=64)
    """GPUs per pod; with device CPU, worker processes per pod."""
    gpu_resource_name: ShortText | None = None
    """Resource that the pods request, once per GPU; `nvidia.com/mig-3g.71gb` is a slice of a GPU. Empty: none, for
    example if resourceClaims have the GPUs. Absent: nvidia.com/gpu with device CUDA, none with device CPU."""
    resource_claims: Annotated[
        list[ResourceClaim],
        Field(
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(default_factory=list)
    """Devices of each pod by dynamic resource allocation. A claim for GPUs must have gpusPerNode of them."""
    resources_per_gpu: ResourcesPerGPU = Field(default=ResourcesPerGPU(), alias="resourcesPerGPU")
    """CPU and memory per GPU."""
    spread: Spread = Spread.PREFERRED
    """Required: each pod runs on its own host. Preferred: if possible."""
    topology: Topology | None = None
    """Where Kueue places the pool's pods. It has an effect only in a queue with a Topology. Absent: anywhere."""
    network: PoolNetwork = PoolNetwork()
    """Network to other hosts."""

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool; of an elastic pool in a resolved spec, the most."""
        return self.nodes * self.gpus_per_node

    @property
    def needed_nodes(self) -> int:
        """Pods without which the trainer is not started."""
        return self.nodes if self.elastic is None else self.elastic.min_nodes


class HeadResources(ApiModel):
    """What the head pod gets."""

    cpu: Quantity = "2"
    """CPU cores."""
    memory: Quantity = "8Gi"
    """Memory."""


class Head(Scheduling):
    """The Ray head pod: the controller runs there; it has no GPU."""

    resources: HeadResources = HeadResources()
    """CPU and memory of the head pod."""


Pools = Annotated[
    list[Pool],
    Field(
        min_length=1,
        max_length=7,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]


class Placement(ApiModel):
    """The pool of each role."""

    actor: DNSLabel
    """Pool of the actor."""
    rollout: Annotated[list[DNSLabel], Field(min_length=1, max_length=7)] | None = None
    """Pools that generate. The first one is the rollout's own. Further ones, such as the critic's, which is idle during
    generation, are shared with the rollout: each gets its own engines, which sleep outside generation if the pool
    trains. Absent: the actor's pool."""
    critic: DNSLabel | None = None
    """Pool of the critic, with an estimator that needs one. Absent: the actor's."""
    ref: Annotated[list[DNSLabel], Field(min_length=1, max_length=7)] | None = None
    """Pools of the reference policy. Each of several pools loads a copy, and a pool that is free earlier computes more
    of the batch. Absent: the critic's, else the actor's. If model.actor.lora makes the actor its own reference: the
    actor's."""
    reward: Annotated[list[DNSLabel], Field(min_length=1, max_length=7)] | None = None
    """Pools of the reward. Each of several pools loads a copy of the reward model, and a pool that is free earlier
    scores more of the batch; the workers of the reward function are divided over the pools in proportion to their GPUs.
    Absent: the critic's, else the actor's."""

    @property
    def rollout_pools(self) -> tuple[str, ...]:
        """Every pool with rollout engines, the rollout's own first."""
        return tuple(self.rollout or [self.actor])

    @property
    def shared_pools(self) -> tuple[str, ...]:
        """The pools that are shared with the rollout: all that generate, without the rollout's own."""
        return self.rollout_pools[1:]

    @property
    def ref_pools(self) -> tuple[str, ...]:
        """The pools that are given for the reference."""
        return tuple(self.ref or ())

    @property
    def reward_pools(self) -> tuple[str, ...]:
        """The pools that are given for the reward."""
        return tuple(self.reward or ())

    def pools_of(self, role: Role) -> tuple[str, ...]:
        """Return the pools that are given for a role; none if its field is absent."""
        given: str | list[str] | None = getattr(self, role.value)
        return (given,) if isinstance(given, str) else tuple(given or ())
