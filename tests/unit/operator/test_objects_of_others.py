"""An object that the operator has not made is never taken over."""

from typing import Any

import pytest

from ppojob_operator.api_server import Answer, ApiRefused, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.manifests.config_map import config_map
from ppojob_operator.plan import JobKey

KEY = JobKey("rl-team", "arithmetic")
WANTED = config_map(KEY, "uid-1", "{}", "PEM")


class Server:
    """An API server with at most one object."""

    def __init__(self, found: dict[str, Any] | None) -> None:
        self.found = found
        self.patched: list[str] = []

    async def read(self, collection: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.found

    async def call(self, method: str, path: str, namespace: str, name: str, **_: Any) -> Answer:
        assert method == "PATCH"
        self.patched.append(name)
        return Answer(200, {})


def owned_by(*owners: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "arithmetic-job", "ownerReferences": list(owners)}}


OTHER = {"kind": "PPOJob", "name": "arithmetic", "uid": "uid-0", "controller": True}
CHART = {"kind": "Deployment", "name": "web", "uid": "uid-9", "controller": True}


@pytest.mark.parametrize(
    ("found", "whose"),
    [
        (owned_by(), "belongs to nobody"),
        (owned_by(CHART), "belongs to Deployment web (uid uid-9)"),
        (owned_by({**OTHER, "name": "geometry"}), "belongs to PPOJob geometry (uid uid-0)"),
        (owned_by({**OTHER, "uid": "uid-1", "controller": False}), "belongs to PPOJob arithmetic (uid uid-1)"),
    ],
)
async def test_an_object_of_somebody_else_is_named_and_left_alone(found: dict[str, Any], whose: str) -> None:
    server = Server(found)

    with pytest.raises(ApiRefused, match="ConfigMap arithmetic-job is there already") as raised:
        await Cluster(server, reporter="pod-1").apply(WANTED)  # type: ignore[arg-type]

    assert whose in str(raised.value)
    assert "give the PPOJob another name" in str(raised.value)
    assert server.patched == []


async def test_what_an_earlier_job_of_the_name_has_left_is_waited_for() -> None:
    server = Server(owned_by(OTHER))

    with pytest.raises(ApiUnavailable, match="of an earlier PPOJob of this name is still being removed"):
        await Cluster(server, reporter="pod-1").apply(WANTED)  # type: ignore[arg-type]

    assert server.patched == []


@pytest.mark.parametrize("found", [None, owned_by({**OTHER, "uid": "uid-1"})], ids=["absent", "ours"])
async def test_its_own_object_is_made_and_mended(found: dict[str, Any] | None) -> None:
    server = Server(found)

    await Cluster(server, reporter="pod-1").apply(WANTED)  # type: ignore[arg-type]

    assert server.patched == ["arithmetic-job"]
