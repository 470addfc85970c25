"""The Secret of a RayCluster is deleted by its name; whether that is allowed, the chart decides."""

import pytest
from aiohttp import web

from ppojob_operator.api_server import ApiUnavailable
from ppojob_operator.cluster import Cluster
from tests.unit.operator.fake_api_server import connected


@pytest.mark.parametrize("status", [200, 202, 403, 404, 503])
async def test_a_missing_secret_or_right_is_no_error(status: int) -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        return web.json_response({"message": "an answer"}, status=status)

    async with connected(handle) as api:
        cluster = Cluster(api, reporter="pod-1")
        if status == 503:
            with pytest.raises(ApiUnavailable):
                await cluster.delete_secret("ns", "c-ray")
        else:
            await cluster.delete_secret("ns", "c-ray")

    assert asked == ["DELETE /api/v1/namespaces/ns/secrets/c-ray"]
