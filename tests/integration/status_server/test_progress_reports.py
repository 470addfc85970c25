"""Reports with real tokens of real pods, against the real API server, with the rights that the chart gives."""

import asyncio
import base64
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from ppojob_api.v1alpha1.progress import MAX_REPORT_BYTES
from ppojob_operator.status_server.limits import RequestLimits


async def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


async def test_a_report_shows_in_the_columns_of_kubectl(serve: Any, trainer: Any) -> None:
    trainer.set_status(phase="Running", ready="3/3", pools=[{"name": "actor", "desiredNodes": 1, "readyNodes": 1}])
    async with serve() as running:
        status, reply = await running.post(trainer, trainer.token())
        assert (status, reply) == (
            200,
            {
                "command": "None",
                "settings": {
                    "totalSteps": 8,
                    "validateEverySteps": 4,
                    "checkpointEverySteps": 4,
                    "checkpointKeep": 1,
                },
                # As the server of these tests writes.
                "intervalSeconds": 1,
            },
        )
        await until(lambda: "progress" in trainer.status())

    header, row = trainer.kubectl("get", "ppojobs", trainer.name).splitlines()
    assert header.split() == ["NAME", "PHASE", "STEP", "PROGRESS", "REWARD", "READY", "RETRIES", "AGE"]
    assert row.split()[:6] == [trainer.name, "Running", "6", "75", "0.4123", "3/3"]


async def test_reports_and_operator_write_side_by_side(serve: Any, trainer: Any) -> None:
    trainer.set_status(phase="Running", pools=[{"name": "actor", "desiredNodes": 1, "readyNodes": 0}])
    async with serve() as running:
        await running.post(trainer, trainer.token())
        await until(lambda: "progress" in trainer.status())
    trainer.set_status(phase="Running", pools=[{"name": "actor", "desiredNodes": 1, "readyNodes": 1}])

    status = trainer.status()
    assert status["pools"] == [{"name": "actor", "desiredNodes": 1, "readyNodes": 1, "busyFraction": "0.91"}]
    assert status["phase"] == "Running"
    assert status["progress"]["step"] == 6
    fields = trainer.kubectl.json("get", "ppojob", trainer.name, "--show-managed-fields")["metadata"]["managedFields"]
    owners = {entry["manager"]: set(entry["fieldsV1"]["f:status"]) for entry in fields if entry.get("subresource")}
    assert owners["ppojob-progress"] == {"f:progress", "f:metrics", "f:pools"}
    assert owners["ppojob-operator"] == {"f:phase", "f:pools", "f:rayCluster"}


async def test_a_token_for_another_audience_is_refused(serve: Any, trainer: Any) -> None:
    async with serve() as running:
        for audience in ("https://kubernetes.default.svc", "ppojob.dev/other/job/uid"):
            status, answer = await running.post(trainer, trainer.token(audience=audience))
            assert (status, answer["reason"]) == (401, "Unauthenticated")
            assert f"{trainer.audience.rpartition('/')[0]}/UID" in answer["message"]


async def test_a_job_cannot_report_for_another(serve: Any, make_trainer: Any) -> None:
    mine, other = make_trainer(), make_trainer()
    async with serve() as running:
        assert (await running.post(other, mine.token()))[0] == 401
        assert (await running.post(other, mine.token(), uid=mine.job["metadata"]["uid"]))[0] == 401
        # A token for the other job's audience is still bound to a pod of this job.
        status, answer = await running.post(other, mine.token(audience=other.audience))
        assert (status, answer["reason"]) == (403, "Forbidden")
        assert f"only pods of {other.name} report for it" in answer["message"]


async def test_a_token_that_is_not_of_a_pod_is_refused(serve: Any, trainer: Any) -> None:
    async with serve() as running:
        status, answer = await running.post(trainer, trainer.token(is_bound=False))

    assert status == 401
    assert "not a JSON Web Token of a pod's ServiceAccount" in answer["message"]


async def test_a_pod_that_is_not_labelled_with_the_job_is_refused(serve: Any, make_trainer: Any) -> None:
    trainer = make_trainer(labels={"app": "mine"})
    async with serve() as running:
        status, answer = await running.post(trainer, trainer.token())

    assert status == 403
    assert "ppojob.dev/job=None" in answer["message"]


async def test_a_pod_of_an_earlier_attempts_ray_cluster_is_refused(serve: Any, make_trainer: Any) -> None:
    trainer = make_trainer(is_current=False)
    async with serve() as running:
        status, answer = await running.post(trainer, trainer.token())

    assert status == 403
    assert answer["message"].endswith("come from another")


async def test_the_token_of_a_deleted_pod_is_refused_at_once(serve: Any, trainer: Any) -> None:
    token = trainer.token()
    async with serve(token_cache_seconds=60.0) as running:
        assert (await running.post(trainer, token))[0] == 200
        trainer.kubectl("delete", "pod", trainer.pod["metadata"]["name"], "--wait=true")

        status, answer = await running.post(trainer, token)
    assert status == 403
    assert "was deleted or has ended" in answer["message"]


