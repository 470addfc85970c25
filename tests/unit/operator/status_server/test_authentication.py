"""Whose reports are taken: tokens, their claims and reviews, accounts and pods."""

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import Command, progress_audience
from ppojob_operator.api_server import ApiUnavailable
from ppojob_operator.status_server import JobIdentity, TokenIdentity, authentication
from ppojob_operator.status_server.authentication import TokenReviews
from ppojob_operator.status_server.refusals import Refusal
from tests.unit.operator.status_server.conftest import SOURCE, TOKEN, Clock, Send, make_token, refusal_of


def pod_claim(namespace: str = "rl-team", **pod: str) -> dict[str, Any]:
    """Return the claim that says which pod a token is for."""
    return {"namespace": namespace, "pod": pod}


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("x", "not a JSON Web Token"),
        ("a.b", "not a JSON Web Token"),
        ("..", "not a JSON Web Token"),
        ("a.b.c.d", "not a JSON Web Token"),
        ("a.%%%%.c", "not a JSON Web Token"),
        (f"a.{'W' * 4000}.c", "not a JSON Web Token"),
        (make_token(aud=None), "not a JSON Web Token"),
        (make_token(aud=7), "not a JSON Web Token"),
        (make_token(exp=None), "not a JSON Web Token"),
        (make_token(exp=float("nan")), "not a JSON Web Token"),
        (make_token(exp=1), "has expired"),
        (make_token(aud=["https://kubernetes.default.svc"]), "not for an audience ppojob.dev/rl-team/arithmetic/UID"),
        (make_token(aud=["ppojob.dev/rl-team/arithmetic/"]), "not for an audience"),
        (make_token(aud=["ppojob.dev/rl-team/arithmetic-2/uid-1"]), "not for an audience"),
        (make_token(kubernetes=None), "not a JSON Web Token"),
        (make_token(kubernetes={"namespace": "rl-team"}), "not a JSON Web Token"),
        (make_token(kubernetes=pod_claim(name="", uid="pod-1")), "not a JSON Web Token"),
        (
            make_token(kubernetes=pod_claim("elsewhere", name="arithmetic-head", uid="pod-1")),
            "not of a pod in namespace",
        ),
    ],
)
async def test_a_token_that_its_own_claims_rule_out_is_refused_without_a_review(
    send: Send, cluster: Any, token: str, words: str
) -> None:
    refusal = await refusal_of(send(header=f"Bearer {token}"))

    assert (refusal.status, refusal.reason) == (401, "Unauthenticated")
    assert words in refusal.message
    assert token not in refusal.message.split()
    assert cluster.reviews == 0


async def test_an_audience_may_be_one_text_and_others_may_stand_beside_it(
    send: Send, cluster: Any, identity: TokenIdentity, key: JobIdentity
) -> None:
    audience = progress_audience(*key)
    for aud in (audience, ["https://other", audience]):
        cluster.tokens[make_token(aud=aud), audience] = identity
        assert (await send(header=f"Bearer {make_token(aud=aud)}")).command is Command.NONE


async def test_a_report_about_another_object_than_the_token_is_refused(send: Send) -> None:
    refusal = await refusal_of(send(uid="uid-2"))

    assert (refusal.status, refusal.reason) == (403, "Forbidden")
    assert "uid 'uid-2'" in refusal.message


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", "Basic dXNlcg==", TOKEN])
async def test_a_request_without_a_token_is_refused(send: Send, cluster: Any, header: str | None) -> None:
    refusal = await refusal_of(send(header=header))

    assert (refusal.status, refusal.headers) == (401, {"WWW-Authenticate": "Bearer"})
    assert cluster.reviews == 0


async def test_a_token_for_another_audience_is_refused_and_not_repeated_in_the_answer(send: Send) -> None:
    refusal = await refusal_of(send(header=f"Bearer {make_token('secret')}"))

    assert (refusal.status, refusal.reason) == (401, "Unauthenticated")
    assert "ppojob.dev/rl-team/arithmetic/uid-1" in refusal.message
    assert make_token("secret") not in refusal.message


