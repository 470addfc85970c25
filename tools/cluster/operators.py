"""Pauses operators of ours that watch all namespaces, such as the demo's, while tests run one of their own.

A job is run by the operator that sees it first, and that must be the test's. Jobs of a paused operator go on: a trainer
does without one for a while.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SELECTOR = "--selector=app.kubernetes.io/name=ppojob-operator"


@contextmanager
def paused(kubectl: Callable[..., str]) -> Iterator[None]:
    """Scale them to 0, and back at the end; `kubectl` runs it with the arguments and returns its output."""
    deployments = _of_all_namespaces(kubectl)
    try:
        for namespace, name, _ in deployments:
            kubectl("scale", f"deployment/{name}", f"--namespace={namespace}", "--replicas=0")
            kubectl("wait", "--for=delete", "pods", _SELECTOR, f"--namespace={namespace}", "--timeout=50s")
        yield
    finally:
        for namespace, name, replicas in deployments:
            kubectl("scale", f"deployment/{name}", f"--namespace={namespace}", f"--replicas={replicas}")


def _of_all_namespaces(kubectl: Callable[..., str]) -> list[tuple[str, str, int]]:
    found = json.loads(kubectl("get", "deployments", "--all-namespaces", _SELECTOR, "--output=json"))
    return [
        (each["metadata"]["namespace"], each["metadata"]["name"], each["spec"]["replicas"])
        for each in found["items"]
        if each["spec"]["replicas"] and not _watched_namespace(each["spec"]["template"]["spec"]["containers"][0])
    ]


def _watched_namespace(container: dict[str, list[dict[str, str]]]) -> str:
    return {item["name"]: item.get("value", "") for item in container["env"]}.get("PPOJOB_WATCH_NAMESPACE", "")
