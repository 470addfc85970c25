"""`ppojob plan`: text and JSON of a job whose model is a config.json, its exit codes, and its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from ppojob_trainer.cli import app
from tests.unit.trainer.planning.jobs import raw_job, write_config
from tests.unit.trainer.planning.measured import let_commands_share


@pytest.fixture(autouse=True)
def _share(monkeypatch: pytest.MonkeyPatch) -> None:
    let_commands_share(monkeypatch)


def plan(folder: Path, *options: str, **sections: Any) -> Result:
    spec = raw_job(write_config(folder / "model"), **sections)
    job = {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": {"name": "planned"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return CliRunner().invoke(app, ["plan", str(folder / "job.yaml"), *options])


def test_the_tables(tmp_path: Path) -> None:
    found = plan(tmp_path, "--layouts")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("The job fits.\n")
    for words in (
        "pool all, GB on each H200",
        "actor (stays gathered)",
        "critic (stays gathered)",
        "ref (stays gathered)",
        "rollout (vLLM's share)",
        "while engines generate",
        "most, of 150.1 GB: fits",
        "sequences at once (rollout.maxNumSeqs 1024)",
        "host memory of a pod, GB",
        "on a GPU (CUDA IPC)",
        "seconds of a step",
        "fits: the job as it is",
        "runs on one or two H200s or H100s of one host (docs/measured.md).",
        "error against measured runs (each: --errors)",
        "seconds of a forward pass or an update",
    ):
        assert words in found.output, words


def test_the_error_of_each_measured_run(tmp_path: Path) -> None:
    found = plan(tmp_path, "--errors")
    assert "1.5 B, one pool of two GPUs" in found.output


def test_json_of_a_job_that_does_not_fit(tmp_path: Path) -> None:
    found = plan(tmp_path, "--json", "--gpu", "L40S", rollout={"gpuMemoryUtilization": 0.99})
    assert found.exit_code == 2
    content = json.loads(found.stdout)
    (pool,) = content["pools"]
    assert (content["fits"], pool["fits"], pool["gpu"]) == (False, False, "L40S")
    assert [role["role"] for role in pool["roles"]] == ["actor", "critic", "ref"]
    assert pool["training"] == pytest.approx(sum(role["peak"] for role in pool["roles"]))
    assert any(change.startswith("rollout.gpuMemoryUtilization: ") for change in pool["changes"])
    assert set(content["seconds"]) >= {"gen", "update_actor", "update_critic", "step"}
    assert content["errors"][0].keys() == {"run", "what", "unit", "measured", "planned", "error", "hasExperts"}


def test_a_close_plan_is_visible_and_no_failure(tmp_path: Path) -> None:
    """The planned memory of the small job is nearly that of the engine, and of its processes."""
    found = plan(tmp_path, rollout={"gpuMemoryUtilization": 0.93})
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("The job is close. Pool all is planned at ")
    assert "most, of 150.1 GB: close" in found.output
    assert "  change rollout.gpuMemoryUtilization: 0.8" in found.output


def test_refusals_are_one_line(tmp_path: Path) -> None:
    found = plan(tmp_path, "--set", "model.actor.path=/nowhere")
    assert found.exit_code == 1
    assert "error: spec.model.actor.path: /nowhere: no config.json on this machine. Copy the model's" in found.output
    assert "Traceback" not in found.output


def test_a_network_without_bandwidth_is_refused(tmp_path: Path) -> None:
    found = plan(tmp_path, "--network", "0")

    assert found.exit_code == 2
    assert "'--network'" in found.output
    assert "greater than or equal to" in found.output