async def test_the_token_of_one_job_is_worth_nothing_for_another(send: Send, cluster: Any, job: dict[str, Any]) -> None:
    other = copy.deepcopy(job)
    other["metadata"] |= {"name": "other", "uid": "uid-2"}
    cluster.jobs["rl-team", "other"] = other

    refusal = await refusal_of(send(name="other", uid="uid-2"))

    assert refusal.status == 401


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"audiences": ()}, "not valid"),
        ({"username": "system:serviceaccount:rl-team:default"}, "system:serviceaccount:rl-team:default"),
        ({"username": "system:serviceaccount:elsewhere:arithmetic-trainer"}, "not in namespace rl-team"),
        ({"pod_uid": None}, "not bound to a pod"),
        ({"pod_name": None}, "not bound to a pod"),
        ({"pod_uid": "pod-0"}, "was deleted"),
        ({"pod_name": "no-such-pod"}, "was deleted"),
    ],
)
async def test_a_token_of_somebody_else_is_refused(
    send: Send, cluster: Any, identity: TokenIdentity, key: JobIdentity, change: dict[str, Any], words: str
) -> None:
    cluster.tokens[TOKEN, progress_audience(*key)] = replace(identity, **change)

    refusal = await refusal_of(send())

    assert refusal.status == (401 if "audiences" in change else 403)
    assert words in refusal.message


async def test_a_job_with_a_service_account_of_the_users_is_reported_for_by_that_one_alone(
    send: Send, cluster: Any, job: dict[str, Any], identity: TokenIdentity, key: JobIdentity
) -> None:
    job["spec"]["serviceAccountName"] = "bucket-reader"
    assert (await refusal_of(send())).status == 403

    own = replace(identity, username="system:serviceaccount:rl-team:bucket-reader")
    cluster.tokens[TOKEN, progress_audience(*key)] = own
    # Another token in the same words would be answered from memory.
    cluster.tokens[make_token("second"), progress_audience(*key)] = own

    assert (await send(header=f"Bearer {make_token('second')}")).command is Command.NONE


async def test_the_service_account_may_come_from_the_template(
    send: Send, cluster: Any, job: dict[str, Any], identity: TokenIdentity, key: JobIdentity
) -> None:
    job["status"]["template"] = {"spec": {"template": {"serviceAccountName": "bucket-reader"}}}
    own = replace(identity, username="system:serviceaccount:rl-team:bucket-reader")
    cluster.tokens[TOKEN, progress_audience(*key)] = own

    assert (await send()).command is Command.NONE


@pytest.mark.parametrize(
    ("labels", "phase"),
    [({}, "Running"), ({"ppojob.dev/job": "other"}, "Running"), (None, "Succeeded"), (None, "Failed")],
)
async def test_a_pod_that_is_not_the_jobs_or_has_ended_is_refused(
    send: Send, pod: dict[str, Any], labels: dict[str, str] | None, phase: str
) -> None:
    pod["status"]["phase"] = phase
    if labels is not None:
        pod["metadata"]["labels"] = labels

    assert (await refusal_of(send())).status == 403


def by(*clusters: str) -> list[dict[str, Any]]:
    """Return owner references of a pod."""
    return [{"kind": "RayCluster", "name": name, "controller": True} for name in clusters]


@pytest.mark.parametrize(
    ("label", "owners"),
    [
        ("arithmetic-0f0f0", by("arithmetic-0f0f0")),  # Of an earlier attempt.
        ("arithmetic-1a2b3", by("arithmetic-0f0f0")),
        ("arithmetic-0f0f0", by("arithmetic-1a2b3")),
        ("arithmetic-1a2b3", []),
        ("arithmetic-1a2b3", [{"kind": "ReplicaSet", "name": "arithmetic-1a2b3"}]),
        ("arithmetic-1a2b3", by("arithmetic-1a2b3", "arithmetic-0f0f0")),
        (None, by("arithmetic-1a2b3")),
    ],
)
async def test_a_pod_of_another_ray_cluster_than_the_attempts_is_refused(
    send: Send, pod: dict[str, Any], label: str | None, owners: list[dict[str, Any]]
) -> None:
    pod["metadata"]["labels"]["ray.io/cluster"] = label
    pod["metadata"]["ownerReferences"] = owners

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (403, "Forbidden")
    assert refusal.message.endswith("reports of rl-team/arithmetic come from arithmetic-1a2b3")


