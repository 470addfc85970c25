"""Repeated messages about the same attempt are one Event with a count."""

from typing import Any

from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_api.v1alpha1.validation import SpecError
from ppojob_operator.cluster import Cluster
from ppojob_operator.plan import EventRecord, Job, JobKey

SUSPENDED = EventRecord("ClusterSuspended", "somebody suspended it", is_warning=True, action="PoolsReady")


class Events:
    """The Events of an API server, in memory; `races` is how often another one is quicker."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.races = 0
        self.is_expired = False

    async def create(self, collection: str, manifest: dict[str, Any]) -> bool:
        assert collection == "/api/v1/namespaces/{namespace}/events"
        name = manifest["metadata"]["name"]
        return self.kept.setdefault(name, manifest) is manifest

    async def read(self, collection: str, namespace: str, name: str) -> dict[str, Any] | None:
        return None if self.is_expired else self.kept.get(name)

    async def replace(self, collection: str, manifest: dict[str, Any]) -> bool:
        name = manifest["metadata"]["name"]
        if self.races:
            self.races -= 1
            self.kept[name] = {**self.kept[name], "count": self.kept[name]["count"] + 1}
            return False
        self.kept[name] = manifest
        return True


def job(attempt: int = 0) -> Job:
    return Job(JobKey("ns", "x"), "uid-1", 1, SpecError([]), PPOJobStatus(attempt=attempt))


def cluster(events: Events) -> Cluster:
    return Cluster(events, reporter="pod-1")  # type: ignore[arg-type]


async def test_the_same_words_are_counted() -> None:
    events = Events()
    for _ in range(3):
        await cluster(events).emit(job(), SUSPENDED)

    [event] = events.kept.values()
    assert event["count"] == 3
    assert (event["reason"], event["type"]) == ("ClusterSuspended", "Warning")
    assert event["involvedObject"]["uid"] == "uid-1"


async def test_another_attempt_or_other_words_are_another_event() -> None:
    events = Events()
    await cluster(events).emit(job(), SUSPENDED)
    await cluster(events).emit(job(attempt=1), SUSPENDED)
    await cluster(events).emit(job(), EventRecord("PodsReady", "all", is_warning=False, action="PoolsReady"))

    assert [event["count"] for event in events.kept.values()] == [1, 1, 1]


async def test_two_that_count_at_the_same_time_both_count() -> None:
    events = Events()
    await cluster(events).emit(job(), SUSPENDED)
    events.races = 1
    await cluster(events).emit(job(), SUSPENDED)

    assert next(iter(events.kept.values()))["count"] == 3


async def test_an_event_that_expired_meanwhile_is_no_error() -> None:
    events = Events()
    await cluster(events).emit(job(), SUSPENDED)
    events.is_expired = True

    await cluster(events).emit(job(), SUSPENDED)
