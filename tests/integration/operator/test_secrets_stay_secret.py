"""No token and no key is in the log at its most talkative, in Events, in the status, or in any object but a Secret."""

import base64
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import REPORT_PATH, progress_audience
from tests.integration.operator.test_replicas import posted

_SHORTEST = 20

pytestmark = pytest.mark.usefixtures("volumes", "claim")


@pytest.fixture(scope="module")
def operator(rights: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An operator that logs all it can."""
    process = rights.operator(tmp_path_factory.mktemp("operator"))
    process.environment |= {
        "PPOJOB_LOG_LEVEL": "DEBUG",
        "PPOJOB_LOG_FORMAT": "JSON",
        "PPOJOB_EXTRA_NAMES": "localhost",
    }
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


def secrets_in(kubectl: Any, name: str) -> set[str]:
    """Return the content of a Secret, as stored and line by line; certificates are public."""
    data = kubectl.json("get", "secret", name)["data"]
    encoded = {value for key, value in data.items() if not key.endswith(".crt")}
    lines = {line for value in encoded for line in base64.b64decode(value).decode(errors="replace").split("\n")}
    found = {text for text in encoded | lines if len(text) >= _SHORTEST and not text.startswith("-----")}
    assert found, f"nothing is secret in {name}"
    return found


def report_with(token: str, kubectl: Any, operator: Any, name: str, uid: str) -> int:
    """Send a report with a token, good or bad; return the answer's status."""
    authority = kubectl.json("get", "configmap", f"{name}-job")["data"][constants.CA_FILE]
    path = REPORT_PATH.format(namespace=kubectl.namespace, name=name)
    report = {"uid": uid, "attempt": 0, "activity": "Training", "step": 1, "totalSteps": 8}
    tls = ssl.create_default_context(cadata=authority)
    url = f"https://localhost:{operator.environment['PPOJOB_PORT']}{path}"
    return posted(tls, url, report, {"Authorization": f"Bearer {token}"}).status_code


def test_what_is_secret_is_said_nowhere(kubectl: Any, jobs: Any, operator: Any, rights: Any) -> None:
    name = jobs.create()
    cluster = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    selector = f"ppojob.dev/job={name},ray.io/node-type=head"
    kubectl("wait", "--for=create", "pods", "--selector", selector, "--timeout=240s")
    [pod] = kubectl.json("get", "pods", "--selector", selector)["items"]
    uid = kubectl.json("get", "ppojob", name)["metadata"]["uid"]
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={pod['metadata']['name']}")
    audience = f"--audience={progress_audience(kubectl.namespace, name, uid)}"
    good = kubectl("create", "token", f"{name}-trainer", audience, *bound).strip()
    assert report_with(good, kubectl, operator, name, uid) == 200
    assert report_with("a-bad-token-0123456789", kubectl, operator, name, uid) == 401
    jobs.wait(name, lambda status: status.get("progress", {}).get("step") == 1)
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)

    names = (f"{cluster}-ray", "ppojob-dashboard-key", "ppojob-certificates")
    secrets = set().union(*(secrets_in(kubectl, each) for each in names))
    secrets |= {good, "a-bad-token-0123456789", rights.kubeconfig["users"][0]["user"]["token"]}
    objects = "ppojobs,rayclusters,configmaps,serviceaccounts,networkpolicies,pods,leases,events"
    places = {"the log": operator.log.read_text(), "objects": kubectl("get", objects, "--output=yaml")}

    assert {where for where, text in places.items() for secret in secrets if secret in text} == set()
    assert f'"job": "{kubectl.namespace}/{name}"' in places["the log"]
