"""job.json: the same job gives the same text and hash, and the text gives the job."""

import json

import pytest
from packaging.version import Version

from ppojob_api.v1alpha1.resolve import JobFile, OtherVersionError, Reporting, resolve
from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_api.v1alpha1.versions import semantic_version
from tests.bad_specs import GOOD, with_changes


def _job(seed: int = 1) -> JobFile:
    spec = resolve(parse_manifest(with_changes({("spec", "trainer"): {"seed": seed}}))[2])
    url = "https://ppojob-operator.ppojob-system.svc/report"
    return JobFile(namespace="a", name="b", uid="u", root="/data/x", spec=spec, reporting=Reporting(url=url))


def test_the_text_gives_the_job() -> None:
    assert JobFile.model_validate_json(_job().encode()) == _job()


def test_equal_jobs_have_equal_hashes() -> None:
    assert JobFile.digest(_job().encode()) == JobFile.digest(_job().encode())


def test_other_jobs_have_other_hashes() -> None:
    assert JobFile.digest(_job().encode()) != JobFile.digest(_job(seed=2).encode())


def test_the_hash_is_the_sha256_of_the_text() -> None:
    assert JobFile.digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("path", [None, "s3://bucket/job"])
def test_with_resume_never_a_job_has_separate_checkpoints_and_resumes_from_them(
    path: str | None, reports: bool
) -> None:
    checkpoint = {"resume": "Never", **({"path": path} if path else {})}
    spec = resolve(parse_manifest(with_changes({("spec", "checkpoint"): checkpoint}))[2])
    reporting = Reporting(url="https://operator/report") if reports else None

    job = JobFile(namespace="a", name="b", uid="u", root="/data/x", spec=spec, reporting=reporting)

    # `ppojob run` has the folder that its user gave it, where Never begins each run from the start.
    assert job.resume is (ResumePolicy.AUTO if reports else ResumePolicy.NEVER)
    in_bucket = f"{path}/runs/u" if reports else path
    assert job.checkpoints == (in_bucket if path else "/data/x/checkpoints")


def test_a_local_job_reports_to_nobody() -> None:
    spec = resolve(parse_manifest(GOOD)[2])

    assert "reporting" not in JobFile(namespace="a", name="b", uid="u", root="r", spec=spec).encode()


def test_defaults_are_left_out_so_that_older_trainers_do_not_meet_them() -> None:
    spec = json.loads(_job(seed=2).encode())["spec"]

    assert spec["trainer"] == {"seed": 2, "totalSteps": 100}, "the length is resolved"
    assert "betas" not in spec["actor"]
    assert "rollout" not in spec


def test_a_trainer_that_does_not_know_a_field_names_it_and_both_versions() -> None:
    raw = json.loads(_job().encode()) | {"version": "0.4.0"}
    raw["spec"].setdefault("actor", {})["newField"] = 1

    with pytest.raises(OtherVersionError) as refused:
        JobFile.decode(json.dumps(raw), reader="0.3.0")

    assert str(refused.value) == (
        "this trainer has version 0.3.0 and does not know spec.actor.newField, which the operator (version 0.4.0) sent"
        ": use a trainer image of the operator's version, or remove the fields"
    )


def test_what_a_newer_operator_says_outside_the_spec_is_ignored() -> None:
    raw = json.loads(_job().encode()) | {"colour": "blue"}
    raw["reporting"]["colour"] = "blue"

    assert JobFile.decode(json.dumps(raw), reader="0.3.0") == _job()


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("0.3.0", "0.5.0"), ("0.5.0", "0.3.0"), ("0.5.0-dev", "0.3.9"), ("1.3.0", "0.3.0"), ("0.3.0", "1.3.0")],
)
def test_versions_that_are_further_apart_than_one_minor_version_are_refused_with_both(writer: str, reader: str) -> None:
    raw = json.loads(_job().encode()) | {"version": writer}

    with pytest.raises(OtherVersionError) as refused:
        JobFile.decode(json.dumps(raw), reader=reader)

    assert str(refused.value) == (
        f"the operator has version {writer} and the trainer {reader}: they may differ by one minor version; use a "
        "trainer image of the operator's version"
    )


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("0.3.0", "0.3.0"), ("0.3.0", "0.4.0"), ("0.4.0", "0.3.0"), ("0.3.0", "0.4.0-dev"), ("0.10.0", "0.9.0"),
        ("of-a-fork", "0.3.0"), (None, "0.9.0"),
    ],
)  # fmt: skip
def test_the_version_before_and_the_one_after_are_supported(writer: str | None, reader: str) -> None:
    raw = json.loads(_job().encode()) | ({} if writer is None else {"version": writer})

    assert JobFile.decode(json.dumps(raw), reader=reader) == _job().model_copy(update={"version": writer})


@pytest.mark.parametrize(
    ("installed", "spelled"),
    [
        ("0.3.0", "0.3.0"), ("0.3.0-dev", "0.3.0-dev"), ("0.3.0.dev0", "0.3.0-dev"), ("0.3.0.dev10", "0.3.0-dev.10"),
        ("0.3.0rc1", "0.3.0-rc.1"), ("0.30.0", "0.30.0"),
    ],
)  # fmt: skip
def test_a_version_is_spelled_as_chart_and_images_spell_it(installed: str, spelled: str) -> None:
    assert semantic_version(installed) == spelled
    assert Version(spelled) == Version(installed)
