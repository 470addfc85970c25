"""Which connection is closed, and which request is refused, if there are too many."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from ppojob_operator.status_server import JobIdentity
from ppojob_operator.status_server.limits import (
    ConnectionLimits,
    Connections,
    JobRequests,
    Rates,
    RequestLimits,
    rates,
)
from ppojob_operator.status_server.refusals import Refusal
from tests.unit.operator.status_server.conftest import Clock


class Port:
    """Connections of a port; `closed` has those that a limit closed, in order."""

    def __init__(self, clock: Clock, **limits: Any) -> None:
        self.closed: list[tuple[str, int]] = []
        self.counts: Counter[str] = Counter()
        self.connections = Connections(ConnectionLimits(**limits), self._count, clock)

    def _count(self, reason: str) -> None:
        self.counts[reason] += 1

    def open(self, source: str, port: int) -> bool:
        return self.connections.open((source, port), lambda: self.closed.append((source, port)))


def test_a_source_with_too_many_connections_loses_its_oldest_and_another_source_none(clock: Clock) -> None:
    port = Port(clock, per_source=2)
    assert port.open("b", 1)

    assert all(port.open("a", number) for number in range(4))

    assert port.closed == [("a", 0), ("a", 1)]
    assert port.counts == {"SourceLimit": 2}


def test_if_all_places_are_taken_the_source_with_the_most_loses_its_oldest(clock: Clock) -> None:
    port = Port(clock, total=4)
    for number in range(3):
        assert port.open("a", number)
    assert port.open("b", 1)

    assert port.open("c", 1)

    assert port.closed == [("a", 0)]
    assert port.counts == {"TotalLimit": 1}


def test_a_connection_whose_sender_is_known_is_never_closed_for_another(clock: Clock) -> None:
    port = Port(clock, per_source=2)
    for number in range(2):
        port.open("a", number)
        port.connections.protect(("a", number))

    assert not port.open("a", 2), "the new one is the only one whose sender is unknown"
    port.connections.closed(("a", 2))
    port.connections.expire(("a", 0))
    port.connections.closed(("a", 0))

    assert port.open("a", 3)
    assert ("a", 0) not in port.closed


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_connection_that_has_ended_makes_room_once(clock: Clock, is_dropped: bool) -> None:
    port = Port(clock, per_source=1)
    port.open("a", 0)
    if is_dropped:
        port.connections.expire(("a", 0))
    for _ in range(2):
        port.connections.closed(("a", 0))

    assert port.open("a", 1)
    assert port.counts == ({"TooSlow": 1} if is_dropped else {})
    assert port.open("a", 2)
    assert port.counts["SourceLimit"] == 1


def test_new_connections_of_a_source_have_a_rate(clock: Clock) -> None:
    port = Port(clock, per_second=1, burst=3)

    assert [port.open("a", number) for number in range(5)] == [True] * 3 + [False] * 2
    assert port.open("b", 0)
    clock.now += 1
    assert [port.open("a", number) for number in (5, 6)] == [True, False]
    assert port.counts == {"SourceRate": 3}


def test_a_refunded_token_can_be_taken_again(clock: Clock) -> None:
    limited = Rates(0.1, 2, clock)
    assert [limited.take("a") for _ in range(3)] == [True, True, False]

    limited.refund("a")

    assert [limited.take("a") for _ in range(2)] == [True, False]


def test_the_memory_of_rates_is_bounded_by_the_keys_that_were_active_recently(clock: Clock) -> None:
    limited = Rates(1, 2, clock)
    for number in range(10 * rates._MIN_KEPT):
        clock.now += 0.01
        assert limited.take(number)

    assert len(limited._buckets) <= rates._MIN_KEPT


def job(name: str, namespace: str = "a") -> JobIdentity:
    return JobIdentity(namespace, name, f"uid-{name}")


@pytest.mark.parametrize(
    ("running", "asked", "status", "words"),
    [
        ([job("x")] * 2, job("x"), 429, "2 requests of job a/x"),
        ([job("x"), job("x"), job("y")], job("z"), 429, "3 requests of namespace a"),
        ([job("x"), job("y"), job("x", "b"), job("x", "c")], job("x", "d"), 503, "the operator is busy"),
        ([job("x"), job("x")], job("y"), None, ""),
        ([job("x"), job("y"), job("z")], job("x", "b"), None, ""),
    ],
)
def test_a_job_and_a_namespace_leave_requests_to_others(
    clock: Clock, running: list[JobIdentity], asked: JobIdentity, status: int | None, words: str
) -> None:
    requests = JobRequests(RequestLimits(total=4, per_namespace=3, per_job=2), clock)
    with ExitStack() as stack:
        for key in running:
            stack.enter_context(requests.running(key))
        if status is None:
            stack.enter_context(requests.running(asked))
        else:
            with pytest.raises(Refusal, match=words) as caught:
                stack.enter_context(requests.running(asked))
            assert caught.value.status == status

    with requests.running(asked):
        assert requests._running[asked] == 1, "requests that have ended do not count"
