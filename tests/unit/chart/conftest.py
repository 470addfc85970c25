"""helm, where there is one: on the PATH or built by `python -m tools.cluster build`."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.cluster.layout import Layout

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
# helm asks no cluster here, and a helm that was built from source does not know a version by itself.
_KUBERNETES = "1.34.0"


class Helm:
    """helm with our chart."""

    def __init__(self, binary: str) -> None:
        self._binary = binary

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it and return what came, whatever its exit status."""
        return subprocess.run([self._binary, *arguments], capture_output=True, text=True, timeout=300, check=False)

    def template(self, values: dict[str, Any], kubernetes: str = _KUBERNETES) -> subprocess.CompletedProcess[str]:
        """Render the chart as release `ppojob` in namespace `system`."""
        given = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
        arguments = ("ppojob", str(CHART), "--namespace=system", f"--kube-version={kubernetes}", *given)
        return self.run("template", *arguments)

    def objects(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rendered objects."""
        done = self.template(values)
        assert done.returncode == 0, done.stderr
        # With libyaml: the definitions alone take a second in Python.
        return [manifest for manifest in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if manifest]


@pytest.fixture(scope="session")
def helm() -> Helm:
    binary = shutil.which("helm", path=os.pathsep.join([os.environ["PATH"], str(Layout.from_environment().bin)]))
    if binary is None:
        pytest.skip("there is no helm: `python -m tools.cluster build` makes one")
    return Helm(binary)
