"""A trainer whose reports do not arrive: the job's status says so, the job continues, and the next report catches up.

The pods are on nodes that exist only in the API server, and the bench's server replaces Ray's dashboard.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.test_placement import fake_head, fake_pool
from tests.integration.operator.test_replicas import sender_of

pytestmark = [pytest.mark.usefixtures("volumes", "claim", "dashboards"), pytest.mark.timeout(2400)]

SILENCE_LIMIT_SECONDS = 300.0


@pytest.fixture(scope="module")
def operator(rights: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An operator whose status endpoint can be reached as localhost."""
    process = rights.operator(tmp_path_factory.mktemp("operator"))
    process.environment["PPOJOB_EXTRA_NAMES"] = "localhost"
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


def test_silence_is_said_and_harms_nothing_and_the_next_report_catches_up(
    kubectl: Any, jobs: Any, operator: Any, fake_nodes: Any
) -> None:
    pools = [
        fake_pool(fake_nodes, "actor", "h200", gpusPerNode=1),
        fake_pool(fake_nodes, "critic", "a100", gpusPerNode=1),
    ]
    name = jobs.create(device="CUDA", pools=pools, head=fake_head(fake_nodes), runPolicy={"stallTimeoutSeconds": 10})
    jobs.wait_for(name, Condition.SUBMITTED, "True", Reason.TRAINER_SUBMITTED)
    sender = sender_of(kubectl, name)
    sender.send(operator, 1)
    jobs.wait_for(name, Condition.PROGRESSING, "True", Reason.TRAINING)

    message = jobs.wait_for(name, Condition.PROGRESSING, "Unknown", Reason.REPORTS_MISSING, limit=SILENCE_LIMIT_SECONDS)
    assert "no report of it has arrived since" in message
    assert jobs.event(name, Reason.REPORTS_MISSING)["type"] == "Warning"
    assert jobs.status(name)["phase"] == "Running"

    sender.send(operator, 7)
    jobs.wait_for(name, Condition.PROGRESSING, "True", Reason.TRAINING)
    status = jobs.status(name)
    assert status["progress"]["step"] == 7
    assert (status["attempt"], status["retries"]["total"]) == (0, 0), "a silence of many stall timeouts is not a stall"
