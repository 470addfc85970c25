"""Whole jobs notify a receiver of each event once, also of those that it could not take before the operator restarted.

The pods are on nodes that exist only in the API server, and the bench's server replaces Ray's dashboard. Operator,
API server and receiver are real.
"""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.test_placement import fake_head, fake_pool

pytestmark = [pytest.mark.usefixtures("volumes", "claim", "dashboards"), pytest.mark.timeout(2400)]


class Events:
    """A receiver. It refuses everything while it is closed."""

    def __init__(self) -> None:
        self.accepted: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.is_open = True
        events = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                event, is_open = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), events.is_open
                if is_open:
                    events.accepted.append(event)
                else:
                    events.refused.append(event["id"])
                self.send_response(202 if is_open else 503)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def of(self, name: str) -> list[tuple[str, int]]:
        """Return type and attempt of each event of a job, in the order of arrival."""
        mine = [event for event in self.accepted if event["data"]["name"] == name]
        return [(event["type"].rpartition(".")[2], event["data"]["attempt"]) for event in mine]


@pytest.fixture(scope="module")
def events() -> Iterator[Events]:
    """The receiver of the module's operator."""
    made = Events()
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def chart_values(events: Events) -> tuple[str, ...]:
    """An operator that sends everything but warnings."""
    return (
        "notifications.enabled=true",
        f"notifications.url=http://127.0.0.1:{events.server.server_port}",
        # An event that this machine takes late would be sent twice.
        "notifications.timeoutSeconds=60",
        "notifications.types={started,retried,succeeded,failed,restarted,suspended}",
    )


def report(kubectl: Any, jobs: Any, name: str, step: int) -> None:
    """Write what the status server writes for a report of the current attempt."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    attempt = jobs.status(name)["attempt"]
    progress = {"attempt": attempt, "report": step, "step": step, "totalSteps": 8, "activity": "Training"}
    times = {"lastUpdateTime": now, "lastChangeTime": now, "firstStepTime": now}
    body = {
        "apiVersion": "ppojob.dev/v1alpha1",
        "kind": "PPOJob",
        "metadata": {"name": name},
        "status": {"progress": {**progress, **times, "reward": "0.5"}},
    }
    arguments = ("apply", "--server-side", "--subresource=status", "--field-manager=ppojob-progress", "--filename=-")
    kubectl(*arguments, stdin=json.dumps(body))


def run(kubectl: Any, jobs: Any, name: str, attempt: int) -> str:
    """Wait until an attempt is submitted, let its trainer report, and return its submission."""
    status = jobs.wait(name, lambda status: status.get("attempt") == attempt and "submissionId" in status)
    report(kubectl, jobs, name, step=attempt + 1)
    jobs.wait(name, lambda status: status["phase"] == "Running")
    submission: str = status["submissionId"]
    return submission


def create(jobs: Any, fake_nodes: Any, **policy: Any) -> str:
    """Return the name of a new job with a pool for each role that trains."""
    pools = [
        fake_pool(fake_nodes, "actor", "h200", gpusPerNode=1),
        fake_pool(fake_nodes, "critic", "a100", gpusPerNode=1),
    ]
    name: str = jobs.create(device="CUDA", pools=pools, head=fake_head(fake_nodes), runPolicy=policy)
    return name


def is_delivered(status: dict[str, Any]) -> bool:
    return status["notifications"]["pending"] == []


def test_a_job_that_succeeds_is_notified_once_at_each_end(
    kubectl: Any, jobs: Any, fake_nodes: Any, dashboards: Any, events: Events
) -> None:
    name = create(jobs, fake_nodes)
    submission = run(kubectl, jobs, name, attempt=0)
    dashboards.end(submission, "SUCCEEDED")

    jobs.wait_for(name, Condition.COMPLETE, "True", Reason.TRAINER_SUCCEEDED)
    status = jobs.wait(name, is_delivered)

    assert events.of(name) == [("started", 0), ("succeeded", 0)]
    assert status["notifications"]["number"] == 2
    last = [event for event in events.accepted if event["data"]["name"] == name][-1]
    assert last["subject"] == f"{kubectl.namespace}/{name}"
    data = last["data"]
    assert (data["phase"], data["step"], data["totalSteps"], data["reward"]) == ("Succeeded", 1, 8, 0.5)


def test_a_job_that_fails_is_notified_of_its_retry_too(
    kubectl: Any, jobs: Any, fake_nodes: Any, dashboards: Any, events: Events
) -> None:
    name = create(jobs, fake_nodes, backoffLimit=1)
    for attempt in (0, 1):
        dashboards.end(run(kubectl, jobs, name, attempt), "FAILED")

    jobs.wait(name, lambda status: status["phase"] == "Failed")
    jobs.wait(name, is_delivered)

    assert events.of(name) == [("started", 0), ("retried", 1), ("started", 1), ("failed", 1)]


def test_what_the_receiver_could_not_take_arrives_after_a_restart_of_the_operator(
    kubectl: Any, jobs: Any, fake_nodes: Any, dashboards: Any, events: Events, operator: Any
) -> None:
    events.is_open = False
    name = create(jobs, fake_nodes, backoffLimit=0)
    dashboards.end(run(kubectl, jobs, name, attempt=0), "FAILED")
    status = jobs.wait(name, lambda status: status["phase"] == "Failed")
    assert [each["type"] for each in status["notifications"]["pending"]] == ["started", "failed"]
    jobs.wait_until(lambda: bool(events.refused))

    operator.kill()
    events.is_open = True
    operator.start()

    jobs.wait(name, is_delivered)
    assert events.of(name) == [("started", 0), ("failed", 0)]
    uid = kubectl.json("get", "ppojob", name)["metadata"]["uid"]
    assert set(events.refused) == {f"{uid}-1"}
    assert [event["id"] for event in events.accepted if event["data"]["name"] == name] == [f"{uid}-1", f"{uid}-2"]
