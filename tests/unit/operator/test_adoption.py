"""Adopter: a job is ours before anything is made for it, and of another operator's nothing is touched."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import ANNOTATION_OPERATOR, Reason
from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_operator.adoption import Adopter, own_identity
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.plan import EventRecord, Job, JobKey, Manifest
from ppojob_operator.reading import read_job
from ppojob_operator.served_namespaces import ServedNamespaces
from ppojob_operator.settings import Settings
from tests.unit.operator.reconcile.worlds import KEY, UID, spec

OURS = own_identity(Settings(namespace="ours", lease_name="ppojob-leader"))
THEIRS = OperatorStatus(namespace="theirs", lease="ppojob-leader", version="9")
PATIENCE = 120.0


class Lives:
    """An API server with one job, another operator's Lease, and a clock."""

    def __init__(self, owner: OperatorStatus | None = None, requested: str | None = None) -> None:
        self.now = 0.0
        held = {"holderIdentity": "pod_1", "leaseDurationSeconds": 15, "renewTime": "0"}
        self.lease: Manifest | None = {"spec": held}
        self.lease_error: Exception | None = None
        self.event_error: Exception | None = None
        self.is_there = True
        self.status: dict[str, Any] = {} if owner is None else {"operator": owner.to_wire()}
        self.annotations = {} if requested is None else {ANNOTATION_OPERATOR: requested}
        self.writes: list[Mapping[str, Any]] = []
        self.events: list[str] = []
        self.lease_reads: list[tuple[str, str]] = []
        self.clusters: list[Manifest] = []
        self.fetch_job: Manifest | None = None
        self.deleted: list[str] = []
        self.requeued: list[JobKey] = []
        self.namespaces = ServedNamespaces(Settings(), self, self.events.append)  # type: ignore[arg-type]

    @property
    def job(self) -> Job:
        metadata: dict[str, Any] = {"namespace": KEY.namespace, "name": KEY.name, "uid": UID, "generation": 1}
        metadata["annotations"] = self.annotations
        return read_job({"metadata": metadata, "spec": spec(), "status": self.status})

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        self.lease_reads.append((namespace, name))
        if self.lease_error is not None:
            raise self.lease_error
        return self.lease

    async def write_status(self, job: Job, status: Mapping[str, Any]) -> bool:
        self.writes.append(status)
        self.status = dict(status)
        return self.is_there

    async def list_clusters(self, key: JobKey) -> list[Manifest]:
        return self.clusters

    async def read_fetch_job(self, key: JobKey) -> Manifest | None:
        return self.fetch_job

    async def delete_cluster(self, namespace: str, name: str) -> None:
        self.deleted.append(f"RayCluster {name}")

    async def delete_secret(self, namespace: str, name: str) -> None:
        self.deleted.append(f"Secret {name}")

    async def delete_fetch_job(self, key: JobKey) -> None:
        self.deleted.append("fetch")

    def requeue(self, key: JobKey, seconds: float) -> None:
        assert 0 < seconds <= 10
        self.requeued.append(key)

    def lose_the_label(self) -> None:
        """Let the job's namespace match the selector no more."""
        selecting = Settings(namespace_selector={"matchLabels": {"ppojob.dev/enabled": "true"}})
        self.namespaces = ServedNamespaces(selecting, self, self.events.append)  # type: ignore[arg-type]
        self.namespaces._selected = frozenset(("elsewhere",))

    async def emit(self, job: Job, event: EventRecord) -> None:
        self.events.append(event.reason)
        if self.event_error is not None:
            raise self.event_error

    def adopter(self) -> Adopter:
        return Adopter(self, OURS, PATIENCE, self.namespaces, self.requeue, clock=lambda: self.now)  # type: ignore[arg-type]

    def renew(self) -> None:
        """Let the other operator show that it lives."""
        assert self.lease is not None
        self.lease = {"spec": {**self.lease["spec"], "renewTime": str(self.now)}}


async def test_a_job_of_nobody_is_claimed_by_one_write_and_none_follow() -> None:
    lives = Lives()
    adopter = lives.adopter()

    adopted = await adopter.adopt(lives.job)
    assert adopted is not None
    assert adopted.status.operator == OURS
    for _ in range(9):
        assert await adopter.adopt(lives.job) is not None

    assert [status["operator"] for status in lives.writes] == [OURS.to_wire()]
    assert (lives.lease_reads, lives.events, adopter.num_left_alone) == ([], [], 0)


