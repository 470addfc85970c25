"""Which namespaces are served: those of a list, or those whose labels match a selector, also when labels change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.plan import JobKey
from ppojob_operator.served_namespaces import ServedNamespaces
from ppojob_operator.settings import Settings
from tests.unit.operator.loop.memory_cluster import OURS, SELECTOR, LabelledCluster, make_loop, run_for
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time

A, B = JobKey("a", "good"), JobKey("b", "good")
LISTED = ("list_namespaces", JobKey("", "ppojob.dev/enabled=true"))


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loop", "work_queue"):
        monkeypatch.setattr(f"ppojob_operator.{module}.monotonic", now)


class Selection:
    """The selected namespaces of a cluster, and the jobs that were enqueued because of them."""

    def __init__(self, cluster: LabelledCluster, **settings: object) -> None:
        self.cluster = cluster
        self.enqueued: list[JobKey] = []
        configured = Settings(**{"namespace_selector": SELECTOR, **settings})
        self.namespaces = ServedNamespaces(configured, cluster, self.enqueued.append)  # type: ignore[arg-type]

    @property
    def served(self) -> str:
        return "".join(name for name in "abc" if self.namespaces.serves(name))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(self.namespaces.run(stop))
        await asyncio.sleep(0.1)
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, 60)

    async def label(self, names: str, *, is_reported: bool = True, seconds: float = 2) -> None:
        """Let other namespaces have the label, and wait."""
        self.cluster.labelled = set(names)
        if is_reported:
            self.namespaces.changed()
        await asyncio.sleep(seconds)


@pytest.mark.parametrize(("watched", "served"), [((), "abc"), (("a", "b"), "ab")])
async def test_without_a_selector_the_list_decides_and_namespaces_are_not_read(
    watched: tuple[str, ...], served: str
) -> None:
    selection = Selection(LabelledCluster(A), namespace_selector={}, watch_namespaces=watched)

    async with selection.running():
        assert selection.served == served
        assert selection.namespaces.scopes == (watched or ("",))
    assert selection.cluster.calls == []


async def test_the_jobs_of_a_namespace_are_enqueued_when_its_label_comes_and_when_it_goes() -> None:
    selection = Selection(LabelledCluster(A, B, labelled="a"))

    async with selection.running():
        assert (selection.served, selection.enqueued) == ("a", [])
        await selection.label("ab")
        assert (selection.served, selection.enqueued) == ("ab", [B])
        await selection.label("b")
        assert (selection.served, selection.enqueued) == ("b", [B, A])
    assert selection.cluster.calls.count(LISTED) == 3
    assert selection.namespaces.scopes == ("",)


async def test_a_change_that_no_watch_reported_is_found_by_a_resync() -> None:
    selection = Selection(LabelledCluster(A, B, labelled="a"), idle_interval=60)

    async with selection.running():
        await selection.label("ab", is_reported=False, seconds=50)
        assert selection.served == "a"
        await asyncio.sleep(15)
        assert (selection.served, selection.enqueued) == ("ab", [B])


async def test_before_the_first_list_nothing_is_decided_and_it_is_tried_again() -> None:
    selection = Selection(cluster := LabelledCluster(A, labelled="a"))
    cluster.errors[LISTED] = ApiUnavailable("503")

    async with selection.running():
        with pytest.raises(ApiUnavailable, match="could not be listed yet"):
            selection.namespaces.serves("a")
        cluster.errors.clear()
        await asyncio.sleep(6)
        assert selection.served == "a"


async def test_a_list_that_fails_later_leaves_the_namespaces_as_they_were() -> None:
    selection = Selection(cluster := LabelledCluster(A, B, labelled="a"))

    async with selection.running():
        cluster.errors[LISTED] = ApiRefused("403 the operator may not list namespaces")
        await selection.label("b")
        assert selection.served == "a"
        cluster.errors.clear()
        await asyncio.sleep(6)
        assert (selection.served, selection.enqueued) == ("b", [A, B])


async def test_jobs_that_could_not_be_listed_are_enqueued_later() -> None:
    selection = Selection(cluster := LabelledCluster(A, B, labelled=""))
    cluster.errors["list_jobs", JobKey("a", "")] = ApiUnavailable("503")

    async with selection.running():
        await selection.label("ab")
        assert (selection.served, selection.enqueued) == ("ab", [])
        cluster.errors.clear()
        await asyncio.sleep(6)
        assert selection.enqueued == [A, B]


async def test_the_loop_runs_jobs_of_selected_namespaces_only_until_their_label_comes() -> None:
    loop = make_loop(cluster := LabelledCluster(A, B, labelled="a"), namespace_selector=SELECTOR, idle_interval=60)
    stop = asyncio.Event()
    running = asyncio.create_task(loop.run(stop))
    for key in (A, B):
        loop.enqueue(key)
    await asyncio.sleep(3)

    assert cluster.jobs[A]["status"]["operator"] == OURS.to_wire()
    assert "status" not in cluster.jobs[B]
    assert {key for name, key in cluster.calls if name == "apply"} == {A}
    assert list(loop.job_states()) == [A]

    cluster.labelled.add("b")
    loop.namespaces.changed()
    await asyncio.sleep(3)
    stop.set()
    await running

    assert cluster.jobs[B]["status"]["operator"] == OURS.to_wire()


async def test_an_accepted_job_is_reconciled_without_the_label_and_one_that_waits_is_released() -> None:
    loop = make_loop(cluster := LabelledCluster(A, B, labelled="ab"), namespace_selector=SELECTOR)
    suspended = {**cluster.jobs[B]["spec"], "runPolicy": {"suspend": True}}
    cluster.jobs[B] = {**cluster.jobs[B], "spec": suspended}
    for key in (A, B):
        loop.enqueue(key)
    await run_for(loop, 2)
    cluster.labelled.clear()
    await run_for(loop, 2)

    assert [await loop.reconcile(key) for key in (A, B)] == ["ok", "left"]
    assert cluster.jobs[A]["status"]["operator"] == OURS.to_wire()
    assert "operator" not in cluster.jobs[B]["status"]
    assert cluster.jobs[B]["status"]["phase"] == "Suspended"
    assert cluster.events[-1] == Reason.NAMESPACE_NOT_SERVED
    assert list(loop.job_states()) == [A]
