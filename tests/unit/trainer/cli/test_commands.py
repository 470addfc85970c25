"""The program `ppojob`: what it prints, how it ends, and that it answers at once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from ppojob_api.v1alpha1.versions import own_version
from ppojob_trainer.cli import app
from tests.bad_specs import GOOD, with_changes


def _ppojob(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good PPOJob whose model is in the storage beside the run."""
    (tmp_path / "output" / "storage" / "model").mkdir(parents=True)
    path = tmp_path / "ppojob.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    return path


# validate.


def test_a_good_file_says_what_it_resolves_to(file: Path) -> None:
    result = _ppojob("validate", file, "--set", "algorithm.kl.inReward=true")

    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "good: valid"
    for expected in (
        "role pool GPUs",
        "actor actor 2 (1 node x 2)",
        "rollout actor 2 (1 node x 2)",
        "ref critic 1 (1 node x 1)",
        "critic critic 1 (1 node x 1)",
        "schedule Overlapped",
        "total 3 on CUDA",
        "batch 16 prompts x 1 = 16 sequences a step",
        "updates actor 2 a step (8 prompts each), critic 2 a step (8 prompts each)",
        "steps 100, no validation",
        "checkpoints one every 50, 2 kept",
        "exports after the last step",
    ):
        assert expected in lines


def test_a_bucket_that_cannot_be_used_ends_a_run_before_it_begins(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nowhere/key.json")
    path = "gs://bucket/job"
    assert f"in {path}" in _ppojob("validate", file, "--set", f"checkpoint.path={path}").stdout

    result = _ppojob("run", file, "--set", f"checkpoint.path={path}", "--output", tmp_path / "output")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: checkpoint.path {path} cannot be used: there are no credentials")


def test_validate_shows_the_shares_of_a_mixture() -> None:
    file = "examples/14-mixture/ppojob.yaml"

    assert "products 70.0%, gcd 30.0%" in _ppojob("validate", file).stdout
    assert "products 87.5%, gcd 12.5%" in _ppojob("validate", file, "--set", "data.train.mixture[1].weight=0.1").stdout


def test_warnings_are_printed_and_refuse_nothing(file: Path) -> None:
    result = _ppojob("validate", file, "--set", "checkpoint.everySteps=0")
    fine = _ppojob("validate", file)

    assert result.exit_code == 0
    [warning] = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: spec.checkpoint.everySteps: 0: no checkpoint is saved before the end, so after")
    assert "warning" not in fine.stdout


def test_a_job_without_a_critic_has_no_line_for_it(file: Path) -> None:
    options = ("algorithm.advantageEstimator=GRPO", "rollout.samplesPerPrompt=2", "placement.critic=null")
    result = _ppojob("validate", file, *(part for option in options for part in ("--set", option)))

    assert result.exit_code == 0
    assert "critic" not in result.stdout


def test_a_bad_file_has_every_problem_on_a_line_of_stderr(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        yaml.safe_dump(with_changes({("spec", "pools", 0, "gpusPerNode"): 0, ("spec", "trainer"): {"stepz": 1}}))
    )

    result = _ppojob("validate", path)

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "spec.pools[0].gpusPerNode: 0: Input should be greater than or equal to 1",
        "spec.trainer.stepz: 1: there is no such field: correct its name or remove it",
    ]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    result = _ppojob("validate", tmp_path / "none.yaml")

    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_a_file_can_come_from_standard_input(file: Path) -> None:
    result = CliRunner().invoke(app, ["validate", "-"], input=file.read_text())

    assert result.exit_code == 0


def test_validate_loads_nothing_heavy(file: Path) -> None:
    program = """
        import sys
        sys.argv = ["ppojob", "validate", sys.argv[1]]
        from ppojob_trainer.cli import main
        try:
            main()
        except SystemExit as end:
            print("ended", end.code)
        print("loaded", sorted({"torch", "ray", "vllm", "transformers", "matplotlib", "httpx"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(file)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.stdout.endswith("ended 0\nloaded []\n"), done.stderr


# run.


def test_a_dry_run_says_what_would_run_and_writes_nothing(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "output" / "try"

    result = _ppojob("run", file, "--dry-run", "--output", output)

    assert result.exit_code == 0
    assert f"good, attempt 0, in {output}" in result.stdout
    assert "Overlapped" in result.stdout
    assert not output.exists()


def test_the_folder_has_the_jobs_name(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    result = _ppojob("run", file, "--dry-run", "--attempt", 3)

    assert f"good, attempt 3, in {tmp_path}/output/good" in result.stdout


def test_a_model_that_is_not_here_is_refused_before_anything_starts(file: Path, tmp_path: Path) -> None:
    result = _ppojob("run", file, "--output", tmp_path / "elsewhere" / "try")

    assert result.exit_code == 1
    assert "use --set spec.model.actor.path=<path here>" in result.stderr
    assert not (tmp_path / "elsewhere").exists()


FAKE_MAIN = """
    import os, sys, types
    from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
    class JobFailedError(RuntimeError):
        def __init__(self, record):
            super().__init__(record.message)
            self.record = record
    def run_job(job, *, attempt, stop):
        print("running", job.name, "attempt", attempt, flush=True)
        {body}
    main = types.ModuleType("ppojob_trainer.main")
    main.run_job, main.JobFailedError = run_job, JobFailedError
    sys.modules["ppojob_trainer.main"] = main
    from ppojob_trainer.cli import main as cli
    cli()
