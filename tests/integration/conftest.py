"""A real API server through kubectl, and a namespace for each test module.

It is that of `KUBECONFIG`, else the one-node cluster that `python -m tools.cluster up` starts.
"""

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.good_spec import with_changes
from tools.cluster.layout import Layout

PROJECT = Path(__file__).resolve().parents[2]
POLICY = PROJECT / "crds" / "ppojobs-policy.yaml"
POLICY_DENIED = "ValidatingAdmissionPolicy 'ppojobs.ppojob.dev' with binding 'ppojobs.ppojob.dev' denied request: "
RIGHTS = (
    ("list", "ppojobs.ppojob.dev"),
    ("create", "leases.coordination.k8s.io"),
    ("create", "tokenreviews.authentication.k8s.io"),
)
"""Of the operator's account: one by each role that the chart binds to it."""
_LIMIT_SECONDS = 300


class Kubectl:
    """kubectl, with a namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run it and return what came, whatever its exit status."""
        command = ["kubectl", "--namespace", self.namespace, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        """Run it and return its output; an error fails the test with kubectl's words."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Return the output as JSON."""
        return json.loads(self(*arguments, "--output=json"))

    def apply(self, *manifests: dict[str, Any], validate: str = "strict") -> subprocess.CompletedProcess[str]:
        """Apply manifests and return what came."""
        text = yaml.safe_dump_all(manifests)
        return self.run("apply", f"--validate={validate}", "--filename=-", stdin=text)

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create one object and return it as the API server has it."""
        created: dict[str, Any] = json.loads(
            self("create", "--filename=-", "--output=json", stdin=json.dumps(manifest))
        )
        return created


@pytest.fixture(scope="session")
def cluster() -> Kubectl:
    """kubectl for the cluster as a whole; our CRD is served, and its policy is active."""
    layout = Layout.from_environment()
    os.environ["PATH"] = f"{layout.bin}{os.pathsep}{os.environ['PATH']}"
    os.environ.setdefault("KUBECONFIG", str(layout.kubeconfig))
    kubectl = Kubectl("default")
    if not shutil.which("kubectl") or kubectl.run("get", "--raw=/readyz").returncode:
        pytest.fail(f"no API server answers by {os.environ['KUBECONFIG']}: run `python -m tools.cluster up`")
    define(kubectl)
    return kubectl


def define(kubectl: Kubectl) -> None:
    """Apply the CRD and its policy, and wait until both are in force."""
    kubectl("apply", "--server-side", "--force-conflicts", f"--filename={PROJECT / 'crds'}")
    wait_until_served(kubectl)
    _await(lambda: POLICY_DENIED in _try_bad_job(kubectl).stderr, "the policy of PPOJob does not become active")


def wait_until_served(kubectl: Kubectl) -> None:
    """Wait until the API server serves PPOJobs of a CRD that is applied."""
    # A definition that was made this moment has no conditions yet, and on those `kubectl wait` fails at once.
    for sign in ("jsonpath={.status.conditions}", "condition=Established"):
        kubectl("wait", f"--for={sign}", "--timeout=240s", "crd/ppojobs.ppojob.dev")
    _await(lambda: kubectl.run("get", "ppojobs").returncode == 0, "PPOJobs are not served")


def delete_policy(kubectl: Kubectl) -> None:
    """Delete the policy with its binding, and wait until the API server does without: it notices with a delay."""
    kubectl("delete", f"--filename={POLICY}")
    _await(lambda: not _try_bad_job(kubectl).returncode, "the policy of PPOJob stays active")


def wait_until_allowed(kubectl: Kubectl) -> None:
    """Wait until the API server gives the operator's account its rights: it knows new roles with a delay."""
    account = f"--as=system:serviceaccount:{kubectl.namespace}:ppojob"

    def is_allowed(right: tuple[str, str]) -> bool:
        return kubectl.run("auth", "can-i", *right, account).stdout.strip() == "yes"

    for right in RIGHTS:
        _await(partial(is_allowed, right), f"{account}: it may not {' '.join(right)}")


def _try_bad_job(kubectl: Kubectl) -> subprocess.CompletedProcess[str]:
    """Create a job that only the policy refuses; nothing is stored."""
    bad = json.dumps(with_changes({("spec", "actor", "miniBatchSize"): 7}))
    return kubectl.run("create", "--dry-run=server", "--filename=-", stdin=bad)


def _await(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.2)


@pytest.fixture(scope="module")
def kubectl(cluster: Kubectl) -> Iterator[Kubectl]:
    """kubectl for a new namespace, which goes with the module."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster("create", "namespace", name)
    yield Kubectl(name)
    cluster("delete", "namespace", name, "--wait=false")


@pytest.fixture
def manifest() -> dict[str, Any]:
    """The PPOJob of the first example."""
    text = (PROJECT / "examples" / "01-quickstart" / "ppojob.yaml").read_text()
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded
