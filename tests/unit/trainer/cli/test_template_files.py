"""`ppojob validate`, `run` and `plan` with templates: in the job's file, or by `--template`."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from ppojob_trainer.cli import app
from ppojob_trainer.commands.manifest import load
from tests.bad_templates import JOB, TEMPLATE


def ppojob(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def written(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump_all(documents))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return written(tmp_path / "ppojob.yaml", JOB)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return written(tmp_path / "template.yaml", TEMPLATE)


def test_a_template_completes_the_job_from_its_own_file_or_from_the_job_s(
    job: Path, template: Path, tmp_path: Path
) -> None:
    both = written(tmp_path / "both.yaml", TEMPLATE, JOB)

    assert load(job, templates=[template]) == load(both)
    assert load(both).spec.run_policy.backoff_limit == 3


def test_set_changes_the_job_and_takes_precedence(job: Path, template: Path) -> None:
    manifest = load(job, ["runPolicy.backoffLimit=6"], templates=[template])

    assert manifest.spec.run_policy.backoff_limit == 6


def test_the_label_of_a_queue_takes_precedence_over_the_template_s(template: Path, tmp_path: Path) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "ours"}
    job = written(tmp_path / "labelled.yaml", {**JOB, "metadata": {"name": "good", "labels": labels}})

    assert load(job, templates=[template]).spec.run_policy.queue_name == "ours"


@pytest.mark.parametrize("command", [["validate"], ["run", "--dry-run"], ["plan"]], ids=lambda command: command[0])
def test_a_missing_template_is_named_with_the_option(job: Path, command: list[str]) -> None:
    result = ppojob(*command, job)

    assert result.exit_code == 1
    assert result.stderr.startswith("spec.templateRef.name: 'gpus': there is no PPOJobTemplate of this name")


@pytest.mark.parametrize("command", [["validate"], ["run", "--dry-run"]], ids=lambda command: command[0])
def test_commands_take_the_template(
    job: Path, template: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "output" / "storage" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    result = ppojob(*command, job, "--template", template)

    assert (result.exit_code, result.stderr) == (0, "")
    assert "2 (1 node x 2)" in result.stdout


def test_validate_checks_a_file_of_templates_alone(template: Path) -> None:
    result = ppojob("validate", template)

    assert (result.exit_code, result.stdout) == (0, "PPOJobTemplate gpus: valid\n")


def test_a_bad_template_is_named_with_its_field(job: Path, tmp_path: Path) -> None:
    bad = written(tmp_path / "bad.yaml", {**TEMPLATE, "spec": {"template": {"rollout": {}}, "limits": {"maxGPUs": 0}}})

    for result in (ppojob("validate", bad), ppojob("validate", job, "--template", bad)):
        assert result.exit_code == 1
        assert result.stderr.splitlines() == [
            "PPOJobTemplate gpus: spec.template.rollout: {}: there is no such field: correct its name or remove it",
            "PPOJobTemplate gpus: spec.limits.maxGPUs: 0: Input should be greater than or equal to 1",
        ]


def test_a_file_with_something_else_is_no_template(job: Path, template: Path) -> None:
    result = ppojob("validate", job, "--template", job)

    assert result.exit_code == 1
    assert "only; it contains PPOJob good" in result.stderr
    assert "it contains PPOJobTemplate gpus" in ppojob("run", template).stderr