async def test_a_job_of_another_operator_is_reported_once_and_not_written(caplog: pytest.LogCaptureFixture) -> None:
    lives = Lives(THEIRS)
    adopter = lives.adopter()

    for _ in range(60):
        lives.now += 5
        lives.renew()
        assert await adopter.adopt(lives.job) is None

    assert (lives.writes, lives.events, adopter.num_left_alone) == ([], [Reason.OTHER_OPERATOR], 1)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.message.count("is run by the operator in namespace theirs") for record in warnings] == [1]
    assert len(lives.lease_reads) == 30, "at most every ten seconds"
    adopter.forget(KEY)
    assert adopter.num_left_alone == 0


def given_back(lives: Lives) -> None:
    lives.lease = {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": "1"}}


def missing(lives: Lives) -> None:
    lives.lease = None


def silent(lives: Lives) -> None:
    pass


@pytest.mark.parametrize("end", [given_back, missing, silent])
async def test_a_job_is_taken_over_once_its_operator_has_been_gone_for_long(end: Callable[[Lives], None]) -> None:
    lives = Lives(THEIRS)
    adopter = lives.adopter()
    assert await adopter.adopt(lives.job) is None
    end(lives)

    lives.now += 20  # Whatever changed is seen here, and waited for from here on.
    assert await adopter.adopt(lives.job) is None
    lives.now += PATIENCE - 21
    assert await adopter.adopt(lives.job) is None
    lives.now += 21
    assert await adopter.adopt(lives.job) is not None

    assert lives.events == [Reason.OTHER_OPERATOR, Reason.TAKEN_OVER]
    assert lives.status["operator"] == OURS.to_wire()
    assert adopter.num_left_alone == 0


async def test_the_time_since_the_last_read_of_a_lease_is_no_silence_of_its_holder() -> None:
    lives = Lives(THEIRS)
    adopter = Adopter(lives, OURS, 3.0, lives.namespaces, lives.requeue, clock=lambda: lives.now)  # type: ignore[arg-type]
    lives.lease = {"spec": {"holderIdentity": "pod_1", "leaseDurationSeconds": 1}}

    for _ in range(9):
        assert await adopter.adopt(lives.job) is None
        lives.now += 1
    lives.now += 1

    assert await adopter.adopt(lives.job) is not None


async def test_where_the_lease_may_not_be_seen_a_job_is_not_taken_over_but_for_the_annotation() -> None:
    lives = Lives(THEIRS)
    adopter = lives.adopter()
    lives.lease_error = ApiRefused("403 leases is forbidden")
    for _ in range(9):
        lives.now += 300
        assert await adopter.adopt(lives.job) is None

    lives.annotations = {ANNOTATION_OPERATOR: "ours"}

    assert await adopter.adopt(lives.job) is not None
    assert lives.status["operator"] == OURS.to_wire()


async def test_an_api_server_that_does_not_answer_decides_nothing() -> None:
    lives = Lives(THEIRS)
    lives.lease_error = ApiUnavailable("503")

    with pytest.raises(ApiUnavailable):
        await lives.adopter().adopt(lives.job)

    assert (lives.writes, lives.events) == ([], [])


async def test_an_event_that_cannot_be_written_changes_nothing() -> None:
    lives = Lives(THEIRS)
    lives.event_error = ApiRefused("403 events is forbidden")
    adopter = lives.adopter()

    assert [await adopter.adopt(lives.job) for _ in range(3)] == [None] * 3
    assert lives.events == [Reason.OTHER_OPERATOR]


async def test_a_job_that_was_deleted_while_it_was_claimed_is_reconciled_again() -> None:
    lives = Lives()
    lives.is_there = False

    with pytest.raises(ApiUnavailable, match="was deleted or re-created while it was being adopted"):
        await lives.adopter().adopt(lives.job)


@pytest.mark.parametrize("owner", [None, THEIRS])
async def test_of_a_namespace_that_is_not_served_no_job_is_claimed_written_or_taken_over(
    owner: OperatorStatus | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lives = Lives(owner)
    lives.lose_the_label()
    lives.lease = None
    adopter = lives.adopter()

    for _ in range(9):
        lives.now += 300
        assert await adopter.adopt(lives.job) is None

    assert (lives.writes, lives.events, lives.lease_reads, adopter.num_left_alone) == ([], [], [], 0)
    words = "does not match namespaceSelector (ppojob.dev/enabled=true) of the operator in namespace ours"
    assert [words in record.message for record in caplog.records] == [True]


async def test_a_job_that_waits_is_released_once_when_its_namespace_is_not_served_any_more() -> None:
    lives = Lives()
    assert await lives.adopter().adopt(lives.job) is not None
    lives.lose_the_label()
    adopter = lives.adopter()

    assert [await adopter.adopt(lives.job) for _ in range(3)] == [None] * 3

    assert lives.writes[1:] == [{"conditions": []}]
    assert (lives.status.get("operator"), lives.events) == (None, [Reason.NAMESPACE_NOT_SERVED])


def owned_object(name: str, uid: str = UID, **more: Any) -> Manifest:
    return {"metadata": {"name": name, "ownerReferences": [{"uid": uid, "controller": True}], **more}}


async def test_a_job_is_not_released_before_its_ray_clusters_and_its_fetch_are_deleted() -> None:
    lives = Lives(OURS)
    lives.lose_the_label()
    lives.clusters, lives.fetch_job = [owned_object("c")], owned_object("fetch")
    adopter = lives.adopter()

    assert await adopter.adopt(lives.job) is None
    assert lives.deleted == ["Secret c-ray", "RayCluster c", "fetch"]
    deleting = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    lives.clusters, lives.fetch_job = [owned_object("c", **deleting)], None
    assert await adopter.adopt(lives.job) is None
    lives.clusters, lives.fetch_job = [], owned_object("fetch", **deleting)
    assert await adopter.adopt(lives.job) is None
    assert (len(lives.deleted), lives.requeued, lives.writes, lives.events) == (3, [KEY] * 3, [], [])

    lives.fetch_job = None
    assert await adopter.adopt(lives.job) is None
    assert (len(lives.deleted), len(lives.requeued), lives.events) == (3, 3, [Reason.NAMESPACE_NOT_SERVED])


@pytest.mark.parametrize("end", ["Complete", "Failed"])
async def test_a_fetch_that_has_ended_stays_and_does_not_delay_the_release(end: str) -> None:
    lives = Lives(OURS)
    lives.lose_the_label()
    lives.fetch_job = {**owned_object("fetch"), "status": {"conditions": [{"type": end, "status": "True"}]}}

    assert await lives.adopter().adopt(lives.job) is None
    assert (lives.deleted, lives.requeued, lives.events) == ([], [], [Reason.NAMESPACE_NOT_SERVED])


async def test_objects_of_others_with_the_jobs_label_are_not_deleted_and_do_not_delay_the_release() -> None:
    lives = Lives(OURS)
    lives.lose_the_label()
    lives.clusters, lives.fetch_job = [owned_object("c", uid="another")], owned_object("fetch", uid="another")

    assert await lives.adopter().adopt(lives.job) is None
    assert (lives.deleted, lives.requeued, lives.events) == ([], [], [Reason.NAMESPACE_NOT_SERVED])


async def test_a_job_that_is_handed_to_an_operator_that_does_not_serve_it_gets_an_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives = Lives(THEIRS)
    lives.lose_the_label()
    adopter = lives.adopter()
    assert await adopter.adopt(lives.job) is None
    assert lives.events == []

    lives.annotations = {ANNOTATION_OPERATOR: "ours"}
    for _ in range(3):
        assert await adopter.adopt(lives.job) is None

    assert (lives.writes, lives.events) == ([], [Reason.NAMESPACE_NOT_SERVED])
    assert "the annotation ppojob.dev/operator assigns the job to the operator in namespace ours" in caplog.text


class Server:
    """An API server with one job, of which a status is written."""

    def __init__(self, **status: Any) -> None:
        self.current = {"metadata": {"uid": UID}, "status": status}
        self.written: list[Mapping[str, Any]] = []

    async def apply_status(self, namespace: str, name: str, uid: str, *, status_of: Any, manager: str) -> bool:
        self.written.append(status_of(self.current))
        return True


@pytest.mark.parametrize(
    ("before", "now", "is_written"),
    [(None, None, True), (OURS, OURS, True), (None, THEIRS, False), (OURS, THEIRS, False), (OURS, None, False)],
)
async def test_a_status_is_not_written_over_that_of_another_operator(
    before: OperatorStatus | None, now: OperatorStatus | None, is_written: bool
) -> None:
    server = Server(**({} if now is None else {"operator": {**now.to_wire(), "version": "0"}}))
    cluster = Cluster(server, reporter="pod-1")  # type: ignore[arg-type]

    if is_written:
        assert await cluster.write_status(Lives(before).job, {"phase": "Running"})
    else:
        with pytest.raises(
            ApiUnavailable, match="was handed over to another operator while its status was being written"
        ):
            await cluster.write_status(Lives(before).job, {"phase": "Running"})

    assert server.written == ([{"phase": "Running"}] if is_written else [])


async def test_what_a_newer_operator_wrote_is_written_again_with_the_rest() -> None:
    server = Server()
    job = replace(Lives().job, unknown={"verdict": {"word": "new"}})

    await Cluster(server, reporter="pod-1").write_status(job, {"phase": "Running"})  # type: ignore[arg-type]

    assert server.written == [{"verdict": {"word": "new"}, "phase": "Running"}]
