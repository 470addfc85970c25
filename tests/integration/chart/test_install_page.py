"""The commands of docs/install.md, unchanged, as a dry run of a real API server: for each of the three ways.

Images, new clusters and KubeRay's published chart are left out. The job's run to its end is tested by hand.
"""

import os
import re
import subprocess
from typing import Any

import pytest

from tests.integration.conftest import PROJECT

PAGE = (PROJECT / "docs" / "install.md").read_text()
_WAY = re.compile(r"^\*\*(Your own cluster|kind|minikube)\*\*.*?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WAYS = dict(_WAY.findall(PAGE))
OTHERS = ("make ", "kind ", "minikube ", "helm install kuberay-operator ")
# Nothing is created, so there is nothing to wait for. The definitions are shared, so no release may own them.
DRY_RUN = """
kubectl() { test "$1" = wait || command kubectl --namespace="$NAMESPACE" "$@" --dry-run=server; }
helm() { command helm "$@" --dry-run=server --set=crds.install=false; }
"""


@pytest.mark.parametrize("way", ["Your own cluster", "kind", "minikube"])
def test_the_api_server_accepts_what_the_page_applies(kubectl: Any, way: str) -> None:
    commands = [line for line in WAYS[way].splitlines() if not line.startswith(OTHERS)]

    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", "\n".join([DRY_RUN, *commands])],
        cwd=PROJECT,
        env=os.environ | {"NAMESPACE": kubectl.namespace},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "STATUS: pending-install" in done.stdout
    for created in ("persistentvolumeclaim/ppojob-data", "job.batch/prepare-model", "ppojob.ppojob.dev/smallest"):
        assert f"{created} created (server dry run)" in done.stdout
