"""The condition ModelUploaded: what the trainer's reports say of the upload to `checkpoint.exportTo`."""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import RayState
from tests.unit.operator.reconcile.worlds import World

TARGET = "s3://bucket/models"
MODEL = "/data/ppojob/team/products/model"


def world(**checkpoint: str) -> World:
    return World(checkpoint={"exportTo": TARGET, **checkpoint}).run()


def test_a_job_whose_exports_stay_in_the_storage_has_no_such_condition() -> None:
    plain = World().run()

    assert Condition.MODEL_UPLOADED not in [each["type"] for each in plain.status["conditions"]]


def test_before_an_upload_it_is_false_and_no_event_says_so() -> None:
    found = world()

    assert found.verdict(Condition.MODEL_UPLOADED) == ("False", Reason.NOT_UPLOADED)
    assert found.condition(Condition.MODEL_UPLOADED).message == f"no export is uploaded to {TARGET} yet"
    assert Reason.NOT_UPLOADED not in found.said


def test_an_upload_makes_it_true() -> None:
    found = world()

    found.trainer_reports("Finished", 8, modelPath=MODEL, modelAddress=TARGET)
    found.ray_says(RayState.SUCCEEDED).settle()

    assert found.verdict(Condition.MODEL_UPLOADED) == ("True", Reason.UPLOADED)
    assert TARGET in found.condition(Condition.MODEL_UPLOADED).message
    assert found.said.count(Reason.UPLOADED) == 1
    assert found.status["model"] == {"path": MODEL, "address": TARGET}


@pytest.mark.parametrize("reason", [Reason.UPLOAD_FAILED, Reason.UPLOAD_REFUSED])
def test_an_upload_that_failed_leaves_the_job_complete_and_warns(reason: str) -> None:
    found = world()
    failure = {"reason": reason, "message": "the store refuses; fetch it with kubectl ppo model"}

    found.trainer_reports("Finished", 8, modelPath=MODEL, uploadFailure=failure)
    found.ray_says(RayState.SUCCEEDED).settle()

    assert found.verdict(Condition.COMPLETE) == ("True", Reason.TRAINER_SUCCEEDED)
    assert found.status["phase"] == Phase.SUCCEEDED
    assert found.verdict(Condition.MODEL_UPLOADED) == ("False", reason)
    assert found.condition(Condition.MODEL_UPLOADED).message == failure["message"]
    assert found.said.count(reason) == 1


def test_without_the_last_report_it_is_unknown() -> None:
    found = world()

    found.ray_says(RayState.SUCCEEDED).settle()

    assert found.verdict(Condition.COMPLETE) == ("True", Reason.TRAINER_SUCCEEDED)
    assert found.verdict(Condition.MODEL_UPLOADED) == ("Unknown", Reason.REPORTS_MISSING)


def test_a_failed_job_keeps_what_is_known() -> None:
    found = world(export="Each")
    found.trainer_reports(modelPath=MODEL, modelAddress=f"{TARGET}/step-8")
    found.settle()

    found.edit(runPolicy={"activeDeadlineSeconds": 1}).wait(60).settle()

    assert found.status["phase"] == Phase.FAILED
    assert found.verdict(Condition.MODEL_UPLOADED) == ("True", Reason.UPLOADED)