async def test_between_two_ray_clusters_nobody_reports_and_an_old_trainer_learns_that_it_was_replaced(
    send: Send, job: dict[str, Any]
) -> None:
    del job["status"]["rayCluster"]

    assert (await refusal_of(send(attempt=1))).reason == "StaleAttempt"
    assert (await refusal_of(send())).status == 403


async def test_a_pod_in_its_grace_period_may_still_report_its_last_checkpoint(send: Send, pod: dict[str, Any]) -> None:
    pod["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"

    assert (await send()).command is Command.NONE


async def test_a_pod_that_is_gone_is_refused_though_its_token_is_remembered(send: Send, cluster: Any) -> None:
    await send()
    cluster.pods.clear()

    assert (await refusal_of(send())).status == 403


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_token_that_went_with_its_deleted_job_is_told_of_the_deletion(
    send: Send, cluster: Any, job: dict[str, Any], is_replaced: bool
) -> None:
    # The ServiceAccount is deleted with the job.
    cluster.tokens.clear()
    if is_replaced:
        job["metadata"]["uid"] = "uid-9"
    else:
        cluster.jobs.clear()

    for _ in range(3):
        assert (await refusal_of(send())).reason == "JobNotFound"

    assert (cluster.reviews, cluster.job_reads) == (1, 1), "a bad token stays cheap"


async def test_a_token_is_reviewed_once_in_a_while(send: Send, cluster: Any, clock: Clock) -> None:
    for clock.now in (0, 30, 59.9):
        await send()
    assert cluster.reviews == 1

    clock.now = 60
    await send()
    assert cluster.reviews == 2


async def test_a_refused_token_is_remembered_for_a_shorter_time(send: Send, cluster: Any, clock: Clock) -> None:
    for clock.now in (0, 9.9, 10.0):
        assert (await refusal_of(send(header=f"Bearer {make_token('bad')}"))).status == 401

    assert cluster.reviews == 2


async def test_a_flood_of_bad_tokens_takes_no_memory_from_good_ones(
    cluster: Any, key: JobIdentity, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "_MAX_CACHED", 16)
    reviews, audience = TokenReviews(cluster, cache_seconds=60, clock=clock), progress_audience(*key)
    assert await reviews.review(TOKEN, audience, SOURCE)

    for number in range(20):
        assert await reviews.review(f"token-{number}", audience, SOURCE) is None
    assert cluster.reviews == 21

    assert await reviews.review(TOKEN, audience, SOURCE)
    assert await reviews.review("token-19", audience, SOURCE) is None
    assert cluster.reviews == 21, "both are remembered"
    assert (len(reviews._good), len(reviews._refused)) == (1, 16)


async def test_a_source_gets_few_reviews_of_bad_tokens_and_others_are_reviewed_still(
    cluster: Any, key: JobIdentity, clock: Clock
) -> None:
    reviews, audience = TokenReviews(cluster, cache_seconds=60, clock=clock), progress_audience(*key)

    async def review(number: int, source: str) -> object:
        return await reviews.review(f"token-{number}", audience, source)

    answers = await asyncio.gather(*(review(number, SOURCE) for number in range(100)), return_exceptions=True)

    refused = [answer for answer in answers if isinstance(answer, Refusal)]
    assert {(refusal.status, refusal.reason) for refusal in refused} == {(429, "TooManyRequests")}
    assert cluster.reviews == 100 - len(refused) == 32
    assert await reviews.review(TOKEN, audience, "10.0.0.2")
    clock.now += 2
    assert await reviews.review(TOKEN, audience, SOURCE)
    assert await review(101, SOURCE) is None


async def test_good_tokens_and_reviews_that_fail_do_not_count_as_bad(
    cluster: Any, key: JobIdentity, identity: TokenIdentity, clock: Clock
) -> None:
    reviews, audience = TokenReviews(cluster, cache_seconds=60, clock=clock), progress_audience(*key)
    cluster.errors["review_token"] = iter([ApiUnavailable("no answer")] * 40)
    for _ in range(40):
        with pytest.raises(ApiUnavailable):
            await reviews.review(TOKEN, audience, SOURCE)

    for number in range(40):
        cluster.tokens[f"good-{number}", audience] = identity
        assert await reviews.review(f"good-{number}", audience, SOURCE)
