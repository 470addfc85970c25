"""The operator's part of the status, as the field manager ppojob-operator applies it.

The other part belongs to the trainer's reports and is never written here.
"""

from typing import Any

from ppojob_api.v1alpha1.status import PPOJobStatus

OWNED = (
    "operator", "observedGeneration", "phase", "conditions", "attempt", "submissionId", "startTime", "activeSeconds",
    "completionTime", "retries", "ready", "rayCluster", "lastFailure", "stop", "queueName", "effectiveLayout",
    "effectivePools",
)  # fmt: skip
_OWNED_OF_POOL = ("name", "desiredNodes", "readyNodes", "gpus", "message")


def owned(status: PPOJobStatus) -> dict[str, Any]:
    """Return the operator's part of a status, as JSON."""
    wire = status.to_wire()
    pools = [{name: pool[name] for name in _OWNED_OF_POOL if name in pool} for pool in wire.get("pools", [])]
    part = {name: wire[name] for name in OWNED if name in wire}
    if not part.get("effectivePools"):
        part.pop("effectivePools", None)
    return {**part, "pools": pools} if pools else part
