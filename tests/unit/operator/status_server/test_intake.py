"""Which reports are taken, and how the others are refused."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import Command
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.status_server import JobIdentity
from ppojob_operator.status_server.intake import parse_report
from ppojob_operator.status_server.writer import ProgressWriter
from tests.unit.operator.status_server.conftest import OPERATOR_VERSION, Send, refusal_of


async def test_a_good_report_is_kept_for_the_status_and_answered(
    send: Send, cluster: Any, writer: ProgressWriter, key: JobIdentity
) -> None:
    reply = await send()

    assert reply.command is Command.NONE
    assert reply.settings
    assert reply.settings.total_steps == 120
    assert await writer.flush(1) == 0
    [(written, status)] = cluster.writes
    assert written == key
    assert status["progress"]["lastUpdateTime"] == "2026-01-31T12:05:00Z"


async def test_a_newer_trainer_may_report_what_this_operator_does_not_know(
    send: Send, cluster: Any, writer: ProgressWriter
) -> None:
    checkpoint = {"step": 1, "path": "/x", "time": "2026-01-31T12:00:00Z", "shards": 8}

    await send(newField=1, checkpoint=checkpoint, trainerVersion="0.4.0")

    assert await writer.flush(1) == 0
    [(_, status)] = cluster.writes
    assert status["checkpoint"]["step"] == 1
    assert status["progress"]["trainerVersion"] == "0.4.0"


@pytest.mark.parametrize("trainer", ["0.1.0", "0.5.0", "1.3.0"])
async def test_a_report_of_a_version_that_is_not_supported_is_refused_with_both(
    send: Send, cluster: Any, writer: ProgressWriter, trainer: str
) -> None:
    refusal = await refusal_of(send(trainerVersion=trainer))

    assert (refusal.status, refusal.reason) == (422, "UnsupportedVersion"), "the trainer continues"
    assert f"the operator has version {OPERATOR_VERSION} and the trainer {trainer}" in refusal.message
    assert await writer.flush(1) == 0
    assert cluster.writes == []


async def test_a_stop_reaches_a_trainer_of_a_version_that_is_not_supported(
    send: Send, cluster: Any, job: dict[str, Any], writer: ProgressWriter
) -> None:
    job["status"]["stop"] = {"attempt": 2, "reason": "Suspending", "time": "2026-01-31T12:00:00Z"}

    reply = await send(trainerVersion="1.3.0")

    assert reply.command is Command.STOP
    assert await writer.flush(1) == 0
    assert cluster.writes == []


@pytest.mark.parametrize("trainer", [None, "0.2.0", "0.3.0-dev", "0.4.1"])
async def test_a_report_of_the_same_version_or_the_next_or_the_one_before_is_taken(
    send: Send, cluster: Any, writer: ProgressWriter, trainer: str | None
) -> None:
    await send(trainerVersion=trainer)

    assert await writer.flush(1) == 0
    [(_, status)] = cluster.writes
    assert status["progress"].get("trainerVersion") == trainer


def advice(**changes: int) -> dict[str, Any]:
    """Return advice on one pool; `changes` replace its size."""
    pool = {"name": "actor", "nodes": 1, "gpusPerNode": 1, **changes}
    return {"pools": [pool], "gpus": 1, "stepTimePercent": 3}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body: "),
        (b"{", "body: "),
        (b"[]", "body: "),
        (b"\xff\xfe", "body: "),
        (b"{}", "uid: Field required; attempt: Field required; activity: Field required; totalSteps: Field required"),
        ({"step": -1}, "step: "),
        ({"step": 10**30}, "step: "),
        ({"step": 2**31}, "step: "),
        ({"totalSteps": 2**31}, "totalSteps: "),
        ({"attempt": 2**31}, "attempt: "),
        ({"number": 2**53}, "number: "),
        ({"phases": 2**53}, "phases: "),
        ({"etaSeconds": 1e30}, "etaSeconds: "),
        ({"step": 3.0}, "step: "),
        ({"step": True}, "step: "),
        ({"checkpoint": {"step": 2**31, "path": "/x", "time": "2026-01-31T12:00:00Z"}}, "checkpoint.step: "),
        ({"checkpoint": {"step": -1, "path": "/x", "time": "2026-01-31T12:00:00Z"}}, "checkpoint.step: "),
        ({"layoutAdvice": [advice(nodes=4097)]}, "layoutAdvice[0].pools[0].nodes: "),
        ({"layoutAdvice": [advice(gpusPerNode=65)]}, "layoutAdvice[0].pools[0].gpusPerNode: "),
        ({"layoutAdvice": [{**advice(), "gpus": 2**31}]}, "layoutAdvice[0].gpus: "),
        ({"layoutAdvice": [{**advice(), "stepTimePercent": 10**30}]}, "layoutAdvice[0].stepTimePercent: "),
        ({"layoutAdvice": [{**advice(), "stepTimePercent": -101}]}, "layoutAdvice[0].stepTimePercent: "),
        ({"activity": "Dreaming"}, "activity: "),
        ({"reward": 10**400}, "reward: "),
        ({"metrics": {"actor/lr": float("inf")}}, "metrics.actor/lr: "),
        ({"metrics": {"actor/lr": float("nan")}}, "metrics.actor/lr: "),
        ({"metrics": {"m" * 254: 1.0}}, "metrics."),
        ({"reward": float("nan")}, "reward: "),
        ({"metrics": {f"m{n}": 1.0 for n in range(65)}}, "metrics: "),
        ({"pools": [{"name": "actor", "busyFraction": 1.5}]}, "pools[0].busyFraction: "),
        ({"firstStepTime": "yesterday"}, "firstStepTime: 'yesterday' is not an RFC 3339 time"),
        ({"firstStepTime": "2026-01-31T12:00:00"}, "firstStepTime: "),
        ({"checkpoint": {"step": 1, "path": "/x", "time": "noon"}}, "checkpoint.time: 'noon'"),
    ],
)
async def test_a_malformed_report_is_refused_with_the_field_that_is_wrong(
    send: Send, body: bytes | dict[str, Any], words: str
) -> None:
    sent = send(body=body) if isinstance(body, bytes) else send(**body)

    refusal = await refusal_of(sent)

    assert (refusal.status, refusal.reason) == (400, "Malformed")
    assert refusal.message.startswith(words)
    assert refusal.message.endswith("send a ProgressReport of ppojob.dev/v1alpha1 as JSON")


async def test_a_job_that_is_gone_is_named(send: Send, cluster: Any) -> None:
    cluster.jobs.clear()

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (404, "JobNotFound")
    assert "rl-team/arithmetic" in refusal.message


async def test_a_report_for_an_earlier_object_of_the_same_name_is_refused(send: Send, job: dict[str, Any]) -> None:
    job["metadata"]["uid"] = "uid-9"

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (409, "OtherObject")


@pytest.mark.parametrize(("attempt", "is_taken"), [(0, False), (1, False), (2, True)])
async def test_an_attempt_that_was_replaced_is_fenced_out(send: Send, attempt: int, is_taken: bool) -> None:
    if is_taken:
        await send(attempt=attempt)
        return

    refusal = await refusal_of(send(attempt=attempt))

    assert (refusal.status, refusal.reason) == (409, "StaleAttempt")
    assert "replaced by attempt 2" in refusal.message


@pytest.mark.parametrize("attempt", [3, 10**9])
async def test_an_attempt_that_has_not_begun_is_refused_and_hides_nothing(
    send: Send, cluster: Any, writer: ProgressWriter, attempt: int
) -> None:
    refusal = await refusal_of(send(attempt=attempt))
    assert (refusal.status, refusal.reason) == (422, "UnknownAttempt"), "409 and 410 would stop a trainer"
    assert refusal.message.startswith(f"attempt {attempt} of PPOJob rl-team/arithmetic has not started")

    await send()
    assert await writer.flush(1) == 0
    [(_, status)] = cluster.writes
    assert status["progress"]["attempt"] == 2


async def test_the_first_report_may_come_before_the_attempt_is_in_the_status(send: Send, job: dict[str, Any]) -> None:
    del job["status"]["attempt"]

    assert (await send(attempt=0)).settings


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
async def test_a_finished_job_takes_no_more_reports(send: Send, job: dict[str, Any], condition: str) -> None:
    job["status"]["conditions"].append({"type": condition, "status": "True"})

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (410, "JobFinished")
    assert condition in refusal.message


@pytest.mark.parametrize("call", ["review_token", "read_job"])
@pytest.mark.parametrize("error", [ApiUnavailable("no answer"), ApiRefused("403 forbidden")])
async def test_an_api_server_that_does_not_answer_lets_the_trainer_continue(
    send: Send, cluster: Any, call: str, error: Exception
) -> None:
    cluster.errors[call] = iter([error])

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.headers) == (503, {"Retry-After": "10"})
    assert "continue training" in refusal.message
    assert (await send()).settings


@pytest.mark.parametrize("number", [0, 1, 16])
async def test_a_report_that_is_older_than_the_stored_one_is_refused(
    send: Send, job: dict[str, Any], number: int
) -> None:
    job["status"]["progress"] = {"attempt": 2, "report": 17}

    refusal = await refusal_of(send(number=number))

    assert (refusal.status, refusal.reason) == (422, "StaleReport"), "409 and 410 would stop a trainer"
    assert refusal.message.startswith(f"report {number} of PPOJob rl-team/arithmetic is older than report 17")


async def test_a_report_that_was_delayed_does_not_replace_a_newer_one_that_is_not_written_yet(
    send: Send, cluster: Any, writer: ProgressWriter
) -> None:
    await send(number=18, step=13)
    assert (await refusal_of(send(number=17))).reason == "StaleReport"

    assert await writer.flush(1) == 0
    assert [status["progress"]["step"] for _, status in cluster.writes] == [13]


@pytest.mark.parametrize(
    "stored", [{"attempt": 1, "report": 99}, {"attempt": 2, "report": 17}, {"attempt": 3, "report": 99}, {}]
)
async def test_a_report_that_is_newer_or_was_sent_twice_is_taken(
    send: Send, job: dict[str, Any], stored: dict[str, int]
) -> None:
    job["status"]["progress"] = stored

    assert (await send()).settings
    assert (await send()).settings


async def test_steps_beyond_the_total_are_taken_because_the_total_may_be_lowered(
    send: Send, cluster: Any, writer: ProgressWriter
) -> None:
    await send(step=150)

    assert await writer.flush(1) == 0
    [(_, status)] = cluster.writes
    assert (status["progress"]["step"], status["progress"]["percentage"]) == (150, 100)


async def test_the_last_report_is_answered_only_once_it_is_written(send: Send, cluster: Any) -> None:
    refusal = await refusal_of(send(activity="Finished"))  # No writer runs.

    assert refusal.status == 503
    assert "send it again" in refusal.message


def test_a_report_without_the_optional_parts_is_a_report() -> None:
    report = parse_report(b'{"uid": "u", "attempt": 0, "activity": "Loading", "totalSteps": 8}')

    assert (report.step, report.metrics, report.checkpoint) == (0, {}, None)
