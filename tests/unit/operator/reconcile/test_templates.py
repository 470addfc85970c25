"""A job with a template: it waits for it, is completed with it, and keeps it whatever becomes of the template."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile.states import State
from tests.bad_templates import JOB, TEMPLATE
from tests.unit.operator.reconcile.worlds import World


def with_template(template: dict[str, Any] | None, **changes: Any) -> World:
    """Return a world whose job names a template, which may exist or not."""
    world = World()
    world.spec, world.template = {**JOB["spec"], **changes}, template
    return world


def stored(generation: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the template as the API server has it, with parts of its spec replaced."""
    metadata = {"name": "gpus", "namespace": "rl-team", "uid": "t-1", "generation": generation}
    return {**TEMPLATE, "metadata": metadata, "spec": {**TEMPLATE["spec"], **changes}}


def template_of(**fields: Any) -> dict[str, Any]:
    return {**TEMPLATE["spec"]["template"], **fields}


def condition(world: World, kind: str) -> tuple[str, str, str]:
    found = world.condition(kind)
    return found.status, found.reason, found.message


def test_a_job_waits_for_its_template() -> None:
    world = with_template(None)

    plan = world.look()

    assert (plan.state, plan.next_state) == (State.PENDING, State.PENDING)
    assert world.made == []
    words = "spec.templateRef.name: 'gpus': there is no such PPOJobTemplate in namespace rl-team: create it"
    for kind in (Condition.TEMPLATE_RESOLVED, Condition.ACCEPTED):
        status, reason, message = condition(world, kind)
        assert (status, reason) == ("False", Reason.TEMPLATE_MISSING)
        assert message.startswith(words)
    assert plan.requeue_after is not None
    assert world.said == [Reason.TEMPLATE_MISSING], "one Event, not one for each condition"
    assert "template" not in world.status


def test_a_template_for_all_namespaces_is_named_without_a_namespace() -> None:
    world = with_template(None, templateRef={"kind": "ClusterPPOJobTemplate", "name": "gpus"})

    world.look()

    assert "there is no such ClusterPPOJobTemplate: create it" in condition(world, Condition.ACCEPTED)[2]


def test_it_is_accepted_when_the_template_appears_and_says_which_generation_it_got() -> None:
    world = with_template(None)
    world.look()

    world.template = stored(generation=4)
    world.wait(15).look()

    assert condition(world, Condition.ACCEPTED)[0] == "True"
    status, reason, message = condition(world, Condition.TEMPLATE_RESOLVED)
    assert (status, reason) == ("True", Reason.TEMPLATE_RESOLVED)
    assert message.startswith("PPOJobTemplate gpus, generation 4, completes the spec")
    assert world.said == [Reason.TEMPLATE_MISSING, Reason.TEMPLATE_RESOLVED, Reason.VALID]
    assert world.status["template"] == {
        "kind": "PPOJobTemplate",
        "name": "gpus",
        "uid": "t-1",
        "generation": 4,
        "spec": TEMPLATE["spec"],
    }
    [cluster] = [each for each in world.made if each["kind"] == "RayCluster"]
    assert cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] == "trainer:1"
    assert cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["nodeSelector"] == {"gpu-type": "h200"}


@pytest.mark.parametrize("later", [None, stored(2, template=template_of(image="other:9"))], ids=["deleted", "edited"])
def test_later_changes_of_the_template_change_no_accepted_job(later: dict[str, Any] | None) -> None:
    world = with_template(stored())
    world.look()

    world.template = later
    plan = world.wait(15).look()

    job = read_job(world.raw, later)
    assert isinstance(job.spec, PPOJobSpec)
    assert job.spec.image == "trainer:1"
    assert plan.status is None or plan.status["template"]["generation"] == 1
    assert condition(world, Condition.TEMPLATE_RESOLVED)[0] == "True"


def test_an_edit_of_the_job_is_completed_with_the_template_that_it_was_accepted_with() -> None:
    world = with_template(stored())
    world.look()
    world.template = None

    world.edit(pools=[{"name": "actor", "nodes": 2}, {"name": "critic"}])

    job = read_job(world.raw)
    assert isinstance(job.spec, PPOJobSpec)
    assert [(pool.name, pool.gpus) for pool in job.spec.pools] == [("actor", 4), ("critic", 1)]


