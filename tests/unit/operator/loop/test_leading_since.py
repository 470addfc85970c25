"""A new leader knows when it started to lead, so that no trainer is blamed for reports that it could not receive."""

from datetime import UTC, datetime

import pytest

from ppojob_operator.plan import Job, Observed, Plan
from tests.unit.operator.loop.memory_cluster import GOOD, MemoryCluster, make_loop

pytestmark = pytest.mark.virtual_time


async def test_the_policies_hear_since_when_this_operator_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[datetime | None] = []

    def decided(job: Job, observed: Observed, now: datetime) -> Plan:
        seen.append(observed.leading_since)
        return Plan()

    monkeypatch.setattr("ppojob_operator.loop.decide", decided)
    before = datetime.now(UTC)
    loop = make_loop(MemoryCluster(GOOD))

    await loop.reconcile(GOOD)
    await loop.reconcile(GOOD)

    first, again = seen
    assert first is not None
    assert before <= first <= datetime.now(UTC)
    assert again == first
