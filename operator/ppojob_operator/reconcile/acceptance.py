"""Policy: can the operator run this job, and do the objects that its spec names exist? Condition Accepted.

Until a job is accepted, nothing is created for it and no deadline runs. Each reconcile calls `accepted`; the admission
webhook calls `spec_problem` and `judge_references` before the job is stored. A job waits for its claim. Any
other missing object is a warning, because `kubectl apply` of a folder may create it a moment later. An object that can
never work is an error.

Secrets are not checked, because the operator may not read users' Secrets. The kubelet checks the image.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.pools import Spread
from ppojob_api.v1alpha1.sources import has_addresses
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.spec_warnings import spec_warnings
from ppojob_api.v1alpha1.template_reference import TemplateKind
from ppojob_api.v1alpha1.validation import UNKNOWN_FIELD, FieldError, SpecError
from ppojob_operator.manifests.ray_cluster import template_problems
from ppojob_operator.plan import Claim, Job, Manifest, Observed
from ppojob_operator.reading import is_accepted, read_claim
from ppojob_operator.reconcile.situation import Finding
from ppojob_operator.reconcile.states import is_finished

KEEPS_LAYOUT = Finding("True", Reason.VALID, "the job continues; see condition LayoutApplied for the pending layout")
"""An accepted job whose new layout is invalid."""
_CLAIM_PATH = "spec.storage.claimName"
_ONE_POD = "ReadWriteOncePod"


def accepted(job: Job, observed: Observed) -> Finding:
    """Return the condition Accepted."""
    problem = spec_problem(job)
    if is_template_missing(job):
        return Finding("False", Reason.TEMPLATE_MISSING, str(problem))
    if problem is not None:
        return _of_newer_definition(job, problem) or Finding("False", Reason.INVALID_SPEC, str(problem))
    assert isinstance(job.spec, PPOJobSpec)
    if not observed.is_kuberay_served:
        message = (
            "the API server does not serve ray.io/v1 RayCluster: install the KubeRay operator; then this job continues"
        )
        return Finding("Unknown", Reason.KUBERAY_MISSING, message)
    if was_accepted(job):
        return _still_accepted(job) or _accepted(job.spec, spec_warnings(job.spec))
    if job.spec.run_policy.queue_name is not None and observed.workloads is None:
        message = (
            f"spec.runPolicy.queueName: {job.spec.run_policy.queue_name!r}: the API server does not serve "
            "kueue.x-k8s.io Workload: install Kueue, then this job continues, or create it without a queue"
        )
        return Finding("Unknown", Reason.KUEUE_MISSING, message)
    return _storage(job.spec, job, observed)


def was_accepted(job: Job) -> bool:
    """Return whether the job was accepted before: it has started, its RayCluster is in a queue, or it has ended."""
    has_started = job.status.start_time is not None or job.status.ray_cluster is not None
    return has_started or (is_finished(job.status) and is_accepted(job.status))


def spec_problem(job: Job) -> SpecError | None:
    """Return why the spec is invalid, independent of the cluster; None if it is valid."""
    if is_template_missing(job):
        return SpecError([absence(template_of(job), job.key.namespace)])
    if isinstance(job.spec, SpecError):
        return job.spec
    problems = tuple(template_problems(job.spec, job.key, job.uid))
    return SpecError(problems) if problems else None


def _of_newer_definition(job: Job, problem: SpecError) -> Finding | None:
    """Return the finding for a job of a newer operator whose spec has fields that this one does not know.

    Only a newer CRD lets the API server store them, perhaps as defaults, so the job itself is not at fault.
    """
    unknown = [error.path for error in problem.errors if error.message.startswith(UNKNOWN_FIELD)]
    if not unknown or not was_accepted(job):
        return None
    message = (
        f"this operator is older than the PPOJob CRD in the cluster and does not know {', '.join(unknown)}: "
        "upgrade the operator; until then it does not change the job, and a running trainer continues"
    )
    return Finding("Unknown", Reason.OPERATOR_TOO_OLD, message)


def _accepted(spec: PPOJobSpec, warnings: Iterable[FieldError]) -> Finding:
    words = "; ".join(map(str, warnings))
    fetched = "models and data named by address are fetched next, and " if has_addresses(spec) else ""
    message = f"the spec is valid and its claim exists; {fetched}the trainer checks the paths when it starts"
    return Finding("True", Reason.VALID, f"{message}; warnings: {words}" if words else message)


def _still_accepted(job: Job) -> Finding | None:
    """Return the finding of the acceptance of the same spec; the claim is not read again after it."""
    for condition in job.status.conditions:
        is_same = (condition.status, condition.observed_generation) == ("True", job.generation)
        if condition.type == Condition.ACCEPTED and is_same:
            return Finding("True", Reason.VALID, condition.message)
    return None


def _storage(spec: PPOJobSpec, job: Job, observed: Observed) -> Finding:
    if observed.claim is None:
        return Finding("False", Reason.STORAGE_MISSING, str(absence(claim_of(spec), job.key.namespace)))
    verdict = judge_claim(spec, observed.claim)
    if verdict.refusals:
        reason = Reason.STORAGE_MISSING if observed.claim.phase == "Lost" else Reason.STORAGE_UNFIT
        return Finding("False", reason, str(SpecError(verdict.refusals)))
    return _accepted(spec, (*spec_warnings(spec), *verdict.warnings))


class Kind(StrEnum):
    """Kinds of objects that a spec names. A new kind also needs an entry in `named` and in `cluster_admission`."""

    CLAIM = "PersistentVolumeClaim"
    CONFIG_MAP = "ConfigMap"
    PRIORITY_CLASS = "PriorityClass"
    RUNTIME_CLASS = "RuntimeClass"
    SERVICE_ACCOUNT = "ServiceAccount"
    LOCAL_QUEUE = "LocalQueue"
    WORKLOAD_PRIORITY_CLASS = "WorkloadPriorityClass"
    TEMPLATE = "PPOJobTemplate"
    CLUSTER_TEMPLATE = "ClusterPPOJobTemplate"


_IN_NAMESPACE = {Kind.CLAIM, Kind.CONFIG_MAP, Kind.SERVICE_ACCOUNT, Kind.LOCAL_QUEUE, Kind.TEMPLATE}
_TEMPLATES = {TemplateKind.NAMESPACED: Kind.TEMPLATE, TemplateKind.CLUSTER: Kind.CLUSTER_TEMPLATE}
_CLASSES = {"priorityClassName": Kind.PRIORITY_CLASS, "runtimeClassName": Kind.RUNTIME_CLASS}


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


def template_resolved(job: Job) -> Finding | None:
    """Return the condition TemplateResolved. None: the spec names no template."""
    if job.template_ref is None:
        return None
    if job.template is None:
        message = str(absence(template_of(job), job.key.namespace))
        return Finding("False", Reason.TEMPLATE_MISSING, f"{message}; then this job continues")
    pin = job.template
    message = f"{pin.ref.shown}, generation {pin.generation}, completes the spec; later edits of it change nothing here"
    return Finding("True", Reason.TEMPLATE_RESOLVED, message)


def is_template_missing(job: Job) -> bool:
    """Return whether the template that completes the spec was not found."""
    return job.template_ref is not None and job.template is None


def template_of(job: Job) -> Reference:
    """Return the template of a job that names one."""
    assert job.template_ref is not None
    return Reference(_TEMPLATES[job.template_ref.kind], job.template_ref.name, "spec.templateRef.name")


def judge_references(spec: PPOJobSpec, namespace: str, found: Mapping[Reference, Manifest | None]) -> Verdict:
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
