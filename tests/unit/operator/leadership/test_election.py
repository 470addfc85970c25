"""One leads, the others wait, and nobody leads on borrowed time. In virtual time."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.leadership import Election, ElectionTimes
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time

TIMES = ElectionTimes(duration=15.0, renew_deadline=10.0, retry_period=2.0)
PLACE = ("system", "leader")
LATEST = TIMES.duration + 1.2 * TIMES.retry_period + 0.1
"""When another one leads at the latest, from the last renewal on."""


class Leases:
    """One Lease in memory, with the API server's way of refusing a race. `cut_off` names who reaches it no longer."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] | None = None
        self.version = 0
        self.cut_off: set[str] = set()
        self.hanging: set[str] = set()
        self.error: Exception | None = None

    def of(self, name: str) -> "Line":
        """Return one replica's line to it."""
        return Line(self, name)

    def store(self, manifest: Any) -> bool:
        self.version += 1
        self.kept = copy.deepcopy({**manifest, "metadata": {**manifest["metadata"], "resourceVersion": self.version}})
        return True

    @property
    def spec(self) -> dict[str, Any]:
        assert self.kept is not None
        spec: dict[str, Any] = self.kept["spec"]
        return spec


class Line:
    """LeasePort of one replica."""

    def __init__(self, leases: Leases, name: str) -> None:
        self._leases = leases
        self._name = name

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if self._name in self._leases.hanging:
            await asyncio.sleep(3600)
        if self._name in self._leases.cut_off:
            raise ApiUnavailable("no route")
        if self._leases.error is not None:
            raise self._leases.error

    async def read(self, collection: str, namespace: str, name: str) -> Any:
        await self._reach()
        assert (collection.rsplit("/", 1)[1], namespace, name) == ("leases", *PLACE)
        return copy.deepcopy(self._leases.kept)

    async def create(self, collection: str, manifest: Any) -> bool:
        await self._reach()
        return self._leases.kept is None and self._leases.store(manifest)

    async def replace(self, collection: str, manifest: Any) -> bool:
        await self._reach()
        kept = self._leases.kept
        assert kept is not None
        is_same = kept["metadata"]["resourceVersion"] == manifest["metadata"]["resourceVersion"]
        return is_same and self._leases.store(manifest)


class Replica:
    """One replica: its election, and whether the leader's work runs."""

    def __init__(self, leases: Leases, name: str) -> None:
        self.election = Election(leases.of(name), PLACE, name, TIMES, clock=now)
        self.stop = asyncio.Event()
        self.works = False
        self.terms = 0
        self.error: Exception | None = None
        self.is_stubborn = False
        self.work_seconds = 0.0

    async def work(self, over: asyncio.Event) -> None:
        self.works, self.terms = True, self.terms + 1
        try:
            while not over.is_set():
                if self.error is not None:
                    raise self.error
                await asyncio.sleep(0.05)
            await asyncio.sleep(self.work_seconds)
        except asyncio.CancelledError:
            if self.is_stubborn:
                await asyncio.sleep(3600)
            raise
        finally:
            self.works = False


