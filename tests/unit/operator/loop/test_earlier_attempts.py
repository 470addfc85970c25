"""Ray is asked to end earlier attempts before it is given the next one, and what it answers holds nothing else up."""

import pytest

from ppojob_operator.dashboard import Address, DashboardError
from ppojob_operator.plan import Observed, Plan, Submission, Surroundings
from ppojob_operator.reading import read_job
from tests.unit.operator.loop.memory_cluster import GOOD, MemoryCluster, make_loop

pytestmark = pytest.mark.virtual_time


class RecordingDashboard:
    """A dashboard that notes what it is asked for."""

    def __init__(self, error: DashboardError | None) -> None:
        self.asked: list[str] = []
        self._error = error

    async def stop(self, address: Address, submission_id: str) -> None:
        self.asked.append(f"stop {submission_id}")
        if self._error is not None:
            raise self._error

    async def submit(self, address: Address, submission: Submission) -> None:
        self.asked.append(f"submit {submission.submission_id}")


@pytest.mark.parametrize("error", [None, DashboardError("POST /api/jobs/s-0/stop: 500 no agent")])
async def test_earlier_attempts_are_ended_before_the_next_one_is_sent(
    error: DashboardError | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, dashboard = MemoryCluster(GOOD), RecordingDashboard(error)
    loop = make_loop(cluster)
    monkeypatch.setattr(loop, "_dashboard", dashboard)
    monkeypatch.setattr(loop, "_address", lambda job, observed: Address("http://ray", "t"))
    observed = Observed(Surroundings("https://operator", "PEM", b"k" * 32))
    plan = Plan(stop_submissions=("s-0", "s-1"), submission=Submission("s-2", "python", {}, {}, "c"))

    await loop._execute(read_job(cluster.jobs[GOOD]), observed, plan)

    assert dashboard.asked == ["stop s-0", "stop s-1", "submit s-2"]
    assert ("s-0 could not be stopped in Ray: POST /api/jobs/s-0/stop: 500 no agent" in caplog.text) == bool(error)
