"""Trainer and operator one version apart: job.json and failures of other versions, recorded with their own code."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import FailureRecord
from ppojob_api.v1alpha1.resolve import JobFile, OtherVersionError
from tests.contracts import COMPATIBLE, FOLDER, INCOMPATIBLE, VERSIONS, messages, with_unknown_fields
from tests.golden.golden_manifests import GOLDEN
from tests.unit.release.test_version import VERSION
from tools.release.contract import KINDS, READ_BY_THE_TRAINER, record
from tools.release.version import newest_release


def jobs(versions: Any) -> list[Path]:
    return sorted(path for version in versions for path in (FOLDER / version / "jobs").glob("*.json"))


def shown(path: Path) -> str:
    return f"{path.parents[1].name}/{path.stem}"


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the scalars in a message by their paths."""
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in leaves(item, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {key: leaf for i, item in enumerate(value) for key, leaf in leaves(item, f"{path}[{i}]").items()}
    return {path: value}


def test_there_are_files_of_the_newest_release_and_of_those_that_are_read() -> None:
    newest = newest_release(Path("CHANGELOG.md").read_text())
    assert newest in VERSIONS, "run `make contract` and commit tests/contracts"
    assert VERSION not in INCOMPATIBLE
    assert COMPATIBLE
    assert set(VERSIONS) >= INCOMPATIBLE
    assert all(jobs([version]) for version in VERSIONS)


@pytest.mark.parametrize("path", jobs(COMPATIBLE), ids=shown)
def test_the_trainer_reads_the_job_of_another_operator_and_loses_no_setting(path: Path) -> None:
    text = path.read_text()

    job = JobFile.decode(text, reader=VERSION)

    sent, read = json.loads(text), job.model_dump(mode="json", by_alias=True)
    assert leaves(sent["spec"]).items() <= leaves(read["spec"]).items()
    assert leaves(sent["reporting"]).items() <= leaves(read["reporting"]).items()
    assert (job.namespace, job.name, job.root) == (sent["namespace"], sent["name"], sent["root"])


@pytest.mark.parametrize("path", jobs(INCOMPATIBLE), ids=shown)
def test_a_job_that_the_trainer_cannot_read_is_refused_with_what_it_does_not_know(path: Path) -> None:
    with pytest.raises(OtherVersionError, match=r"does not know .*spec\.\w+.* use a trainer image of the operator's"):
        JobFile.decode(path.read_text(), reader=VERSION)


@pytest.mark.parametrize("path", jobs(COMPATIBLE), ids=shown)
def test_a_newer_operator_may_say_more_outside_the_spec(path: Path) -> None:
    sent = json.loads(path.read_text())
    newer = {**with_unknown_fields({**sent, "spec": {}}), "spec": sent["spec"]}

    assert JobFile.decode(json.dumps(newer), reader=VERSION) == JobFile.decode(json.dumps(sent), reader=VERSION)


@pytest.mark.parametrize("section", ["", "actor", "data", "pools"])
def test_a_newer_operator_s_field_or_value_in_the_spec_is_refused(section: str) -> None:
    sent = json.loads(jobs(COMPATIBLE)[-1].read_text())
    holder = sent["spec"][section] if section else sent["spec"]
    holder = holder[0] if isinstance(holder, list) else holder
    holder["ofANewerVersion"] = 1
    sent["spec"].setdefault("algorithm", {})["policyLoss"] = "OfANewerVersion"

    with pytest.raises(OtherVersionError) as refused:
        JobFile.decode(json.dumps(sent), reader=VERSION)

    assert "ofANewerVersion" in str(refused.value)
    assert "spec.algorithm.policyLoss: 'OfANewerVersion'" in str(refused.value)


@pytest.mark.parametrize(("place", "message"), messages("FailureRecord"))
def test_the_operator_reads_the_failure_of_another_trainer(place: str, message: dict[str, Any]) -> None:
    own = FailureRecord.model_validate(message)
    mark = own.to_log_line().partition(" ")[0]

    for sent in (message, with_unknown_fields(message)):
        found = FailureRecord.from_log(f"step 3\n{mark} {json.dumps(sent)}\n")
        assert found == own


def test_the_contract_of_this_version_can_be_recorded_and_read(tmp_path: Path) -> None:
    record(Path(), tmp_path)

    assert {path.stem for path in (tmp_path / "jobs").iterdir()} == {
        path.name for path in GOLDEN.iterdir() if (path / "config-map.yaml").exists()
    }
    assert {path.name for path in tmp_path.glob("*.json")} == {
        *(f"{kind}-{n}.json" for kind in KINDS for n in ("full", "least")),
        *(f"reader-{model.__name__}.json" for model in READ_BY_THE_TRAINER),
    }
    for path in (tmp_path / "jobs").iterdir():
        JobFile.decode(path.read_text(), reader=VERSION)
