"""Compares our CRDs and their policy in the cluster with this operator's. `main.py` calls it once, at the start.

With an older CRD, the API server rejects fields that this operator writes; with a newer one, it stores fields that this
operator does not know. The CRD is read from the published OpenAPI document, which needs no permission. Without the
policy, the API server stores invalid specs and edits of fixed fields. The operator only logs the differences, because
it has no permission to write CRD or policy.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.policy import POLICY_NAME, admission_policy
from ppojob_api.v1alpha1.schema import custom_resource_definitions
from ppojob_operator.api_server import ApiError, ApiServer

logger = logging.getLogger(__name__)

_PATH = f"/openapi/v3/apis/{constants.GROUP}/{constants.VERSION}"
_POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
_BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
_MAX_NAMED = 5


async def log_differences(api: ApiServer, version: str) -> None:
    """Log how CRD and policy in the cluster differ from this operator's; log no difference if they cannot be read."""
    await _log_crd(api, version)
    await _log_policy(api, version)


async def _log_crd(api: ApiServer, version: str) -> None:
    try:
        answer = await api.call("GET", _PATH)
    except ApiError as error:
        logger.info("the PPOJob CRD could not be compared with this operator's: %s", error)
        return
    if answer.status != 200:
        # The watches report a missing CRD.
        return
    for crd in custom_resource_definitions():
        _log_differences(crd, answer.body, version)


def _log_differences(crd: Mapping[str, Any], published: Any, version: str) -> None:
    """Log how a CRD in the cluster differs from this operator's."""
    name, kind = crd["metadata"]["name"], crd["spec"]["names"]["kind"]
    found = _published(published, kind)
    if found is None and kind == constants.KIND:
        # The watches report it.
        return
    [own] = crd["spec"]["versions"]
    ours, theirs = set(_paths(own["schema"]["openAPIV3Schema"])), set(_paths(found or {}))
    if lacking := sorted(ours - theirs):
        logger.error(
            "the %s CRD in the cluster is older than this operator (%s): it lacks %s, and %s with these fields can be "
            "written: apply crds/%s.yaml of this version, or let the chart do it (crds.install)",
            kind,
            version,
            _named(lacking),
            "no status" if kind == constants.KIND else "no template",
            name,
        )
    if unknown := sorted(theirs - ours):
        logger.warning(
            "the %s CRD in the cluster is newer than this operator (%s): it has %s; jobs with these fields in "
            "their spec are not reconciled until the operator is upgraded",
            kind,
            version,
            _named(unknown),
        )


async def _log_policy(api: ApiServer, version: str) -> None:
    try:
        policy, binding = [await api.call("GET", f"{path}/{POLICY_NAME}") for path in (_POLICIES, _BINDINGS)]
    except ApiError as error:
        logger.info("the ValidatingAdmissionPolicy of PPOJob could not be compared with this operator's: %s", error)
        return
    remedy = "apply crds/ppojobs-policy.yaml of this version, or let the chart do it (crds.install)"
    if 404 in (policy.status, binding.status):
        what = "ValidatingAdmissionPolicy" if policy.status == 404 else "ValidatingAdmissionPolicyBinding"
        logger.error(
            "the cluster has no %s %s: the API server stores invalid specs, which the operator rejects later, and "
            "edits of fields that are fixed once a job is accepted: %s",
            what,
            POLICY_NAME,
            remedy,
        )
    elif policy.status == 200 and not _has_our_rules(policy.body):
        logger.warning(
            "the ValidatingAdmissionPolicy %s in the cluster has other rules than this operator (%s): %s",
            POLICY_NAME,
            version,
            remedy,
        )


def _has_our_rules(body: Any) -> bool:
    [ours, _] = admission_policy()
    theirs = body.get("spec", {}) if isinstance(body, Mapping) else {}
    return all(theirs.get(part) == ours["spec"][part] for part in ("matchConditions", "variables", "validations"))


def _published(body: Any, kind: str) -> Mapping[str, Any] | None:
    """Return the schema of a kind in an OpenAPI document."""
    schemas = body.get("components", {}).get("schemas", {}) if isinstance(body, Mapping) else {}
    ours = {"group": constants.GROUP, "version": constants.VERSION, "kind": kind}
    return next((each for each in schemas.values() if ours in each.get("x-kubernetes-group-version-kind", ())), None)


def _paths(schema: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield the path of each field of spec and status."""
    for name, inner in schema.get("properties", {}).items():
        if at or name in ("spec", "status"):
            path = f"{at}.{name}" if at else name
            yield path
            yield from _paths(inner, path)
            yield from _paths(inner.get("items", {}), f"{path}[]")


def _named(paths: list[str]) -> str:
    """Return the first paths, without those below another path in the list."""
    tops = [path for path in paths if not any(path.startswith((f"{top}.", f"{top}[]")) for top in paths)]
    return ", ".join(tops[:_MAX_NAMED]) + (f" and {len(tops) - _MAX_NAMED} more" if len(tops) > _MAX_NAMED else "")
