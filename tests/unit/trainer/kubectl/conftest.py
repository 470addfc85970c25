"""A cluster in memory, as the plugin sees it through kubectl."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ppojob_trainer.kubectl import app as plugin
from ppojob_trainer.kubectl.client import Cluster, KubectlError

FINISHED = {"type": "Complete", "status": "True", "reason": "TrainerSucceeded", "message": "all steps are done"}
HEAD = {
    "metadata": {
        "name": "products-head",
        "uid": "head-uid",
        "labels": {"ppojob.dev/job": "products", "ray.io/node-type": "head"},
        "creationTimestamp": "2026-01-31T12:00:00Z",
    },
    "spec": {"containers": [{"name": "ray-head"}, {"name": "sidecar"}]},
    "status": {"phase": "Running"},
}


def job(name: str = "products", **status: Any) -> dict[str, Any]:
    """Return a PPOJob as the API server has it."""
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-31T12:00:00Z",
        },
        "spec": {"image": "trainer:1", "storage": {"claimName": "claim", "mountPath": "/data"}},
        "status": {"phase": "Running", "startTime": "2026-01-31T12:00:05Z", **status},
    }


class MemoryCluster:
    """Objects by kind, files by path, and every command that was given."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {"ppojobs.ppojob.dev": [], "pods": [], "events": []}
        self.files: dict[str, bytes] = {}
        self.commands: list[tuple[str, ...]] = []
        self.created: list[dict[str, Any]] = []
        self.exit_status = 0
        self.patched: dict[str, Any] = {}

    def get(self, kind: str, *arguments: str) -> Any:
        found = self.objects.get(kind, [])
        if not arguments or arguments[0].startswith("-"):
            return {"items": found}
        named = [each for each in found if each["metadata"]["name"] == arguments[0]]
        if not named:
            raise KubectlError(f'{kind} "{arguments[0]}" not found')
        return named[0]

    def output(self, *arguments: str, stdin: str | None = None) -> bytes:
        self.commands.append(arguments)
        if stdin is not None:
            self.created.append(json.loads(stdin))
        if arguments[0] == "patch":
            return json.dumps(self.patched or self.get(arguments[1], arguments[2])).encode()
        if arguments[0] != "exec":
            return b""
        path = arguments[-1].rpartition("cat ")[2]
        if path not in self.files:
            raise KubectlError("command terminated with exit code 44")
        return self.files[path]

    def stream(self, *arguments: str, into: Callable[[bytes], object]) -> bytes:
        raise AssertionError("test_model.py has a kubectl that streams")

    def attach(self, *arguments: str) -> int:
        self.commands.append(arguments)
        return self.exit_status


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    """The cluster that the plugin speaks to."""
    memory = MemoryCluster()

    def given(context: str | None, namespace: str | None) -> Cluster:
        return memory

    monkeypatch.setattr(plugin, "_cluster", given)
    # Tables as on a wide terminal.
    monkeypatch.setenv("COLUMNS", "200")
    return memory


@pytest.fixture
def ppo() -> Callable[..., Result]:
    """Run the plugin with arguments."""
    return lambda *arguments: CliRunner().invoke(plugin.app, [str(argument) for argument in arguments])
