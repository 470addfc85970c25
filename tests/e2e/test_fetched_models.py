"""Models by address: a hub on this machine, the Job that fetches, and a trainer that loads what was fetched."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.unit.trainer.fetch.hub_server import Hub, Repository, serving

pytestmark = pytest.mark.timeout(1800)

MODEL = "acme/smollm2"
PATIENCE_SECONDS = 600.0
_ONE_POOL: dict[str, Any] = {
    "pools": [{"name": "all", "gpusPerNode": 1, "resourcesPerGPU": {"cpu": "250m", "memory": "12Gi", "shm": "512Mi"}}],
    "placement": {role: "all" for role in ("actor", "rollout", "critic", "ref", "reward")},
}


@pytest.fixture(scope="module")
def hub(site: Site) -> Iterator[Hub]:
    """A hub with the prepared model, which the pods reach at the node's address."""
    [node] = site.get("nodes")["items"]
    address = next(each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP")
    folder = site.folder / "models" / "smollm2-135m-instruct"
    with serving(address) as found:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        found.repositories["models", MODEL] = Repository(files)
        yield found


def _changes(hub: Hub, address: str) -> dict[str, Any]:
    env = [{"name": "HF_ENDPOINT", "value": hub.url}]
    return {**_ONE_POOL, "model": {"actor": {"path": address}}, "env": env}


def test_a_model_is_fetched_first_and_then_trained(site: Site, hub: Hub) -> None:
    site.apply("fetched", _changes(hub, f"hf://{MODEL}"))

    site.await_condition("fetched", "SourcesFetched", "False", limit=120, reason="Fetching")
    assert site.get("rayclusters", "--selector=ppojob.dev/job=fetched")["items"] == []
    site.await_condition("fetched", "SourcesFetched", "True", limit=PATIENCE_SECONDS, reason="Fetched")

    [source] = site.job("fetched")["status"]["sources"]
    folder = site.folder / "sources" / "hf" / "models" / "acme" / "smollm2" / "main"
    assert (source["address"], source["revision"]) == (f"hf://{MODEL}", "c" * 40)
    assert source["path"].endswith("/sources/hf/models/acme/smollm2/main")
    assert source["bytes"] == sum(path.stat().st_size for path in folder.iterdir() if not path.name.startswith("."))
    site.await_condition("fetched", "Progressing", "True", limit=PATIENCE_SECONDS)
    site.delete("fetched")


def test_a_model_that_is_not_there_ends_the_job_with_the_remedy(site: Site, hub: Hub) -> None:
    site.apply("not-fetched", _changes(hub, "hf://acme/nothing"))

    condition = site.await_condition("not-fetched", "Failed", "True", limit=PATIENCE_SECONDS, reason="FetchFailed")

    assert "spec.model.actor.path hf://acme/nothing: there is no model acme/nothing at" in condition["message"]
    assert "give a token by HF_TOKEN in spec.env, from a Secret" in condition["message"]
    assert site.get("rayclusters", "--selector=ppojob.dev/job=not-fetched")["items"] == []
    site.delete("not-fetched")
