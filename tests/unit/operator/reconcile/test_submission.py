"""The trainer is sent to Ray once, when all is ready, and with what it needs to find its file."""

from dataclasses import replace

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_operator.plan import JobNetwork, Ray, RayState, Surroundings, Trouble
from tests.unit.operator.reconcile.worlds import SURROUNDINGS, UID, World, first_cluster


def ready() -> World:
    """Return a job whose pods are ready, but that was not looked at since."""
    return World().settle().pods_become(ready=True).see(ray=Ray())


def test_the_first_reconcile_creates_everything_that_the_pods_need_in_order() -> None:
    plan = World().look()

    assert [manifest["kind"] for manifest in plan.apply] == ["ServiceAccount", "Secret", "ConfigMap", "RayCluster"]
    assert {manifest["metadata"]["ownerReferences"][0]["uid"] for manifest in plan.apply} == {UID}
    assert plan.submission is None


def test_a_service_account_of_the_users_is_not_made() -> None:
    plan = World(serviceAccountName="bucket-reader").look()

    assert [manifest["kind"] for manifest in plan.apply] == ["Secret", "ConfigMap", "RayCluster"]


def test_the_network_policy_comes_before_the_pods_that_it_guards() -> None:
    network = JobNetwork("ppojob-system", {"app": "operator"})
    plan = World().see(surroundings=replace(SURROUNDINGS, network=network)).look()

    assert plan.apply[0]["kind"] == "NetworkPolicy"
    assert plan.apply[0]["metadata"]["ownerReferences"][0]["uid"] == UID


def test_what_was_made_is_not_made_again() -> None:
    world = World()
    world.look()

    assert world.look().apply == ()


def test_a_reconcile_that_was_cut_short_creates_the_same_objects_again() -> None:
    world = World()

    assert world.plan() == world.plan()


def test_a_config_map_that_is_gone_is_made_again() -> None:
    world = World().settle().see(config=None)

    assert [manifest["kind"] for manifest in world.look().apply] == ["ConfigMap"]


def test_the_trainer_is_sent_once_when_all_is_ready() -> None:
    world = ready()

    plan = world.look()
    assert plan.submission is not None
    assert plan.submission.submission_id == f"ppojob-{UID}-0"
    assert plan.submission.cluster == first_cluster()
    assert world.verdict(Condition.SUBMITTED) == ("True", Reason.TRAINER_SUBMITTED)
    assert world.status["submissionId"] == f"ppojob-{UID}-0"
    assert world.status["phase"] == Phase.STARTING

    assert world.look().submission is None


def test_a_submission_whose_status_was_never_written_is_recognised() -> None:
    world = ready()
    before = world.status
    world.look()
    world.status = before

    plan = world.look()

    assert plan.submission is None
    assert world.verdict(Condition.SUBMITTED) == ("True", Reason.TRAINER_SUBMITTED)


def test_the_entrypoint_names_file_hash_generation_and_attempt() -> None:
    world = ready()

    plan = world.look()

    assert plan.submission is not None
    text = (world.observed.config or {})[constants.JOB_FILE]
    assert plan.submission.entrypoint == (
        "python -m ppojob_trainer.main --job /etc/ppojob/job.json "
        f"--hash {JobFile.digest(text)} --generation 1 --attempt 0"
    )
    assert plan.submission.environment == {"PPOJOB_ATTEMPT": "0"}


def test_the_file_is_brought_up_to_date_in_the_reconcile_that_submits() -> None:
    world = ready()
    world.spec["trainer"], world.generation = {"totalSteps": 7}, 2

    plan = world.look()

    assert [manifest["kind"] for manifest in plan.apply] == ["ConfigMap"]
    text = plan.apply[0]["data"][constants.JOB_FILE]
    assert plan.submission is not None
    assert JobFile.digest(text) in plan.submission.entrypoint
    assert JobFile.model_validate_json(text).spec.trainer.total_steps == 7


def test_the_file_does_not_change_under_a_trainer_that_may_still_wait_for_it() -> None:
    world = ready()
    world.look()

    world.spec["trainer"], world.generation = {"totalSteps": 7}, 2

    assert world.look().apply == ()


def test_a_new_certificate_authority_reaches_a_running_trainer_and_its_file_stays() -> None:
    world = World().run()
    before = (world.observed.config or {})[constants.JOB_FILE]
    world.spec["trainer"], world.generation = {"totalSteps": 7}, 2
    world.see(surroundings=Surroundings(SURROUNDINGS.report_url, "NEW PEM", SURROUNDINGS.dashboard_key))

    plan = world.look()

    assert plan.apply[0]["data"] == {constants.JOB_FILE: before, constants.CA_FILE: "NEW PEM"}
    assert world.look().apply == ()