@asynccontextmanager
async def running(*replicas: Replica) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(replica.election.run(replica.stop, replica.work)) for replica in replicas]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait for the condition and return how long it took."""
    begin = now()
    while not condition():
        assert now() < begin + seconds, "the condition did not come true"
        await asyncio.sleep(0.01)
    return now() - begin


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
def first(leases: Leases) -> Replica:
    return Replica(leases, "first")


@pytest.fixture
def second(leases: Leases) -> Replica:
    return Replica(leases, "second")


async def test_the_first_leads_and_the_second_stands_by(leases: Leases, first: Replica, second: Replica) -> None:
    async with running(first):
        assert await until(lambda: first.works) < 1
        async with running(second):
            await asyncio.sleep(10 * TIMES.duration)

            assert (first.works, second.works) == (True, False)
            assert (first.election.leads, second.election.leads) == (True, False)
            assert second.election.leader == "first"
            assert first.terms == 1
            assert leases.spec["holderIdentity"] == "first"
            assert leases.spec["leaseTransitions"] == 1


async def test_many_at_once_have_one_leader(leases: Leases) -> None:
    replicas = [Replica(leases, f"replica-{number}") for number in range(8)]
    async with running(*replicas):
        await asyncio.sleep(3 * TIMES.duration)

        assert sum(replica.works for replica in replicas) == 1


async def test_the_follower_leads_when_the_lease_has_not_been_renewed_for_its_duration(
    leases: Leases, first: Replica, second: Replica
) -> None:
    async with running(first):
        await until(lambda: first.works)
        async with running(second):
            await until(lambda: second.election.leader == "first")
            leases.cut_off.add("first")
            cut_at = now()

            await until(lambda: second.works)
            assert TIMES.duration - TIMES.retry_period < now() - cut_at < LATEST
            assert leases.spec["leaseTransitions"] == 2


async def test_a_leader_that_is_cut_off_stops_before_another_one_leads(
    leases: Leases, first: Replica, second: Replica
) -> None:
    async with running(first):
        await until(lambda: first.works)
        async with running(second):
            leases.cut_off.add("first")
            cut_at = now()
            await until(lambda: not first.works)

            assert now() - cut_at <= TIMES.renew_deadline + 0.1
            assert not second.works
            with pytest.raises(ApiUnavailable, match="replica first is not the leader"):
                first.election.check()
            await until(lambda: second.works)
            leases.cut_off.clear()
            await asyncio.sleep(5 * TIMES.duration)
            assert (first.works, second.works) == (False, True)


async def test_calls_that_hang_do_not_make_the_leader_lead_longer(leases: Leases, first: Replica) -> None:
    async with running(first):
        await until(lambda: first.works)
        leases.hanging.add("first")

        assert await until(lambda: not first.works) <= TIMES.renew_deadline + 0.1


async def test_a_process_that_was_frozen_finds_that_it_leads_no_longer(leases: Leases) -> None:
    time = 0.0
    election = Election(leases.of("first"), PLACE, "first", TIMES, clock=lambda: time)
    assert await election._try()
    election.check()

    time = TIMES.renew_deadline  # Nothing ran meanwhile, the renewal neither.

    with pytest.raises(ApiUnavailable):
        election.check()


async def test_a_lease_that_somebody_else_took_ends_the_work_at_once(leases: Leases, first: Replica) -> None:
    async with running(first):
        await until(lambda: first.works)
        assert leases.kept is not None
        leases.store({**leases.kept, "spec": {**leases.spec, "holderIdentity": "third"}})

        assert await until(lambda: not first.works) <= TIMES.retry_period + 0.2
        assert first.election.leader == "third"


async def test_a_short_absence_of_the_api_server_changes_nothing(leases: Leases, first: Replica) -> None:
    async with running(first):
        await until(lambda: first.works)
        leases.error = ApiUnavailable("503")
        await asyncio.sleep(TIMES.renew_deadline / 2)
        leases.error = None
        await asyncio.sleep(5 * TIMES.duration)

        assert (first.works, first.terms) == (True, 1)


async def test_after_a_long_absence_the_same_one_leads_again_without_waiting(leases: Leases, first: Replica) -> None:
    async with running(first):
        await until(lambda: first.works)
        leases.error = ApiUnavailable("503")
        await until(lambda: not first.works)
        leases.error = None

        assert await until(lambda: first.works) < 1.2 * TIMES.retry_period + 0.1
        assert first.terms == 2
        assert leases.spec["leaseTransitions"] == 1


async def test_at_the_end_the_work_ends_gracefully_and_the_next_one_leads_at_once(
    leases: Leases, first: Replica, second: Replica
) -> None:
    first.work_seconds = 3 * TIMES.duration  # Looks in work are finished, and the Lease is renewed meanwhile.
    async with running(first) as [process]:
        await until(lambda: first.works)
        async with running(second):
            first.stop.set()
            await until(process.done, seconds=100)

            assert process.exception() is None
            assert not second.works
            assert leases.spec["holderIdentity"] == ""
            assert await until(lambda: second.works) < 1.2 * TIMES.retry_period + 0.1


async def test_one_that_stands_by_ends_at_once(leases: Leases, first: Replica, second: Replica) -> None:
    async with running(first):
        await until(lambda: first.works)
        async with running(second) as [process]:
            await until(lambda: second.election.leader == "first")
            second.stop.set()

            assert await until(process.done) < 0.1
            assert leases.spec["holderIdentity"] == "first"


async def test_an_error_of_the_work_ends_the_election_and_gives_the_lease_back(leases: Leases, first: Replica) -> None:
    async with running(first) as [process]:
        await until(lambda: first.works)
        first.error = RuntimeError("Kopf ended")
        await until(process.done)

        assert str(process.exception()) == "Kopf ended"
        assert leases.spec["holderIdentity"] == ""


async def test_work_that_does_not_end_is_an_error(leases: Leases, first: Replica) -> None:
    first.is_stubborn = True
    async with running(first) as [process]:
        await until(lambda: first.works)
        leases.cut_off.add("first")
        await until(process.done, seconds=100)

        assert "did not end within 30 s" in str(process.exception())


async def test_a_missing_right_is_said_and_asked_for_again(
    leases: Leases, first: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    leases.error = ApiRefused("403 leases is forbidden")
    async with running(first):
        await until(lambda: "403 leases is forbidden" in caplog.text)
        assert first.election.leader is None
        leases.error = None

        await until(lambda: first.works)
