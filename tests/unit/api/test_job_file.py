"""job.json: the same job gives the same text and hash, and the text gives the job."""

import pytest

from ppojob_api.v1alpha1.resolve import JobFile, Reporting, resolve
from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_api.v1alpha1.validation import parse_manifest
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
def test_with_resume_never_a_job_has_checkpoints_of_its_own_and_resumes_from_them(
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
