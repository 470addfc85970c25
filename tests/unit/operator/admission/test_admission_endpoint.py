"""What the webhook answers: the words of reconcile, warnings, and an error for what it cannot read."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from ppojob_api.v1alpha1.constants import ANNOTATION_OPERATOR, Condition
from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_operator.admission import PATH, AdmissionEndpoint, endpoint
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from tests.bad_specs import BAD_SPECS, BadSpec
from tests.unit.operator.admission.conftest import FakeCluster, job, review
from tests.unit.operator.reconcile.worlds import World, spec

IN_SPEC = [bad for bad in BAD_SPECS if bad.path.startswith("spec.")]
ENDED = {"conditions": [{"type": "Complete", "status": "True", "reason": "TrainerSucceeded", "message": "",
                         "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}]}  # fmt: skip
OWN = OperatorStatus(namespace="system", lease="ppojob-leader", version="2")
HOST_NETWORK = {"podTemplate": {"spec": {"hostNetwork": True}}}


ACCEPTED = {
    "type": "Accepted",
    "status": "True",
    "reason": "Valid",
    "message": "",
    "observedGeneration": 1,
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


class Asking:
    """The API server's side."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.outcomes: list[str] = []
        made = AdmissionEndpoint(cluster, OWN, self.outcomes.append, read_timeout_seconds=0.2)
        self.client = TestClient(TestServer(made.application()))

    async def post(self, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(PATH, data=data) as answer:
            return answer.status, await answer.json()

    async def __call__(self, body: Any) -> tuple[bool, str, list[str]]:
        """Return whether it is allowed, the refusal and the warnings."""
        status, answer = await self.post(body)
        assert status == 200, answer
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response = answer["response"]
        assert response["uid"] == "review-1"
        return response["allowed"], response.get("status", {}).get("message", ""), response.get("warnings", [])


@pytest.fixture
async def ask(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    # The bodies of these tests arrive, on a busy machine too.
    monkeypatch.setattr(endpoint, "_BODY_SECONDS", 120.0)
    asking = Asking(cluster)
    async with asking.client:
        yield asking


async def test_a_good_job_is_allowed_without_a_word(ask: Asking, cluster: FakeCluster) -> None:
    assert await ask(review(job())) == (True, "", [])
    assert cluster.asked == ["PersistentVolumeClaim data"]
    assert ask.outcomes == ["Allowed"]


@pytest.mark.parametrize("bad", IN_SPEC, ids=lambda bad: bad.name)
async def test_every_bad_spec_is_refused_with_path_value_and_remedy(ask: Asking, bad: BadSpec) -> None:
    allowed, message, _ = await ask(review(job(bad.manifest()["spec"])))

    assert not allowed
    for words in (bad.path, bad.says, bad.shows):
        assert words in message
    assert ask.outcomes == ["Refused"]


@pytest.mark.parametrize(
    "changes",
    [{"placement": {"actor": "nowhere"}}, {"head": HOST_NETWORK}, {"env": [{"name": "RAY_ADDRESS", "value": "x"}]}],
    ids=["rule", "template", "environment"],
)
async def test_the_refusal_is_what_the_condition_accepted_would_say(ask: Asking, changes: dict[str, Any]) -> None:
    world = World(**changes)
    world.look()

    _, message, _ = await ask(review(job(spec(**changes))))

    assert message == world.condition(Condition.ACCEPTED).message


async def test_a_claim_is_judged_as_reconcile_does(ask: Asking, cluster: FakeCluster) -> None:
    place = ("PersistentVolumeClaim", "rl-team", "data")
    cluster.objects[place] = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOncePod"]}}
    _, refusal, _ = await ask(review(job()))
    del cluster.objects[place]
    allowed, _, warnings = await ask(review(job()))

    assert refusal.startswith("spec.storage.claimName: 'data': the claim is ReadWriteOncePod, and all pods")
    assert allowed
    assert warnings == [
        "spec.storage.claimName: 'data': there is no such claim in namespace rl-team: create it, or name another"
    ]
    assert ask.outcomes == ["Refused", "Warned"]


async def test_an_object_that_cannot_be_read_is_a_warning_and_names_no_secret(
    ask: Asking, cluster: FakeCluster
) -> None:
    where = "spec.storage.claimName: 'data': could not check whether it exists"
    for error in (ApiUnavailable("503 at 10.0.0.1"), ApiRefused("403 of account x")):
        cluster.errors = [error]
        assert await ask(review(job())) == (
            True,
            "",
            [f"{where} (the API server did not answer, or the operator may not read it)"],
        )
    cluster.before = asyncio.Event().wait
    assert await ask(review(job())) == (True, "", [f"{where} (no answer within 0.2 s)"])


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_dry_run_is_answered_like_any_other_question(ask: Asking, dry_run: bool) -> None:
    questionable = job(spec(checkpoint={"everySteps": 0}))

    allowed, _, [warning] = await ask(review(questionable, dryRun=dry_run))

    assert allowed
    assert warning.startswith("spec.checkpoint.everySteps: 0: no checkpoint is saved before the end")


async def test_an_edit_that_cannot_be_run_is_refused(ask: Asking) -> None:
    pools = [{**each, **HOST_NETWORK} for each in spec()["pools"]]

    allowed, message, _ = await ask(review(job(spec(pools=pools)), job()))

    assert not allowed
    assert message.startswith("spec.pools[0].podTemplate.spec.hostNetwork: True: use network.hostNetwork of the pool")


async def test_an_edit_is_not_refused_for_what_was_there_before(ask: Asking, cluster: FakeCluster) -> None:
    refused_since = {"podTemplate": {"spec": {"hostNetwork": True}}}
    begun = {"startTime": "2026-01-01T00:00:00Z", "conditions": []}
    place = ("PersistentVolumeClaim", "rl-team", "data")
    cluster.objects[place] = {"metadata": {"name": "data"}, "spec": {}, "status": {"phase": "Lost"}}
    suspended = job(spec(head=refused_since, runPolicy={"suspend": True}), begun)

    allowed, _, warnings = await ask(review(suspended, job(spec(head=refused_since), begun)))

    assert allowed
    assert warnings[0].startswith("spec.head.podTemplate.spec.hostNetwork: True")
    worse = job(spec(head=refused_since, image=""), begun)
    allowed, message, _ = await ask(review(worse, job(spec(head=refused_since), begun)))
    assert not allowed
    assert message.startswith("spec.image: ''")


@pytest.mark.parametrize(("conditions", "is_allowed"), [([ACCEPTED], False), ([], True)], ids=["accepted", "new"])
async def test_the_label_of_the_queue_changes_only_before_a_job_is_accepted(
    ask: Asking, cluster: FakeCluster, conditions: list[dict[str, Any]], is_allowed: bool
) -> None:
    cluster.objects["LocalQueue", "rl-team", "other"] = {"metadata": {"name": "other"}}
    old, new = ({"labels": {"kueue.x-k8s.io/queue-name": queue}} for queue in ("gpus", "other"))
    status = {"conditions": conditions}

    allowed, message, _ = await ask(review(job(status=status, **new), job(status=status, **old)))

    assert allowed == is_allowed
    if not is_allowed:
        assert message.startswith("metadata.labels[kueue.x-k8s.io/queue-name]: 'other': the queue cannot change")


@pytest.mark.parametrize(("conditions", "is_allowed"), [([ACCEPTED], False), ([], True)], ids=["accepted", "new"])
async def test_fixed_fields_change_only_before_a_job_is_accepted(
    ask: Asking, conditions: list[dict[str, Any]], is_allowed: bool
) -> None:
    """Also in a cluster without the policy."""
    status = {"conditions": conditions}

    allowed, message, _ = await ask(review(job(spec(trainer={"seed": 7}), status), job(spec(), status)))

    assert allowed == is_allowed
    if not is_allowed:
        assert message.startswith("spec.trainer.seed: 7: cannot change once the job is accepted: create another PPOJob")


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (job(spec(image=""), labels={"team": "rl"}), job(spec(image=""))),
        (job(spec(image=""), deletionTimestamp="2026-01-01T00:00:00Z"), job()),
    ],
    ids=["same spec", "being deleted"],
)
async def test_what_stops_nobody_passes_even_with_a_bad_spec(
    ask: Asking, cluster: FakeCluster, new: dict[str, Any], old: dict[str, Any]
) -> None:
    assert await ask(review(new, old)) == (True, "", [])
    assert cluster.asked == []


