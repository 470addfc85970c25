"""The NetworkPolicy of a job: its pods reach each other, and the operator reaches Ray's dashboard.

Anybody who reaches Ray's ports can run code, because its token protects the dashboard only. Egress is not limited,
because models and data may come from anywhere. The cluster's network must enforce policies.
"""

from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests import naming
from ppojob_operator.plan import JobKey, JobNetwork


def network_policy(spec: PPOJobSpec, key: JobKey, uid: str, network: JobNetwork) -> dict[str, Any] | None:
    """Return the NetworkPolicy, or None if a pool uses the host's network. `spec` is resolved.

    Such pods have the node's address, so the policy would block the job's own traffic.
    """
    if any(pool.network.host_network for pool in spec.pools):
        return None
    own = {"matchLabels": {constants.LABEL_JOB: key.name}}
    operator = {**_in_namespace(network.namespace), "podSelector": {"matchLabels": dict(network.operator_labels)}}
    ingress: list[dict[str, Any]] = [
        {"from": [{"podSelector": own}]},
        {"from": [operator], "ports": [_port(constants.RAY_HEAD_PORTS["dashboard"])]},
    ]
    if network.metrics_namespace:
        ports = [constants.RAY_HEAD_PORTS["metrics"], spec.telemetry.prometheus_port]
        scraper = _in_namespace(network.metrics_namespace)
        ingress.append({"from": [scraper], "ports": [_port(port) for port in ports if port]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": naming.metadata(naming.network_policy_name(key.name), key, uid),
        "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _in_namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _port(number: int) -> dict[str, Any]:
    return {"port": number, "protocol": "TCP"}
