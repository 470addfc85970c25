"""job.json: the same job gives the same text and hash, and the text gives the job."""

from ppojob_api.v1alpha1.resolve import JobFile, Reporting, resolve
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


def test_a_local_job_reports_to_nobody() -> None:
    spec = resolve(parse_manifest(GOOD)[2])

    assert "reporting" not in JobFile(namespace="a", name="b", uid="u", root="r", spec=spec).encode()