@pytest.mark.parametrize("ray", [None, Ray(problem="connection refused")])
def test_a_dashboard_that_does_not_answer_is_waited_for(ray: Ray | None) -> None:
    world = ready().see(ray=ray)

    plan = world.look()

    assert plan.submission is None
    assert world.verdict(Condition.SUBMITTED) == ("False", Reason.NOT_SUBMITTED)
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 5


def test_a_dashboard_that_refuses_the_trainer_is_quoted() -> None:
    world = ready().see(last_error="400 runtime_env is wrong")

    world.look()

    assert "400 runtime_env is wrong" in world.condition(Condition.SUBMITTED).message


def test_a_trainer_that_reports_is_running() -> None:
    world = World().run()

    assert world.verdict(Condition.PROGRESSING) == ("True", Reason.TRAINING)
    assert world.status["phase"] == Phase.RUNNING


def test_a_trainer_that_loads_its_models_progresses_and_says_so() -> None:
    world = World().run()

    world.wait(10).trainer_reports("Loading").settle()

    assert world.verdict(Condition.PROGRESSING) == ("True", Reason.STARTING)


def test_a_dashboard_that_falls_silent_makes_progress_unknown_and_not_failed() -> None:
    world = World().run()

    world.see(ray=Ray(problem="no answer within 20 s")).wait(5).settle()

    assert world.verdict(Condition.PROGRESSING) == ("Unknown", Reason.DASHBOARD_UNREACHABLE)
    assert world.status["phase"] == Phase.RUNNING
    assert world.observed.ray is not None


def test_a_trainer_that_says_it_has_finished_is_asked_about_soon() -> None:
    world = World().run()
    assert world.look().requeue_after == 10

    world.wait(5).trainer_reports("Finished").settle()

    assert world.look().requeue_after == 1


def test_a_job_that_ended_well_is_complete_and_gives_its_pods_back() -> None:
    world = World().run()

    world.wait(60).ray_says(RayState.SUCCEEDED).settle()

    assert world.verdict(Condition.COMPLETE) == ("True", Reason.TRAINER_SUCCEEDED)
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.RELEASED)
    assert world.verdict(Condition.PROGRESSING) == ("False", Reason.TRAINER_SUCCEEDED)
    assert world.status["phase"] == Phase.SUCCEEDED
    assert world.status["ready"] == "0/3"
    assert world.status["completionTime"] == "2026-03-01T12:01:20Z"
    assert "rayCluster" not in world.status
    assert world.observed.clusters == ()
    assert world.said[-1] == Reason.TRAINER_SUCCEEDED


def test_the_verdict_is_written_before_the_cluster_is_released() -> None:
    world = World().run()
    world.ray_says(RayState.SUCCEEDED)

    plan = world.plan()

    assert plan.status is not None
    assert plan.delete_clusters == (first_cluster(),)


def test_a_cluster_that_outlived_the_verdict_is_released_later() -> None:
    world = World().run()
    clusters = world.observed.clusters
    world.ray_says(RayState.SUCCEEDED).settle()

    assert world.see(clusters=clusters).look().delete_clusters == (first_cluster(),)


def test_a_finished_job_never_starts_again() -> None:
    world = World().run().ray_says(RayState.SUCCEEDED).settle()
    world.generation = 2

    plan = world.wait(9999).look()

    assert plan.status is None
    assert plan.apply == ()


def test_a_secret_that_the_kubelet_does_not_find_is_created_again() -> None:
    world = (
        World()
        .settle()
        .pods_become(ready=True)
        .pods_become(
            ready=False,
            pool="critic",
            trouble=Trouble(
                Reason.POD_FAILED,
                f'container ray-worker: CreateContainerConfigError: secret "{first_cluster()}-ray" not found',
            ),
        )
    )

    assert [manifest["kind"] for manifest in world.plan().apply] == ["ServiceAccount", "Secret"]


def test_a_pod_with_another_trouble_repairs_no_secret() -> None:
    trouble = Trouble(Reason.POD_FAILED, 'container own: CreateContainerConfigError: secret "own" not found')
    world = World().settle().pods_become(ready=False, pool="critic", trouble=trouble)

    assert world.plan().apply == ()
