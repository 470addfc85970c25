"""What `helm test` runs, in a pod with the operator's image and account: is everything served, and does one lead?

Its arguments are the probe's address, the path of PPOJobs at the API server, and the path of the Lease.
"""

import json
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIMIT_SECONDS = 90


def ask(path: str) -> Any:
    """Return what the API server has at a path."""
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    request = urllib.request.Request(f"https://kubernetes.default.svc{path}", headers=headers)
    with urllib.request.urlopen(request, context=trusted, timeout=10) as answer:
        return json.load(answer)


def holder(lease: str) -> str:
    """Return who leads.

    Raises:
        ValueError: nobody does.
    """
    name = str(ask(lease)["spec"].get("holderIdentity") or "")
    if not name:
        raise ValueError("the Lease has no holder")
    return name


def problem(probe: str, jobs: str, lease: str) -> str:
    """Return what is wrong, or nothing."""
    steps = (
        ("the definition of PPOJob is not served: kubectl get crd ppojobs.ppojob.dev", lambda: ask(f"{jobs}?limit=1")),
        ("KubeRay is not installed: kubectl get crd rayclusters.ray.io", lambda: ask("/apis/ray.io/v1")),
        ("no replica is ready: look at the operator's log", lambda: urllib.request.urlopen(probe, timeout=10).read()),
        ("no replica leads: look at the operator's log", lambda: holder(lease)),
    )
    for words, step in steps:
        try:
            step()
        except (OSError, ValueError, KeyError) as error:
            return f"{words} ({error})"
    return ""


def main() -> None:
    """Ask until all is well, or the time is over."""
    end = time.monotonic() + LIMIT_SECONDS
    while found := problem(*sys.argv[1:]):
        if time.monotonic() > end:
            sys.exit(found)
        time.sleep(2)
    sys.stdout.write("PPOJobs are served, KubeRay is there, a replica is ready, and one leads\n")


if __name__ == "__main__":
    main()
