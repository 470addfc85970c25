"""From a checked spec to job.json: every default that depends on another field is filled in.

The operator writes job.json into the job's ConfigMap, `ppojob run` hands it over in memory; the trainer reads
nothing else, so it needs no rule of the spec.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import PurePosixPath

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.pools import Placement, Pool, Role
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.sources import Source
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import DEFAULT_STALENESS, Overlap, ResumePolicy, ScheduleMode, ScheduleSpec
from ppojob_api.v1alpha1.versions import unsupported_pair

_OF_THE_OPERATOR = ("runPolicy", "serviceAccountName", "templateRef")
_OF_THE_OPERATOR_IN_POOLS = ("resourceClaims",)
_GPU_RESOURCE = {Device.CUDA: "nvidia.com/gpu", Device.CPU: ""}
ONLY_BETWEEN_POOLS = frozenset({Overlap.NEXT_GENERATION, Overlap.STREAMING})
"""Overlaps that Auto leaves out in a single pool: it computes one phase at a time, and streaming slows generation down.

With a slow reward function, streaming gains more than it costs; the trainer's recommendation says so."""


_UNKNOWN = "extra_forbidden"
"""Pydantic's type of error for a field that the model does not have."""


class OtherVersionError(ValueError):
    """job.json was written by an operator of another version, and this version cannot do what it says."""


class Reporting(ApiModel):
    """Where and how the trainer reports its progress."""

    url: str
    """HTTPS address of the status endpoint, path included."""
    token_path: str = f"{constants.TOKEN_MOUNT_PATH}/{constants.TOKEN_FILE}"
    """File with the service-account token; read again for each report, because the kubelet renews it."""
    ca_path: str = f"{constants.CONFIG_MOUNT_PATH}/{constants.CA_FILE}"
    """File with the certificate authority of the endpoint."""
    interval_seconds: int = Field(default=10, ge=1)
    """Longest time between two reports, unless a reply asks for a longer one."""


class JobFile(ApiModel):
    """job.json: everything that the trainer reads."""

    namespace: str
    """Namespace of the PPOJob."""
    name: str
    """Name of the PPOJob."""
    uid: str
    """UID of the PPOJob; the folder in the storage belongs to it."""
    generation: int = 1
    """Generation of the spec."""
    root: str
    """The job's folder: logs, metrics, checkpoints, exported model."""
    spec: PPOJobSpec
    """The resolved spec, with folders of the storage in place of addresses."""
    sources: list[Source] = Field(default_factory=list)
    """What is fetched into these folders before the trainer starts."""
    adopted_uid: str | None = None
    """UID of an earlier run whose checkpoints this one may adopt; "unknown": they name no run. Absent: of none."""
    reporting: Reporting | None = None
    """Where progress is reported. Absent: nowhere (`ppojob run`)."""
    version: str | None = None
    """Version of the operator that wrote it."""

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints are: a folder, or an address in a bucket."""
        path = self.spec.checkpoint.path
        if path is None:
            return f"{self.root}/checkpoints"
        return f"{path}/{_own_folder(self.uid)}" if self._has_own_folder else path

    @property
    def resume(self) -> ResumePolicy:
        """Whether an attempt resumes from what is in the run's folder. With its own folder, a job always does."""
        return ResumePolicy.AUTO if self._has_own_folder else self.spec.checkpoint.resume

    @property
    def _has_own_folder(self) -> bool:
        # `ppojob run` reports nowhere, and its folder is the one that it was given.
        return self.reporting is not None and self.spec.checkpoint.resume is ResumePolicy.NEVER

    def encode(self) -> str:
        """Return the text of job.json; equal jobs give equal texts.

        Defaults and what only the operator reads are left out: a trainer of an earlier version refuses fields that it
        does not know, and so it meets only those that somebody set.
        """
        wire = self.to_wire()
        if not self.sources:
            del wire["sources"]
        wire["spec"] = self.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        for name in _OF_THE_OPERATOR:
            wire["spec"].pop(name, None)
        for pool in wire["spec"]["pools"]:
            for name in _OF_THE_OPERATOR_IN_POOLS:
                pool.pop(name, None)
        return json.dumps(wire, indent=1, sort_keys=True)

    @classmethod
    def decode(cls, text: str, *, reader: str) -> "JobFile":
        """Return the job of job.json. Fields outside the spec that this version does not know are ignored.

        Args:
            text: of the file.
            reader: version of the program that reads it, for the error.

        Raises:
            OtherVersionError: operator and reader are too far apart, or the spec has fields or values that this
                version does not know: fields would have no effect.
            ValidationError: it is not a job.
        """
        raw = json.loads(text)
        writer = raw.get("version") or "unknown"
        if problem := unsupported_pair(operator=writer, trainer=reader):
            raise OtherVersionError(problem)
        try:
            PPOJobSpec.model_validate(raw["spec"])
        except ValidationError as error:
            details = error.errors(include_url=False)
            unknown = [_place(detail) for detail in details if detail["type"] == _UNKNOWN]
            values = [f"{_place(detail)}: {detail['input']!r}" for detail in details if detail["type"] != _UNKNOWN]
            remedy = "use a trainer image of the operator's version" + (", or remove the fields" if unknown else "")
            raise OtherVersionError(
                f"this trainer has version {reader} and does not know {', '.join([*unknown, *values])}, which the "
                f"operator (version {writer}) sent: {remedy}"
            ) from error
        return cls.model_validate(raw, extra="ignore")

    @staticmethod
    def digest(text: str) -> str:
        """Return the hash by which the submission and the trainer mean the same file."""
        return hashlib.sha256(text.encode()).hexdigest()


