"""Policy: do the objects that a spec names exist, and can the job use them?

`acceptance` checks the claim, for which a job waits, and `admission` checks all. A missing object is a warning, because
`kubectl apply` of a folder may create it a moment later. An object that can never work is an error.

Secrets are not checked, because the operator may not read users' Secrets. The kubelet checks the image.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ppojob_api.v1alpha1.pools import Spread
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import FieldError
from ppojob_operator.plan import Claim, Manifest
from ppojob_operator.reconcile.reading import read_claim


class Kind(StrEnum):
    """Kinds of objects that a spec names. A new kind also needs an entry in `named` and in `cluster_admission`."""

    CLAIM = "PersistentVolumeClaim"
    CONFIG_MAP = "ConfigMap"
    PRIORITY_CLASS = "PriorityClass"
    RUNTIME_CLASS = "RuntimeClass"
    SERVICE_ACCOUNT = "ServiceAccount"
    LOCAL_QUEUE = "LocalQueue"
    WORKLOAD_PRIORITY_CLASS = "WorkloadPriorityClass"


_CLAIM_PATH = "spec.storage.claimName"
_IN_NAMESPACE = {Kind.CLAIM, Kind.CONFIG_MAP, Kind.SERVICE_ACCOUNT, Kind.LOCAL_QUEUE}
_CLASSES = {"priorityClassName": Kind.PRIORITY_CLASS, "runtimeClassName": Kind.RUNTIME_CLASS}
_ONE_POD = "ReadWriteOncePod"


@dataclass(frozen=True)
class Reference:
    """An object that a spec names."""

    kind: Kind
    name: str
    path: str = field(compare=False)
    """The first field that names it."""


@dataclass(frozen=True)
class Verdict:
    """Problems of a job: errors, and warnings with which it can be run."""

    refusals: tuple[FieldError, ...] = ()
    warnings: tuple[FieldError, ...] = ()


def named(spec: PPOJobSpec) -> list[Reference]:
    """Return the objects that a spec names, each once."""
    classes = _classes(spec.head.pod_template, "spec.head")
    pools = [each for i, pool in enumerate(spec.pools) for each in _classes(pool.pod_template, f"spec.pools[{i}]")]
    return list(dict.fromkeys([claim_of(spec), *_of_the_job(spec), *_config_maps(spec), *classes, *pools]))


def claim_of(spec: PPOJobSpec) -> Reference:
    """Return the claim of a spec."""
    return Reference(Kind.CLAIM, spec.storage.claim_name, _CLAIM_PATH)


def judge(spec: PPOJobSpec, namespace: str, found: Mapping[Reference, Manifest | None]) -> Verdict:
    """Return the problems of the objects in `found`, where None means that an object does not exist."""
    missing = tuple(absence(reference, namespace) for reference, raw in found.items() if raw is None)
    claims = [read_claim(raw) for reference, raw in found.items() if raw is not None and reference.kind is Kind.CLAIM]
    verdicts = [judge_claim(spec, claim) for claim in claims]
    refusals = tuple(refusal for verdict in verdicts for refusal in verdict.refusals)
    return Verdict(refusals, (*missing, *(warning for verdict in verdicts for warning in verdict.warnings)))


def absence(reference: Reference, namespace: str) -> FieldError:
    """Return the error for an object that does not exist."""
    noun = "claim" if reference.kind is Kind.CLAIM else reference.kind.value
    where = f" in namespace {namespace}" if reference.kind in _IN_NAMESPACE else ""
    return FieldError(reference.path, reference.name, f"there is no such {noun}{where}: create it, or name another")


def judge_claim(spec: PPOJobSpec, claim: Claim) -> Verdict:
    """Return whether all pods of a job, at least two, can write to a claim."""
    if claim.phase == "Lost":
        return Verdict((_about(claim, "the claim has lost its volume: name another"),))
    modes = claim.access_modes
    if not modes or "ReadWriteMany" in modes:
        return Verdict()
    shown = ", ".join(modes)
    if set(modes) == {_ONE_POD}:
        # The scheduler enforces this mode. The others apply only when a volume is attached to a node.
        words = f"the claim is {shown}, and all pods write to it: use one that is ReadWriteMany"
        return Verdict((_about(claim, words),))
    return Verdict(warnings=(_about(claim, _access_mode_warning(spec, shown)),))


def _access_mode_warning(spec: PPOJobSpec, shown: str) -> str:
    apart = [pool.name for pool in spec.pools if pool.nodes > 1 and pool.spread is Spread.REQUIRED]
    if "ReadWrite" not in shown:
        return f"the claim is {shown}, and all pods write to it: use one that is ReadWriteMany"
    if apart:
        words = f"the claim is {shown}, and spread: Required puts the pods of pool {apart[0]} on many hosts"
        return f"{words}: use one that is ReadWriteMany"
    # Works if one node is large enough, or if the volume's node affinity keeps the pods together.
    num_pods = 1 + sum(pool.nodes for pool in spec.pools)
    return f"the claim is {shown}: unless all {num_pods} pods are on one host, some wait forever; use ReadWriteMany"


def _about(claim: Claim, words: str) -> FieldError:
    return FieldError(_CLAIM_PATH, claim.name, words)


def _of_the_job(spec: PPOJobSpec) -> Iterator[Reference]:
    policy = spec.run_policy
    for kind, name, path in (
        (Kind.SERVICE_ACCOUNT, spec.service_account_name, "spec.serviceAccountName"),
        (Kind.LOCAL_QUEUE, policy.queue_name, "spec.runPolicy.queueName"),
        (Kind.WORKLOAD_PRIORITY_CLASS, policy.queue_priority_class, "spec.runPolicy.queuePriorityClass"),
    ):
        if name is not None:
            yield Reference(kind, name, path)


def _classes(template: Mapping[str, Any], path: str) -> Iterator[Reference]:
    pod = template.get("spec")
    for name, kind in _CLASSES.items():
        value = pod.get(name) if isinstance(pod, Mapping) else None
        if value and isinstance(value, str):
            yield Reference(kind, value, f"{path}.podTemplate.spec.{name}")


def _config_maps(spec: PPOJobSpec) -> Iterator[Reference]:
    for index, variable in enumerate(spec.env):
        source = variable.value_from or {}
        yield from _required(source, "configMapKeyRef", f"spec.env[{index}].valueFrom")
    yield from _all_required(spec.env_from)


def _all_required(sources: Sequence[Mapping[str, Any]]) -> Iterator[Reference]:
    for index, source in enumerate(sources):
        yield from _required(source, "configMapRef", f"spec.envFrom[{index}]")


def _required(source: Mapping[str, Any], key: str, path: str) -> Iterator[Reference]:
    """Yield the ConfigMap of a source, unless it is optional."""
    reference = source.get(key)
    if isinstance(reference, Mapping) and not reference.get("optional") and isinstance(reference.get("name"), str):
        yield Reference(Kind.CONFIG_MAP, reference["name"], f"{path}.{key}.name")
