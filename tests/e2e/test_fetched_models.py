"""A model that a hub does not have; the tutorial's test fetches one that it has."""

import pytest

from tests.e2e.conftest import Site
from tests.unit.trainer.fetch.hub_server import Hub

pytestmark = pytest.mark.timeout(1800)

PATIENCE_SECONDS = 600.0


def test_a_model_that_is_not_there_ends_the_job_with_the_remedy(site: Site, hub: Hub) -> None:
    env = [{"name": "HF_ENDPOINT", "value": hub.url}]
    site.apply("not-fetched", {"model": {"actor": {"path": "hf://acme/nothing"}}, "env": env})

    condition = site.await_condition("not-fetched", "Failed", "True", limit=PATIENCE_SECONDS, reason="FetchFailed")

    assert "spec.model.actor.path hf://acme/nothing: there is no model acme/nothing at" in condition["message"]
    assert "give a token by HF_TOKEN in spec.env, from a Secret" in condition["message"]
    assert site.get("rayclusters", "--selector=ppojob.dev/job=not-fetched")["items"] == []
    site.delete("not-fetched")