def test_an_edited_reference_of_an_accepted_job_has_no_effect() -> None:
    """The policy and the webhook refuse it; a cluster may have neither."""
    world = with_template(stored())
    world.look()

    for ref in ({"name": "other"}, None):
        world.edit(templateRef=ref)
        job = read_job(world.raw, stored(9, template=template_of(image="other:9")))
        assert isinstance(job.spec, PPOJobSpec)
        assert job.spec.image == "trainer:1"


def test_a_job_that_was_accepted_without_a_template_gets_none() -> None:
    world = World()
    world.look()

    world.edit(templateRef={"name": "gpus"})

    job = read_job(world.raw, stored())
    assert isinstance(job.spec, PPOJobSpec)
    assert (job.template_ref, job.spec.pools[0].node_selector) == (None, {})


def test_a_template_that_makes_an_invalid_spec_is_named_until_it_is_corrected() -> None:
    world = with_template(stored(template=template_of(telemetry={"prometheusPort": 8265})))

    world.look()

    status, reason, message = condition(world, Condition.ACCEPTED)
    assert (status, reason) == ("False", Reason.INVALID_SPEC)
    assert message.startswith("spec.telemetry.prometheusPort: 8265: this port of the head pod is Ray's own")
    assert message.endswith("(the value is from PPOJobTemplate gpus)")
    assert condition(world, Condition.TEMPLATE_RESOLVED)[0] == "True"
    assert "template" not in world.status

    world.template = stored(2)
    world.wait(15).look()

    assert condition(world, Condition.ACCEPTED)[0] == "True"
    assert world.status["template"]["generation"] == 2


def test_a_job_above_the_limits_is_not_accepted() -> None:
    world = with_template(stored(), pools=[{"name": "actor", "nodes": 5}, {"name": "critic"}])

    world.look()

    assert condition(world, Condition.ACCEPTED)[2].startswith("spec.pools: 11: PPOJobTemplate gpus allows 8 GPUs")


def running() -> World:
    """Return a world in which the trainer of a job with a template reports."""
    return with_template(stored(), pools=[{"name": "actor"}, {"name": "critic"}]).run()


def test_a_running_job_whose_edit_exceeds_the_limits_continues_within_them() -> None:
    world = running()

    world.edit(pools=[{"name": "actor", "nodes": 5}, {"name": "critic"}], runPolicy={"activeDeadlineSeconds": 86_400})
    world.trainer_reports()
    world.look()

    assert world.status["phase"] == "Running"
    status, _, message = condition(world, Condition.LAYOUT_APPLIED)
    assert status == "False"
    assert "allows 8 GPUs" in message
    job = read_job(world.raw)
    assert job.effective is not None
    assert job.effective.run_policy.active_deadline_seconds == 3600


def test_a_queue_of_the_template_gives_way_to_the_label_of_the_job() -> None:
    queued = stored(template=template_of(runPolicy={"queueName": "theirs"}))
    world = with_template(queued)
    world.labels["kueue.x-k8s.io/queue-name"] = "ours"

    job = read_job(world.raw, queued)

    assert isinstance(job.spec, PPOJobSpec)
    assert job.spec.run_policy.queue_name == "ours"


def test_a_suspended_job_keeps_its_template_too() -> None:
    world = with_template(stored(), runPolicy={"suspend": True})
    world.look()
    assert world.status["phase"] == "Suspended"

    world.template = None
    world.wait(15).look()
    world.edit(runPolicy={"suspend": False}).look()

    assert condition(world, Condition.ACCEPTED)[0] == "True"
    assert "RayCluster" in [each["kind"] for each in world.made]


def test_a_job_that_was_refused_before_it_began_reads_its_template_again() -> None:
    world = with_template(stored(), runPolicy={"suspend": True})
    world.look()

    world.edit(actor={"miniBatchSize": 7})
    world.look()
    assert condition(world, Condition.ACCEPTED)[0] == "False"
    assert "template" not in world.status

    world.template = stored(5)
    world.edit(actor={"miniBatchSize": 8}).look()

    assert world.status["template"]["generation"] == 5


def test_a_retry_runs_with_the_template_of_the_first_run() -> None:
    world = running()
    world.trainer_fails(Reason.REWARD_FAILED, FailureKind.PERMANENT).settle()
    assert world.status["phase"] == "Failed"

    world.template = stored(2, template=template_of(image="other:9"))
    world.ask_for_a_retry().wait(60).settle()

    assert [each["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] for each in world.made] == [
        "trainer:1",
        "trainer:1",
    ]
