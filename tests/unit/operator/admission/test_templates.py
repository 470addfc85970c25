"""The webhook and templates: it checks the completed spec, and leaves a missing template to the operator."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ppojob_operator.api_server import ApiUnavailable
from tests.bad_templates import BAD_TOGETHER, JOB, TEMPLATE, BadTogether
from tests.unit.operator.admission.conftest import CLAIM, FakeCluster, job, review
from tests.unit.operator.admission.test_admission_endpoint import ACCEPTED, Asking

PIN = {"kind": "PPOJobTemplate", "name": "gpus", "uid": "t-1", "generation": 1, "spec": TEMPLATE["spec"]}


@pytest.fixture
async def ask(cluster: FakeCluster) -> AsyncIterator[Asking]:
    cluster.objects["PersistentVolumeClaim", "rl-team", "ppojob-data"] = CLAIM
    asking = Asking(cluster)
    async with asking.client:
        yield asking


def provide(cluster: FakeCluster, spec: dict[str, Any]) -> None:
    cluster.objects["PPOJobTemplate", "rl-team", "gpus"] = {**TEMPLATE, "spec": spec}


async def test_a_job_is_checked_with_its_template(ask: Asking, cluster: FakeCluster) -> None:
    provide(cluster, TEMPLATE["spec"])

    assert await ask(review(job(JOB["spec"]))) == (True, "", [])
    assert cluster.asked == ["PPOJobTemplate gpus", "PersistentVolumeClaim ppojob-data"]


@pytest.mark.parametrize("bad", BAD_TOGETHER, ids=lambda bad: bad.name)
async def test_a_bad_completed_spec_is_refused(ask: Asking, cluster: FakeCluster, bad: BadTogether) -> None:
    provide(cluster, bad.template_spec())

    allowed, message, _ = await ask(review(job(bad.job_spec())))

    assert not allowed
    assert message.startswith(f"{bad.path}: ")
    assert bad.says in message


async def test_a_missing_template_is_a_warning_because_the_same_apply_may_create_it(ask: Asking) -> None:
    allowed, _, warnings = await ask(review(job(JOB["spec"])))

    assert allowed
    [warning] = warnings
    assert warning.startswith("spec.templateRef.name: 'gpus': there is no such PPOJobTemplate in namespace rl-team")


async def test_a_template_that_cannot_be_read_is_a_warning(ask: Asking, cluster: FakeCluster) -> None:
    cluster.errors.append(ApiUnavailable("503"))

    allowed, _, warnings = await ask(review(job(JOB["spec"])))

    assert allowed
    [warning] = warnings
    assert warning.startswith("spec.templateRef.name: 'gpus': could not check whether it exists")


async def test_an_edit_of_an_accepted_job_is_checked_with_the_template_in_its_status(
    ask: Asking, cluster: FakeCluster
) -> None:
    status = {"conditions": [ACCEPTED], "template": PIN, "startTime": "2026-01-01T00:00:00Z"}
    old = job(JOB["spec"], status)
    more = job({**JOB["spec"], "pools": [{"name": "actor", "nodes": 5}, {"name": "critic"}]}, status)
    fewer = job({**JOB["spec"], "pools": [{"name": "actor", "nodes": 2}, {"name": "critic"}]}, status)

    allowed, message, _ = await ask(review(more, old))
    assert (allowed, message.startswith("spec.pools: 11: PPOJobTemplate gpus allows 8 GPUs")) == (False, True)
    assert (await ask(review(fewer, old)))[0]
    assert "PPOJobTemplate gpus" not in cluster.asked


async def test_the_template_of_an_accepted_job_cannot_change(ask: Asking) -> None:
    status = {"conditions": [ACCEPTED], "template": PIN}
    other = job({**JOB["spec"], "templateRef": {"name": "other"}}, status)

    allowed, message, _ = await ask(review(other, job(JOB["spec"], status)))

    assert not allowed
    assert message.startswith("spec.templateRef: cannot change once the job is accepted")
