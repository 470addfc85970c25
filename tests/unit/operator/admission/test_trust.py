"""The configuration trusts the operator's certificates, also after a change of either."""

import asyncio
import logging

import pytest

from ppojob_operator.admission import keep_trusted
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from tests.unit.operator.admission.conftest import FakeCluster

pytestmark = pytest.mark.virtual_time
INTERVAL = 10.0


class Keeping:
    """The leader's part, and the bundle that it keeps."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.bundle = "first"
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(
            keep_trusted(cluster, "configuration", lambda: self.bundle, self.stop, INTERVAL)
        )

    async def end(self) -> None:
        self.stop.set()
        await self.task


async def test_what_is_not_trusted_becomes_so_and_nothing_is_written_where_nothing_changed(
    cluster: FakeCluster,
) -> None:
    cluster.webhooks = {"one": "", "two": "first"}
    keeping = Keeping(cluster)

    await asyncio.sleep(5 * INTERVAL)
    await keeping.end()

    assert cluster.trusted == [["one", "two"]]
    assert cluster.webhooks == {"one": "first", "two": "first"}


async def test_a_renewal_and_somebody_elses_change_are_followed(cluster: FakeCluster) -> None:
    cluster.webhooks = {"one": "first"}
    keeping = Keeping(cluster)
    await asyncio.sleep(1)

    keeping.bundle = "second and first"
    await asyncio.sleep(INTERVAL)
    assert cluster.webhooks == {"one": "second and first"}

    cluster.webhooks = {"one": ""}
    await asyncio.sleep(INTERVAL)
    await keeping.end()
    assert cluster.webhooks == {"one": "second and first"}


async def test_trouble_is_said_once_and_outlived(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cluster.webhooks = {"one": ""}
    cluster.errors = [ApiUnavailable("busy"), ApiUnavailable("busy"), ApiRefused("403 no")]
    keeping = Keeping(cluster)

    await asyncio.sleep(4 * INTERVAL)
    await keeping.end()

    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["busy", "403 no"]
    assert cluster.webhooks == {"one": "first"}


async def test_a_configuration_that_is_gone_is_named_and_waited_for(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.webhooks = None
    keeping = Keeping(cluster)
    await asyncio.sleep(3 * INTERVAL)

    cluster.webhooks = {"one": ""}
    await asyncio.sleep(INTERVAL)
    await keeping.end()

    assert caplog.text.count("there is no ValidatingWebhookConfiguration configuration: install it with the chart") == 1
    assert cluster.webhooks == {"one": "first"}
