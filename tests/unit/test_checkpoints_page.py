"""docs/checkpoints.md: its job is accepted as it stands, and what it says of failures is what the product says."""

import re
from pathlib import Path

import pytest
import yaml

from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.checkpoints import BucketError, BucketRefusedError, BucketUnreachableError, CredentialsMissingError
from ppojob_trainer.main.failures import failure_record

PAGE = Path("docs/checkpoints.md").read_text()


def test_the_job_of_the_page_has_its_checkpoints_in_the_bucket() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    secret, manifest = yaml.safe_load_all(block)

    namespace, name, spec = parse_manifest(manifest)

    job = JobFile(namespace=namespace, name=name, uid="u", root="/data/ppojob/default/products", spec=resolve(spec))
    assert job.checkpoints == "s3://my-bucket/checkpoints/products"
    assert spec.env_from == [{"secretRef": {"name": secret["metadata"]["name"]}}]


def test_without_a_path_they_are_in_the_storage() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    _, manifest = yaml.safe_load_all(block)
    del manifest["spec"]["checkpoint"]["path"]
    namespace, name, spec = parse_manifest(manifest)

    job = JobFile(namespace=namespace, name=name, uid="u", root="/data/ppojob/default/products", spec=resolve(spec))

    assert job.checkpoints == "/data/ppojob/default/products/checkpoints"


@pytest.mark.parametrize(
    ("error", "reason", "kind"),
    [
        (BucketRefusedError("there is no such bucket"), "BucketRefused", FailureKind.PERMANENT),
        (CredentialsMissingError("there are no credentials"), "BucketRefused", FailureKind.USER),
        (BucketUnreachableError("it does not answer"), "BucketUnreachable", FailureKind.INFRASTRUCTURE),
    ],
)
def test_a_bucket_that_cannot_be_used_has_its_name_and_kind(error: BucketError, reason: str, kind: FailureKind) -> None:
    record = failure_record(error)

    assert (record.reason, record.kind, record.message) == (reason, kind, str(error))
    assert f"| `{reason}` |" in PAGE
