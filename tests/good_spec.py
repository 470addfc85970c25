"""A good PPOJob, and how to make bad ones of it: `bad_specs` has the table of them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GOOD: dict[str, Any] = {
    "apiVersion": "ppojob.dev/v1alpha1",
    "kind": "PPOJob",
    "metadata": {"name": "good"},
    "spec": {
        "image": "trainer:1",
        "model": {"actor": {"path": "/data/model"}},
        "data": {
            "train": {"reasoningGym": {"task": "chain_sum"}},
            "trainBatchSize": 16,
        },
        "reward": {"function": {"module": "ppojob_trainer.rewards.reasoning_gym"}},
        "actor": {"miniBatchSize": 8},
        "critic": {"miniBatchSize": 8},
        "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
        "placement": {"actor": "actor", "critic": "critic"},
        "storage": {"claimName": "ppojob-data"},
    },
}

Step = str | int
GONE = object()
"""Takes the field out."""


@dataclass(frozen=True)
class BadSpec:
    """One mistake."""

    name: str
    changes: Mapping[tuple[Step, ...], Any]
    """New values by their places in `GOOD`."""
    path: str
    """The path of the field that is named."""
    says: str
    """What the message must contain: the remedy, or the bound."""
    shows: str = ""
    """The value that must be shown."""
    server_refuses: bool = True
    """Whether the API server refuses it, with strict field validation as kubectl asks for."""

    def manifest(self) -> dict[str, Any]:
        """Return the whole bad PPOJob."""
        return with_changes(self.changes)


def with_changes(changes: Mapping[tuple[Step, ...], Any]) -> dict[str, Any]:
    """Return `GOOD` with values changed, added or taken out."""
    manifest = copy.deepcopy(GOOD)
    for (*parents, last), value in changes.items():
        node: Any = manifest
        for step in parents:
            node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
        if value is GONE:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return manifest