async def test_the_log_has_no_words_of_the_spec_and_no_line_of_a_strangers(
    ask: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    await ask(review(job(spec(env=[{"name": "RAY_ADDRESS", "value": "hidden"}])), name="x\nfaked"))
    await ask(review(job(spec(image="", hidden=1))))

    assert "refused CREATE of 'rl-team/x\\nfaked'" in caplog.text
    assert "\nfaked" not in caplog.text
    assert "hidden" not in caplog.text


async def test_a_status_that_only_a_newer_operator_understands_stops_nobody(ask: Asking) -> None:
    newer = {"conditions": [], "moreThanWeKnow": 1}

    allowed, message, _ = await ask(review(job(spec(image=""), newer), job(status=newer)))

    assert not allowed
    assert message.startswith("spec.image: ''")
    assert await ask(review(job(spec(trainer={"totalSteps": 5}), newer), job(status=newer))) == (True, "", [])


async def test_one_review_asks_a_bounded_number_of_questions(ask: Asking, cluster: FakeCluster) -> None:
    names = [{"name": f"V{i}", "valueFrom": {"configMapKeyRef": {"name": f"c{i}", "key": "k"}}} for i in range(100)]

    await ask(review(job(spec(env=names))))

    assert len(cluster.asked) == 32


@pytest.mark.parametrize("broken", [{"metadata": []}, {"metadata": {}}, {"spec": None}, {"spec": "none"}])
async def test_an_object_that_no_api_server_would_send_is_judged_like_any_other(
    ask: Asking, broken: dict[str, Any]
) -> None:
    allowed, message, _ = await ask(review({**job(), **broken}))

    assert allowed == ("metadata" in broken)
    assert bool(message) == ("spec" in broken)


async def test_another_spec_for_a_job_that_has_ended_is_taken_with_a_remark(ask: Asking) -> None:
    allowed, _, warnings = await ask(review(job(spec(trainer={"totalSteps": 5}), ENDED), job(status=ENDED)))

    assert allowed
    assert warnings == [
        "the job has ended, and a change of its spec has no effect until `kubectl ppo retry` runs it again"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": {"group": "", "version": "v1", "kind": "Pod"}},
        {"kind": {"group": "ppojob.dev", "version": "v2", "kind": "PPOJob"}},
        {"subResource": "status"},
        {"operation": "DELETE", "object": None},
    ],
    ids=["kind", "version", "subresource", "operation"],
)
async def test_a_request_about_something_else_is_allowed_with_a_warning(ask: Asking, changes: dict[str, Any]) -> None:
    allowed, _, [warning] = await ask(review({"spec": {}}, **changes))

    assert allowed
    assert warning == "this webhook validates new and changed PPOJobs only: check the rules of its configuration"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b"[]", "object"),
        (b"\xff", "Invalid JSON"),
        ({}, "apiVersion: Field required"),
        ({**review(job()), "apiVersion": "admission.k8s.io/v1beta1"}, "only admission.k8s.io/v1 AdmissionReview"),
        ({**review(job()), "kind": "Review"}, "only admission.k8s.io/v1 AdmissionReview is supported"),
        ({**review(job()), "request": None}, "request: "),
        (review(job(), uid=""), "request.uid: "),
        (review("no object"), "request.object: "),
    ],
)
async def test_what_cannot_be_read_is_an_error_that_names_the_place(ask: Asking, body: Any, words: str) -> None:
    status, answer = await ask.post(body)

    assert status == 400
    assert words in answer["message"]
    assert ask.outcomes == ["Malformed"]