def resign(token: str, key: bytes, **claims: Any) -> str:
    """Return the token with other claims, signed as the API server signs (ES256)."""
    header, payload, _ = token.split(".")
    changed = json.loads(base64.urlsafe_b64decode(payload + "==")) | claims
    encoded = base64.urlsafe_b64encode(json.dumps(changed).encode()).rstrip(b"=").decode()
    private = serialization.load_pem_private_key(key, password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    r, s = decode_dss_signature(private.sign(f"{header}.{encoded}".encode(), ec.ECDSA(hashes.SHA256())))
    signature = base64.urlsafe_b64encode(r.to_bytes(32, "big") + s.to_bytes(32, "big"))
    return f"{header}.{encoded}.{signature.rstrip(b'=').decode()}"


async def test_an_expired_token_is_refused(serve: Any, trainer: Any, signing_key: bytes) -> None:
    token, now = trainer.token(), int(time.time())
    async with serve() as running:
        good = resign(token, signing_key, exp=now + 600)
        assert (await running.post(trainer, good))[0] == 200
        expired = resign(token, signing_key, iat=now - 1200, nbf=now - 1200, exp=now - 600)
        assert (await running.post(trainer, expired))[0] == 401
        assert (await running.post(trainer, token[:-8] + "AAAAAAAA"))[0] == 401


async def test_the_trainers_token_opens_nothing_at_the_api_server(trainer: Any) -> None:
    server = trainer.kubectl("config", "view", "--minify", "--output=jsonpath={.clusters[0].cluster.server}")
    headers = {"Authorization": f"Bearer {trainer.token()}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{server}/api/v1/pods", ssl=False) as answer,
    ):
        assert answer.status == 401


async def test_bodies_that_are_huge_or_malformed_are_refused(serve: Any, trainer: Any) -> None:
    token = trainer.token()
    async with serve() as running:
        for body, status, reason in (
            (b"x" * (MAX_REPORT_BYTES + 1), 413, "TooLarge"),
            (b"{not json", 400, "Malformed"),
            (b"[]", 400, "Malformed"),
        ):
            assert (await running.post(trainer, token, body))[0] == status
            assert (await running.post(trainer, token, body))[1]["reason"] == reason
        status, answer = await running.post(trainer, token, attempt=-1)

    assert status == 400
    assert "attempt: " in answer["message"]
    assert "progress" not in trainer.status()


async def test_an_older_attempt_is_fenced_out_and_a_later_one_refused(serve: Any, trainer: Any) -> None:
    trainer.set_status(attempt=2)
    token = trainer.token()
    async with serve() as running:
        status, answer = await running.post(trainer, token, attempt=1)
        assert (status, answer["reason"]) == (409, "StaleAttempt")
        status, answer = await running.post(trainer, token, attempt=3)
        assert (status, answer["reason"]) == (422, "UnknownAttempt")
        assert (await running.post(trainer, token, attempt=2))[0] == 200


async def test_a_finished_job_takes_no_replay(serve: Any, trainer: Any) -> None:
    token = trainer.token()
    async with serve() as running:
        assert (await running.post(trainer, token, activity="Finished", step=8))[0] == 200
        assert trainer.status()["progress"]["percentage"] == 100
        condition = {"type": "Complete", "status": "True", "reason": "TrainerSucceeded", "message": ""}
        since = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
        trainer.set_status(conditions=[condition | since])

        status, answer = await running.post(trainer, token)

    assert (status, answer["reason"]) == (410, "JobFinished")
    assert trainer.status()["progress"]["percentage"] == 100


async def test_a_job_that_was_re_created_under_the_same_name_gets_nothing_of_the_old_one(
    serve: Any, trainer: Any, manifest: dict[str, Any]
) -> None:
    token = trainer.token()
    # Far longer than this test: what is kept is written at the stop, after the job was re-created.
    async with serve(write_interval_seconds=3600.0) as running:
        assert (await running.post(trainer, token, step=1))[0] == 200
        await until(lambda: "progress" in trainer.status())
        assert (await running.post(trainer, token, step=2))[0] == 200  # Kept for the next write.
        trainer.kubectl("delete", "ppojob", trainer.name)
        assert (await running.post(trainer, token))[0] == 404
        trainer.kubectl.create({**manifest, "metadata": {"name": trainer.name}})

        status, answer = await running.post(trainer, token)
        assert (status, answer["reason"]) == (409, "OtherObject")
        assert running.count("job_gone") == 0
    assert running.count("job_gone") == 1
    assert "progress" not in trainer.status()


