"""Which cluster the demo runs on, and kubectl and helm for it. Everything else in this folder speaks through a Target.

It refuses to touch a cluster that is not ours unless the user names both images: a KUBECONFIG that happens to be set
must not get an operator by accident.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout

NAMESPACE = "ppojob-demo"
OPERATOR_NAMESPACE = "ppojob-system"
DEFAULT_LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Target:
    """A cluster: its kubeconfig ("" is kubectl's own search), and where its programs lie ("" is PATH)."""

    kubeconfig: str
    programs: str
    is_ours: bool

    def kubectl(self, *arguments: str, limit: float = DEFAULT_LIMIT_SECONDS, stdin: str | None = None) -> str:
        """Run kubectl in the demo's namespace.

        Raises:
            ClusterError: with kubectl's message.
        """
        return self._run("kubectl", f"--namespace={NAMESPACE}", *arguments, limit=limit, stdin=stdin)

    def helm(self, *arguments: str, limit: float) -> str:
        """Run helm in the operator's namespace."""
        return self._run("helm", f"--namespace={OPERATOR_NAMESPACE}", *arguments, limit=limit)

    def get(self, *arguments: str) -> Any:
        """`kubectl get` as parsed JSON."""
        return self.json("get", *arguments)

    def json(self, *arguments: str) -> Any:
        """The output of kubectl as parsed JSON."""
        return json.loads(self.kubectl(*arguments, "--output=json"))

    def has(self, kind: str, name: str) -> bool:
        """True if the namespace has that object."""
        return bool(self.kubectl("get", kind, name, "--ignore-not-found", "--output=name").strip())

    def apply(self, *objects: dict[str, Any]) -> None:
        """Server-side apply of the objects."""
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        options = ("--server-side", "--force-conflicts", "--field-manager=ppojob-demo", "--filename=-")
        self.kubectl("apply", *options, stdin=manifest)

    def _run(self, program: str, *arguments: str, limit: float, stdin: str | None = None) -> str:
        path = Path(self.programs) / program if self.programs else program
        environment = {"KUBECONFIG": self.kubeconfig} if self.kubeconfig else {}
        return run([path, *arguments], limit=limit, stdin=stdin, environment=environment)


def ours(layout: Layout) -> Target:
    """The one-node cluster."""
    return Target(kubeconfig=str(layout.kubeconfig), programs=str(layout.bin), is_ours=True)


def choose(layout: Layout, *, trainer_image: str, operator_image: str) -> Target:
    """The user's cluster if KUBECONFIG names one that is not ours and both images are given; else ours.

    Raises:
        ClusterError: only one image is given, or images without a cluster that could pull them.
    """
    kubeconfig = os.environ.get("KUBECONFIG", "")
    is_foreign = bool(kubeconfig) and Path(kubeconfig).resolve() != layout.kubeconfig.resolve()
    if not trainer_image and not operator_image:
        return ours(layout)
    if not (trainer_image and operator_image):
        raise ClusterError("IMAGE (the trainer's) and OPERATOR_IMAGE go together: give both, or neither")
    if not is_foreign:
        raise ClusterError("IMAGE and OPERATOR_IMAGE are for a cluster of your own: set KUBECONFIG to it as well")
    return Target(kubeconfig=kubeconfig, programs="", is_ours=False)
