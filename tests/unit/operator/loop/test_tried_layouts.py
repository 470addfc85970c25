"""An API server that does not answer a dry run does not end the reconcile of the job whose layout is tried."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ppojob_operator.api_server import ApiUnavailable
from ppojob_operator.plan import Observed, Plan
from ppojob_operator.reading import read_job
from tests.unit.operator.loop.memory_cluster import GOOD, MemoryCluster, make_loop
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loop", "work_queue"):
        monkeypatch.setattr(f"ppojob_operator.{module}.monotonic", now)


async def unavailable(_: Any) -> str:
    raise ApiUnavailable("503 no endpoints available")


async def slow(_: Any) -> str:
    await asyncio.sleep(3600)
    return ""


async def refused(_: Any) -> str:
    return "no PriorityClass"


@pytest.mark.parametrize(
    ("answer", "words", "is_unanswered"),
    [
        (unavailable, "503 no endpoints", True),
        (slow, "not done after 60 s", True),
        (refused, "no PriorityClass", False),
    ],
)
async def test_what_was_tried_is_observed(answer: Any, words: str, *, is_unanswered: bool) -> None:
    cluster: Any = MemoryCluster(GOOD)
    cluster.dry_run = answer
    loop = make_loop(cluster)

    found = await loop._tried(Observed(loop._surroundings(GOOD)), {})

    assert words in (found.dry_run or "")
    assert found.is_dry_run_unanswered == is_unanswered


async def test_a_layout_that_was_refused_is_tried_again_at_the_next_reconcile() -> None:
    cluster = MemoryCluster(GOOD)
    loop = make_loop(cluster)
    await loop.reconcile(GOOD)
    await loop.reconcile(GOOD)
    kept = loop._observer._cache[GOOD]
    assert kept is not None

    loop._observer.keep(read_job(cluster.jobs[GOOD]), replace(kept, dry_run="no PriorityClass"), Plan())

    assert loop._observer._cache[GOOD] == kept
    assert kept.dry_run is None