async def test_a_burst_of_reports_makes_few_writes_and_the_newest_wins(serve: Any, trainer: Any) -> None:
    token = trainer.token()
    many = RequestLimits(per_second=1000.0, burst=1000)
    async with serve(write_interval_seconds=2.0, requests=many) as running:
        begin, step = time.monotonic(), 0
        while time.monotonic() < begin + 5:
            step += 1
            assert (await running.post(trainer, token, step=step, totalSteps=10_000))[0] == 200
        writes, seconds = running.count("written"), time.monotonic() - begin

    # One at once and one every two seconds: 3 in 5 s. On a slow machine they come later, or the last request is long.
    assert 1 <= writes <= 1 + seconds / 2
    assert step > writes
    assert trainer.status()["progress"]["step"] == step  # The stop wrote what was kept.


async def test_a_restarted_trainer_does_not_wipe_what_the_last_attempt_reached(serve: Any, trainer: Any) -> None:
    token = trainer.token()
    checkpoint = {"step": 4, "path": "/data/x", "time": "2026-01-31T12:00:00Z"}
    async with serve(write_interval_seconds=0.1) as running:
        await running.post(trainer, token, checkpoint=checkpoint, firstValidationReward=0.2)
        await until(lambda: "checkpoint" in trainer.status())
        trainer.set_status(attempt=1)
        loading = {"uid": trainer.job["metadata"]["uid"], "attempt": 1, "activity": "Loading", "totalSteps": 8}
        assert (await running.post(trainer, token, json.dumps(loading)))[0] == 200
        await until(lambda: trainer.status()["progress"]["activity"] == "Loading")

    status = trainer.status()
    assert status["checkpoint"] == checkpoint
    assert status["progress"]["firstValidationReward"] == "0.2"
    assert status["metrics"] == [{"name": "critic/score/mean", "value": "0.4123"}]


async def test_changed_settings_reach_the_trainer_in_the_next_reply(serve: Any, trainer: Any) -> None:
    token = trainer.token()
    async with serve() as running:
        await running.post(trainer, token)
        patch = {"spec": {"trainer": {"totalSteps": 12}, "checkpoint": {"everySteps": 2}}}
        trainer.kubectl("patch", "ppojob", trainer.name, "--type=merge", f"--patch={json.dumps(patch)}")
        _, reply = await running.post(trainer, token)

    assert reply["settings"]["totalSteps"] == 12
    assert reply["settings"]["checkpointEverySteps"] == 2


async def test_a_checkpoint_that_somebody_asks_for_is_answered_once(serve: Any, trainer: Any) -> None:
    token, moment = trainer.token(), "2026-01-31T12:00:00Z"
    submitted = {"type": "Submitted", "status": "True", "reason": "TrainerSubmitted", "message": "attempt 0"}
    trainer.set_status(conditions=[{**submitted, "lastTransitionTime": moment, "observedGeneration": 1}])
    where = ("--namespace", trainer.kubectl.namespace, "--timeout", "240")
    plugin = (sys.executable, "-m", "ppojob_trainer.kubectl.app", "checkpoint", trainer.name, *where)
    async with serve(write_interval_seconds=0.1) as running:
        await running.post(trainer, token, checkpoint={"step": 4, "path": "/data/step-4", "time": moment})
        await until(lambda: "checkpoint" in trainer.status())
        asking = await asyncio.create_subprocess_exec(*plugin, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(240):
            while (request := (await running.post(trainer, token))[1].get("checkpointRequest")) is None:
                await asyncio.sleep(0.5)
        answer = {"step": 7, "path": "/data/step-7", "time": moment, "request": request}
        await running.post(trainer, token, step=7, checkpoint=answer)
        printed, _ = await asking.communicate()
        _, reply = await running.post(trainer, token, step=8, checkpoint=answer)

    assert asking.returncode == 0
    assert printed.decode().endswith(f"{trainer.name}: checkpoint of step 7: /data/step-7\n")
    assert "checkpointRequest" not in reply


async def test_replicas_share_the_certificates_of_one_secret(serve: Any, trainer: Any) -> None:
    token = trainer.token()
    async with serve() as first, serve() as second:
        assert first.server.ca_bundle() == second.server.ca_bundle()
        assert (await second.post(trainer, token))[0] == 200


@pytest.mark.parametrize(
    ("right", "has"),
    [
        ("get secrets/ppojob-certificates", True),
        ("get secrets/another", False),
        ("get secrets/ppojob-dashboard-key", True),
        ("update secrets/ppojob-dashboard-key", False),
        ("list secrets", False),
        # As a dry run alone: `test_admission_policy`.
        ("create pods", True),
        ("delete pods", False),
        ("update ppojobs", False),
        ("patch ppojobs", False),
        ("patch ppojobs --subresource=status", True),
        ("create tokenreviews.authentication.k8s.io", True),
        ("create rolebindings.rbac.authorization.k8s.io", False),
        ("impersonate serviceaccounts", False),
        ("create pods --subresource=exec", False),
    ],
)
def test_the_operators_account_may_do_what_it_must_and_no_more(
    operator: Any, kubectl: Any, right: str, has: bool
) -> None:
    account = f"--as=system:serviceaccount:{operator.namespace}:ppojob"

    answer = kubectl.run("auth", "can-i", *right.split(), account)

    assert answer.stdout.strip() == ("yes" if has else "no"), answer.stderr