"""


def _start(body: str, file: Path, output: Path) -> subprocess.Popen[str]:
    """Start `ppojob run` with a trainer whose body is given; the real one has its own tests."""
    program = textwrap.dedent(FAKE_MAIN).format(body=body)
    command = [sys.executable, "-c", program, "run", str(file), "--output", str(output)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _run(body: str, file: Path, output: Path) -> tuple[int, str, str]:
    with _start(body, file, output) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# Not stop.wait(): the signal's handler sets it in the same thread, and would wait for the lock that is held there.
ASKED_TO_STOP = "import time; any(time.sleep(0.05) for _ in iter(stop.is_set, True))"
FINISHED = "return types.SimpleNamespace(step=8, is_finished=True)"


def test_a_run_ends_with_where_its_files_are(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "output" / "try"
    body = f'os.mkdir(job.root + "/model"); open(job.root + "/metrics.jsonl", "w").close(); {FINISHED}'

    code, out, err = _run(body, file, output)

    assert code == 0, err
    assert "running good attempt 0" in out
    assert "all 8 steps are done" in out
    assert [line.split() for line in out.partition("steps are done\n")[2].splitlines()] == [
        ["metrics", f"{output}/metrics.jsonl"],
        ["logs", f"{output}/logs"],
        ["model", f"{output}/model"],
    ]


def test_a_run_leaves_its_job_file_and_its_log(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "output" / "try"

    _run(FINISHED, file, output)

    assert json.loads((output / "job.json").read_text())["spec"]["schedule"]["mode"] == "Overlapped"
    assert "running good attempt 0" in (output / "logs" / "attempt-0" / "driver.log").read_text()


def test_a_failure_is_its_reason_and_sentence(file: Path, tmp_path: Path) -> None:
    record = (
        'FailureRecord(reason="ModelNotFound", message="no config.json: correct it", kind="Permanent", exit_code=3)'
    )

    code, _, err = _run(f"raise JobFailedError({record})", file, tmp_path / "output" / "try")

    assert code == 3
    assert "error: ModelNotFound: no config.json: correct it\nlogs: " in err
    assert "Traceback" not in err


def test_a_failure_that_nobody_foresaw_has_its_traceback(file: Path, tmp_path: Path) -> None:
    record = 'FailureRecord(reason="TrainerFailed", message="KeyError: 1", kind="User")'

    code, _, err = _run(f"raise JobFailedError({record}) from KeyError(1)", file, tmp_path / "output" / "try")

    assert code == 1
    assert "Traceback" in err
    assert "error: TrainerFailed: KeyError: 1" in err


def _wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    deadline = time.monotonic() + 300
    while text not in process.stdout.readline():
        assert time.monotonic() < deadline, f"waited for {text}"


def test_the_first_interrupt_stops_gracefully(file: Path, tmp_path: Path) -> None:
    body = f'{ASKED_TO_STOP}; print("saved", flush=True); return types.SimpleNamespace(step=5, is_finished=False)'
    with _start(body, file, tmp_path / "output" / "try") as process:
        _wait_for(process, "running")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)

    assert process.returncode == 130
    assert "Ctrl-C again ends the run at once" in err
    assert "saved" in out
    assert "stopped after step 5: the same command resumes" in out


def test_the_second_interrupt_ends_at_once(file: Path, tmp_path: Path) -> None:
    body = f'{ASKED_TO_STOP}; print("saving", flush=True); time.sleep(600)'
    with _start(body, file, tmp_path / "output" / "try") as process:
        _wait_for(process, "running")
        process.send_signal(signal.SIGINT)
        _wait_for(process, "saving")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)

    assert process.returncode not in (0, None)


# The others.


def test_plot_draws_and_names_the_picture(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "critic/score/mean": 0.5}\n')

    result = _ppojob("plot", tmp_path / "metrics.jsonl", "-o", tmp_path / "plot.png")

    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path}/plot.png\n"
    assert (tmp_path / "plot.png").exists()


def test_plot_of_timings_compares_labelled_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "timing_s/step": 2.0, "timing_s/gen": 1.0}\n')

    result = _ppojob("plot", "--timing", tmp_path, tmp_path / "metrics.jsonl", "--label", "a", "--label", "b")

    assert result.exit_code == 0
    assert result.stdout == "timing.png\n"
    assert (tmp_path / "timing.png").exists()


def test_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    result = _ppojob("plot", tmp_path / "none.jsonl", "-o", tmp_path / "plot.png")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path}/none.jsonl does not exist")


def test_a_model_is_prepared_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("ppojob_trainer.models.smollm2.prepare", lambda output: asked.append(output) or output)

    result = _ppojob("prepare-model", "--output", tmp_path / "model")

    assert result.exit_code == 0, result.output
    assert asked == [tmp_path / "model"]


def test_a_model_that_nobody_packaged_is_refused(tmp_path: Path) -> None:
    assert _ppojob("prepare-model", "gpt", "--output", tmp_path).exit_code == 2


def test_the_version_is_the_packages() -> None:
    assert _ppojob("version").stdout == f"{own_version()}\n"


def test_help_names_every_command() -> None:
    text = _ppojob("--help").stdout

    assert all(name in text for name in ("validate", "run", "plot", "prepare-model", "version"))


def test_the_program_is_installed() -> None:
    program = os.path.join(os.path.dirname(sys.executable), "ppojob")

    assert subprocess.run([program, "version"], capture_output=True, timeout=300, check=False).returncode == 0
