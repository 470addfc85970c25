"""The webhook's view of the API server: the objects that a spec names, and one ValidatingWebhookConfiguration.

It implements `admission.ports` with `api_server`; `main.py` connects them. It has no policy and no log.
"""

import base64
import re

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.template_reference import TemplateKind
from ppojob_operator.api_server import TEMPLATES, ApiServer, RawObject
from ppojob_operator.reconcile.acceptance import Kind, Reference

_COLLECTIONS = {
    Kind.CLAIM: "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    Kind.CONFIG_MAP: "/api/v1/namespaces/{namespace}/configmaps",
    Kind.PRIORITY_CLASS: "/apis/scheduling.k8s.io/v1/priorityclasses",
    Kind.RUNTIME_CLASS: "/apis/node.k8s.io/v1/runtimeclasses",
    Kind.SERVICE_ACCOUNT: "/api/v1/namespaces/{namespace}/serviceaccounts",
    Kind.TEMPLATE: TEMPLATES[TemplateKind.NAMESPACED],
    Kind.CLUSTER_TEMPLATE: TEMPLATES[TemplateKind.CLUSTER],
}
_KUEUES_COLLECTIONS = {
    Kind.LOCAL_QUEUE: "namespaces/{namespace}/localqueues",
    Kind.WORKLOAD_PRIORITY_CLASS: "workloadpriorityclasses",
}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_API_VERSION = "admissionregistration.k8s.io/v1"
_CONFIGURATIONS = f"/apis/{_API_VERSION}/validatingwebhookconfigurations"


class AdmissionCluster:
    """ReferencePort and TrustPort on a real API server."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    async def read_reference(self, reference: Reference, namespace: str) -> RawObject | None:
        """Return the object that a spec names, or None if there is none."""
        if not all(map(_NAME.fullmatch, (reference.name, namespace))):
            # No object can have such a name, and in a path it might lead elsewhere, like "..".
            return None
        for collection in _collections(reference.kind):
            found = await self._api.read(collection, namespace, reference.name)
            if found is not None:
                return found
        return None

    async def read_webhooks(self, configuration: str) -> dict[str, str] | None:
        """Return the CA bundle of each webhook in a configuration, by name; None if it does not exist."""
        raw = await self._api.read(_CONFIGURATIONS, "", configuration)
        if raw is None:
            return None
        bundles = {webhook["name"]: webhook["clientConfig"].get("caBundle", "") for webhook in raw.get("webhooks", [])}
        return {name: base64.b64decode(bundle).decode(errors="replace") for name, bundle in bundles.items()}

    async def trust(self, configuration: str, webhooks: list[str], ca_bundle: str) -> None:
        """Write the CA bundle of these webhooks. All other fields stay with their field managers."""
        bundle = base64.b64encode(ca_bundle.encode()).decode()
        body = {
            "apiVersion": _API_VERSION,
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": configuration},
            "webhooks": [{"name": name, "clientConfig": {"caBundle": bundle}} for name in webhooks],
        }
        query = {"fieldManager": constants.FIELD_MANAGER_OPERATOR, "force": "true"}
        path = f"{_CONFIGURATIONS}/{{name}}"
        answer = await self._api.call("PATCH", path, name=configuration, body=body, query=query)
        answer.expect(200)


def _collections(kind: Kind) -> list[str]:
    """Return the paths under which objects of a kind may be served."""
    if kind in _KUEUES_COLLECTIONS:
        return [f"/apis/kueue.x-k8s.io/{version}/{_KUEUES_COLLECTIONS[kind]}" for version in constants.KUEUE_VERSIONS]
    return [_COLLECTIONS[kind]]