def _place(detail: ErrorDetails) -> str:
    return "spec." + ".".join(map(str, detail["loc"]))


def job_root(mount_path: str, namespace: str, name: str, uid: str, resume: ResumePolicy) -> str:
    """Return the job's folder in the storage: the folder of its name; with resume Never, a folder of its UID in it."""
    root = PurePosixPath(mount_path) / constants.JOBS_FOLDER / namespace / name
    return str(root / _own_folder(uid) if resume is ResumePolicy.NEVER else root)


def _own_folder(uid: str) -> str:
    return f"runs/{uid}"


def driver_log(root: str, attempt: int) -> str:
    """Return where an attempt of the trainer writes the log of its driver, below the job's own folder."""
    return str(PurePosixPath(root) / "logs" / f"attempt-{attempt}" / "driver.log")


def resolve(spec: PPOJobSpec) -> PPOJobSpec:
    """Fill in what depends on other fields: the pool of every role in use, the schedule, the GPU resource, the length.

    After it, `placement` names a pool exactly for the roles that the job has, `schedule.mode` is never Auto, mode
    OneStepOff has its `maxStaleness`, `trainer` has either totalSteps or totalEpochs, `gpuResourceName` is the
    resource to ask for, or empty for none, and `nodes` of an elastic pool is its largest number of pods.
    """
    return spec.model_copy(
        update={
            "placement": (placed := _placement(spec)),
            "schedule": _schedule(spec, placed),
            "trainer": spec.trainer.with_length(),
            "pools": [_with_nodes(_with_gpu_resource(pool, spec.device)) for pool in spec.pools],
        }
    )


def roles(spec: PPOJobSpec) -> Iterator[tuple[Role, Pool]]:
    """Yield the roles of a resolved spec, each with its pools."""
    for role in Role:
        for name in spec.placement.pools_of(role):
            yield role, spec.pool(name)


def reward_workers(spec: PPOJobSpec) -> dict[str, int]:
    """Return the number of workers of the reward function in each pool of a resolved spec that has any.

    Pods have their CPU cores per GPU, so each worker goes to the pool with the fewest workers per GPU.
    """
    found = dict.fromkeys(spec.placement.reward_pools, 0)
    for _ in range(spec.reward.function.num_workers if spec.reward.function is not None else 0):
        found[min(found, key=lambda name: found[name] / spec.pool(name).gpus)] += 1
    return {name: number for name, number in found.items() if number}


def _placement(spec: PPOJobSpec) -> Placement:
    given = spec.placement
    critic = (given.critic or given.actor) if spec.algorithm.needs_critic else None
    second = critic or given.actor
    reference = given.actor if spec.model.reference_is_actor else second
    return given.model_copy(
        update={
            # The order of the shared pools makes no difference: in another order, they are no other layout.
            "rollout": [given.rollout_pools[0], *sorted(given.shared_pools)],
            "critic": critic,
            "ref": sorted(given.ref or [reference]) if spec.algorithm.needs_reference else None,
            "reward": sorted(given.reward or [second]),
        }
    )


def _schedule(spec: PPOJobSpec, placed: Placement) -> ScheduleSpec:
    if spec.schedule.mode is ScheduleMode.ONE_STEP_OFF:
        staleness = spec.schedule.max_staleness or DEFAULT_STALENESS
        return spec.schedule.model_copy(update={"max_staleness": staleness})
    if spec.schedule.mode is not ScheduleMode.AUTO:
        return spec.schedule
    disabled = set(spec.schedule.disabled_overlaps)
    if len(_computing_pools(spec, placed)) == 1:
        disabled |= ONLY_BETWEEN_POOLS
        if spec.algorithm.dynamic_sampling is not None:
            # It streams to the reward alone, and the engines need not wait for the scores.
            disabled -= {Overlap.STREAMING} - set(spec.schedule.disabled_overlaps)
    return ScheduleSpec(mode=ScheduleMode.OVERLAPPED, disabled_overlaps=sorted(disabled))


def _computing_pools(spec: PPOJobSpec, placed: Placement) -> set[str | None]:
    """Return the pools whose devices compute in a step; a reward function uses none."""
    judges = placed.reward_pools if spec.reward.uses_model else ()
    workers = (worker.pool for worker in spec.workers if worker.uses_gpu)
    return {placed.actor, *placed.rollout_pools, placed.critic, *placed.ref_pools, *judges, *workers} - {None}


def _with_gpu_resource(pool: Pool, device: Device) -> Pool:
    name = _GPU_RESOURCE[device] if pool.gpu_resource_name is None else pool.gpu_resource_name
    return pool.model_copy(update={"gpu_resource_name": name})


def _with_nodes(pool: Pool) -> Pool:
    return pool if pool.elastic is None else pool.model_copy(update={"nodes": pool.elastic.max_nodes})
