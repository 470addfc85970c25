"""A job that failed by a rule runs again by an annotation, on other nodes than the lost one.

The pods are on nodes that exist only in the API server, and the bench's server replaces Ray's dashboard.
"""

import json
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import ANNOTATION_RETRY, Condition, Reason
from tests.integration.operator.test_placement import fake_head, fake_pool

pytestmark = [pytest.mark.usefixtures("volumes", "claim", "dashboards"), pytest.mark.timeout(2400)]

RULES = [{"reasons": ["ClusterDeleted"], "action": "Fail"}]


def critic_of(kubectl: Any, name: str, cluster: str) -> dict[str, Any]:
    """Return the pod of the critic's pool."""
    selector = f"ppojob.dev/job={name},ppojob.dev/pool=critic,ray.io/cluster={cluster}"
    [pod] = kubectl.json("get", "pods", "--selector", selector)["items"]
    found: dict[str, Any] = pod
    return found


def lose_node_of(kubectl: Any, pod: dict[str, Any]) -> None:
    """Let the pod say what the node controller writes if its node is lost."""
    known = {each["type"]: each for each in pod["status"]["conditions"]}
    known["Ready"] = {**known["Ready"], "status": "False"}
    target = {"reason": "DeletionByTaintManager", "message": "deleting due to NoExecute taint"}
    known["DisruptionTarget"] = {"type": "DisruptionTarget", "status": "True", **target}
    patch = json.dumps({"status": {"conditions": [*known.values()]}})
    kubectl("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--type=merge", f"--patch={patch}")


def test_a_job_that_a_rule_has_failed_runs_again_on_other_nodes(kubectl: Any, jobs: Any, fake_nodes: Any) -> None:
    pools = [
        fake_pool(fake_nodes, "actor", "h200", gpusPerNode=1),
        fake_pool(fake_nodes, "critic", "a100", gpusPerNode=1),
    ]
    policy = {"failurePolicy": {"rules": RULES}}
    name = jobs.create(device="CUDA", pools=pools, head=fake_head(fake_nodes), runPolicy=policy)
    jobs.wait_for(name, Condition.SUBMITTED, "True", Reason.TRAINER_SUBMITTED)
    first = jobs.status(name)["rayCluster"]["name"]
    lost = critic_of(kubectl, name, first)
    lose_node_of(kubectl, lost)
    node = lost["spec"]["nodeName"]
    jobs.wait(name, lambda status: [each["name"] for each in status.get("avoidedNodes", [])] == [node])

    kubectl("delete", "raycluster", first)
    message = jobs.wait_for(name, Condition.FAILED, "True", Reason.FAILURE_POLICY)
    assert "spec.runPolicy.failurePolicy.rules[0] has the action Fail" in message
    kubectl("annotate", "ppojob", name, f"{ANNOTATION_RETRY}=first")

    jobs.wait(name, lambda status: status.get("retry", {}).get("request") == "first")
    jobs.wait_for(name, Condition.FAILED, "False", Reason.RETRIED)
    status = jobs.wait(name, lambda status: status["attempt"] == 1 and "submissionId" in status)
    assert status["rayCluster"]["avoidedNodes"] == [node]
    pod = critic_of(kubectl, name, status["rayCluster"]["name"])
    assert node in json.dumps(pod["spec"]["affinity"]["nodeAffinity"])
    assert pod["spec"]["nodeName"] != node
    assert jobs.event(name, Reason.RETRIED)["type"] == "Normal"