async def test_a_huge_body_is_refused(ask: Asking) -> None:
    async with ask.client.post(PATH, data=io.BytesIO(b"x" * (8 * 2**20 + 1))) as answer:
        assert answer.status == 413
        assert (await answer.json())["message"] == "the body has more than 8388608 bytes"
    assert ask.outcomes == ["Malformed"]


async def test_only_post_to_the_one_path_is_answered(ask: Asking) -> None:
    for path, status in ((PATH, 405), ("/", 404), ("/metrics", 404)):
        async with ask.client.get(path) as answer:
            assert answer.status == status


@pytest.mark.parametrize(
    "marks",
    [
        {"status": {"operator": {**OWN.to_wire(), "namespace": "other"}}},
        {"annotations": {ANNOTATION_OPERATOR: "other"}},
        {"annotations": {ANNOTATION_OPERATOR: "system/other-leader"}},
    ],
    ids=["status", "annotation", "annotation with a Lease"],
)
async def test_a_job_of_another_operator_is_that_ones_to_judge(
    ask: Asking, cluster: FakeCluster, marks: dict[str, Any]
) -> None:
    bad = spec(placement={"actor": "nowhere"})

    assert await ask(review(job(bad, **marks), job(spec(), **marks))) == (True, "", [])
    assert cluster.asked == []


@pytest.mark.parametrize("requested", ["", "Not a name", "system/", "a/b/c", "-system"])
async def test_an_annotation_that_names_no_operator_is_refused_when_it_is_written(ask: Asking, requested: str) -> None:
    annotated = job(annotations={ANNOTATION_OPERATOR: requested})

    for old in (None, job()):
        allowed, message, _ = await ask(review(annotated, old))
        assert not allowed
        assert f"metadata.annotations[ppojob.dev/operator]: {requested!r}: write the namespace" in message
    assert await ask(review(annotated, annotated)) == (True, "", [])
