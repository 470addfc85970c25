"""Whatever pool a running job gets: the API server rejects it, or a condition names the field, or its pods start.

The edits take turns: the first pool, which has the actor, the second one, and the head. Each edit is taken back, so
what it added is removed again. The pods are on nodes that exist only in the API server, and the bench's server replaces
Ray's dashboard. With PPOJOB_FUZZ (`make fuzz`), all fragments of pod templates are tried, else some of them.
"""

import json
import os
from collections.abc import Iterator
from copy import deepcopy
from itertools import cycle
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.fuzz.specs import FRAGMENTS, Keys, put
from tests.integration.operator.test_placement import fake_head, fake_pool

pytestmark = [pytest.mark.usefixtures("volumes", "claim", "dashboards"), pytest.mark.timeout(3600)]

_STEP = 1 if "PPOJOB_FUZZ" in os.environ else 5
_WAITING: list[tuple[Keys, Any]] = [
    (("spec", "schedulerName"), "other"),
    (("spec", "resourceClaims"), [{"name": "gpu", "resourceClaimName": "a"}]),
]
"""Pods of these wait for somebody else, and nothing in the cluster says so."""
_TEMPLATES = [
    (("podTemplate", *path), value)
    for path, values in FRAGMENTS.items()
    for value in values
    if (path, value) not in _WAITING
]
EDITS: list[tuple[Keys, Any]] = [
    (("nodeSelector", "zone"), "a"),
    (("resourceClaims",), [{"name": "nic", "resourceClaimTemplateName": "nic"}]),
    (("topology",), {"preferred": "cloud.example.com/rack"}),
    (("resourcesPerGPU", "cpu"), "11m"),
    (("podTemplate", "metadata", "labels"), {"team": "a"}),
    *_TEMPLATES[::_STEP],
]


Places = dict[str, dict[str, Any]]
"""The sections that are edited, by their path in the spec."""
_OF_POOLS = {"resourceClaims", "topology", "resourcesPerGPU"}
"""Fields that a head does not have."""


def turns() -> Iterator[tuple[str, Keys, Any]]:
    """Yield each edit with its place."""
    for place, (path, value) in zip(cycle(("spec.pools[1]", "spec.pools[0]", "spec.head")), EDITS, strict=False):
        is_of_a_pool = place == "spec.head" and path[0] in _OF_POOLS
        yield "spec.pools[0]" if is_of_a_pool else place, path, value


def patch(kubectl: Any, name: str, places: Places) -> bool:
    """Replace a job's pools and its head; return whether the API server has stored them."""
    # A merge patch keeps what it does not name, so the head is replaced by JSON patch.
    change = json.dumps([
        {"op": "replace", "path": "/spec/pools", "value": [places["spec.pools[0]"], places["spec.pools[1]"]]},
        {"op": "replace", "path": "/spec/head", "value": places["spec.head"]},
    ])  # fmt: skip
    return bool(kubectl.run("patch", "ppojob", name, "--type=json", f"--patch={change}").returncode == 0)


def judged(jobs: Any, kubectl: Any, name: str) -> dict[str, Any]:
    """Wait until the operator has judged the spec as it is now; return the status.

    A dry run that the API server did not answer in time is repeated.
    """
    generation = kubectl.json("get", "ppojob", name)["metadata"]["generation"]

    def is_judged(status: dict[str, Any]) -> bool:
        if status.get("observedGeneration") != generation:
            return False
        return condition(status, Condition.LAYOUT_APPLIED).get("reason") != Reason.API_REQUEST_FAILED

    found: dict[str, Any] = jobs.wait(name, is_judged)
    return found


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((each for each in status["conditions"] if each["type"] == kind), {})


def is_running(status: dict[str, Any]) -> bool:
    """Return whether a trainer runs with the layout of the spec."""
    applied, submitted = condition(status, Condition.LAYOUT_APPLIED), condition(status, Condition.SUBMITTED)
    return applied.get("status") == "True" and submitted["status"] == "True"


def is_settled(status: dict[str, Any]) -> bool:
    """Return whether the layout is in force with a new trainer, or its pods have no node, or were refused."""
    pools_ready = condition(status, Condition.POOLS_READY)["reason"]
    return pools_ready in (Reason.PODS_REFUSED, Reason.UNSCHEDULABLE) or is_running(status)


def test_every_edit_is_refused_or_named_or_its_pods_start(
    kubectl: Any, jobs: Any, fake_nodes: Any, operator: Any
) -> None:
    actor = fake_pool(fake_nodes, "actor", "h200", gpusPerNode=1)
    critic = fake_pool(fake_nodes, "critic", "a100", gpusPerNode=1)
    policy = {"stopGracePeriodSeconds": 1}
    head = fake_head(fake_nodes)
    name = jobs.create(device="CUDA", pools=[actor, critic], head=head, runPolicy=policy)
    jobs.wait_for(name, Condition.SUBMITTED, "True", Reason.TRAINER_SUBMITTED)
    places: Places = {"spec.pools[0]": actor, "spec.pools[1]": critic, "spec.head": head}
    outcomes: dict[str, list[tuple[str, Keys, Any]]] = {"refused": [], "named": [], "started": []}

    for place, path, value in turns():
        before, edited = jobs.status(name), deepcopy(places)
        put(edited[place], path, value)
        if not patch(kubectl, name, edited):
            outcomes["refused"].append((place, path, value))
            continue
        status = judged(jobs, kubectl, name)
        applied = condition(status, Condition.LAYOUT_APPLIED)
        if applied.get("reason") == Reason.INVALID_SPEC:
            outcomes["named"].append((place, path, value))
            assert f"{place}." in applied["message"], (place, path, value, applied)
            assert status["rayCluster"]["name"] == before["rayCluster"]["name"], (place, path, value)
            assert [status.get(field) for field in ("stop", "attempt")] == [before.get("stop"), before["attempt"]]
        else:
            status = jobs.wait(name, is_settled)
            pools_ready = condition(status, Condition.POOLS_READY)
            assert pools_ready["reason"] != Reason.PODS_REFUSED, (place, path, pools_ready)
            outcomes["started"].append((place, path, value))
        assert patch(kubectl, name, places)
        judged(jobs, kubectl, name)
        # A dry run protects a running trainer only, so the next edit waits for one.
        jobs.wait(name, is_running)

    log = operator.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 2_000 :][:6_000]
    for outcome, edits in outcomes.items():
        print(f"{outcome}: {len(edits)}", *edits, sep="\n  ")
    for outcome in ("named", "started"):
        assert {place for place, *_ in outcomes[outcome]} == places.keys(), outcome
