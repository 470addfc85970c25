"""Pauses our operators that watch all namespaces, such as the demo's, while tests run a separate one.

A job is run by the operator that sees it first, and that must be the test's. Jobs of a paused operator continue: a
trainer works without one for a while. Tests in several processes may pause operators at the same time: the last one
scales them back.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from tools.cluster.layout import Layout

_SELECTOR = "--selector=app.kubernetes.io/name=ppojob-operator"
# On a paused Deployment: the replicas that it had.
_REPLICAS = "ppojob.dev/replicas-before-tests"


@contextmanager
def paused(kubectl: Callable[..., str], *, layout: Layout | None = None) -> Iterator[None]:
    """Scale them to 0, and back at the end; `kubectl` runs it with the arguments and returns its output."""
    lock = (layout or Layout.from_environment()).pauses_lock
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            _for_each(kubectl, _pause)
            yield
        finally:
            if _is_last(file):
                _for_each(kubectl, _resume)


def _is_last(file: IO[str]) -> bool:
    """Whether nobody else has them paused; the lock is released with the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _for_each(kubectl: Callable[..., str], action: Callable[[Callable[..., str], dict[str, Any]], None]) -> None:
    """Do it with the Deployment of each operator that watches all namespaces."""
    found = json.loads(kubectl("get", "deployments", "--all-namespaces", _SELECTOR, "--output=json"))
    for each in found["items"]:
        if not _watched_namespaces(each["spec"]["template"]["spec"]["containers"][0]):
            action(kubectl, each)


def _pause(kubectl: Callable[..., str], deployment: dict[str, Any]) -> None:
    name, namespace = f"deployment/{deployment['metadata']['name']}", deployment["metadata"]["namespace"]
    replicas = deployment["spec"]["replicas"]
    if not replicas:
        return
    kubectl("annotate", name, f"--namespace={namespace}", "--overwrite", f"{_REPLICAS}={replicas}")
    kubectl("scale", name, f"--namespace={namespace}", "--replicas=0")
    kubectl("wait", "--for=delete", "pods", _SELECTOR, f"--namespace={namespace}", "--timeout=240s")


def _resume(kubectl: Callable[..., str], deployment: dict[str, Any]) -> None:
    name, namespace = f"deployment/{deployment['metadata']['name']}", deployment["metadata"]["namespace"]
    replicas = deployment["metadata"].get("annotations", {}).get(_REPLICAS)
    if replicas:
        kubectl("scale", name, f"--namespace={namespace}", f"--replicas={replicas}")
        kubectl("annotate", name, f"--namespace={namespace}", f"{_REPLICAS}-")


def _watched_namespaces(container: dict[str, list[dict[str, str]]]) -> str:
    """Return the names, separated by commas; empty: all namespaces."""
    return {item["name"]: item.get("value", "") for item in container["env"]}.get("PPOJOB_WATCH_NAMESPACES", "")
