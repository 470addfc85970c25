"""`kubectl ppo logs`, `metrics --steps`, `plot` and `dashboard`: which pod is asked for what."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from ppojob_trainer.telemetry import timing_plot
from tests.unit.trainer.kubectl.conftest import HEAD, MemoryCluster, job

Plugin = Callable[..., Result]
ROOT = "/data/ppojob/team/products"
RECORDS = [{"step": step, "time": 1.0, "critic/score/mean": step / 10, "timing_s/step": 2.0} for step in (1, 2, 3)]
METRICS = "".join(f"{json.dumps(record)}\n" for record in RECORDS).encode()


@pytest.fixture
def running(cluster: MemoryCluster) -> MemoryCluster:
    """A cluster with a job in its third attempt, whose head runs."""
    cluster.objects["ppojobs.ppojob.dev"] = [job(attempt=2, rayCluster={"name": "products-abc"})]
    cluster.objects["pods"] = [HEAD]
    cluster.files[f"{ROOT}/metrics.jsonl"] = METRICS
    return cluster


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ([], f"tail -n 100 {ROOT}/logs/attempt-2/driver.log"),
        (["--role", "critic"], f"tail -n 100 {ROOT}/logs/attempt-2/critic-*.log"),
        (["--role", "critic", "--rank", "1", "-f"], f"tail -n 100 -F {ROOT}/logs/attempt-2/critic-1.log"),
        (["--attempt", "0", "--tail", "5"], f"tail -n 5 {ROOT}/logs/attempt-0/driver.log"),
    ],
)
def test_logs_are_read_in_the_head(running: MemoryCluster, ppo: Plugin, arguments: list[str], end: str) -> None:
    assert ppo("logs", "products", *arguments).exit_code == 0

    (command,) = running.commands
    assert command[:-1] == ("exec", "--namespace=team", "products-head", "--container=ray-head", "--", "sh", "-c")
    assert command[-1].endswith(f"; exec {end}")


def test_a_log_that_is_not_there_ends_with_the_exit_status_of_the_search(running: MemoryCluster, ppo: Plugin) -> None:
    running.exit_status = 44

    assert ppo("logs", "products", "--role", "judge").exit_code == 44


@pytest.mark.parametrize("role", ["../x", "a b", "a;b", "$(x)", ""])
def test_a_role_that_is_no_word_is_refused(running: MemoryCluster, ppo: Plugin, role: str) -> None:
    result = ppo("logs", "products", "--role", role)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: --role {role!r} is not a role: use driver, actor")
    assert running.commands == []


def test_after_the_end_a_pod_reads_the_claim_and_goes(running: MemoryCluster, ppo: Plugin) -> None:
    running.objects["pods"] = []

    assert ppo("logs", "products").exit_code == 0

    (pod,) = running.created
    name = pod["metadata"]["name"]
    assert [command[0] for command in running.commands] == ["create", "wait", "exec", "delete"]
    assert running.commands[2][2:4] == (name, "--container=reader")
    assert running.commands[3][:3] == ("delete", "pod", name)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim", "readOnly": True}
    assert container["volumeMounts"] == [{"name": "storage", "mountPath": "/data", "readOnly": True}]
    assert container["image"] == "trainer:1"
    assert (spec["automountServiceAccountToken"], spec["securityContext"]["runAsNonRoot"]) == (False, True)
    assert spec["activeDeadlineSeconds"] == 900


def test_tensorboard_is_served_by_a_separate_pod_to_the_forwarded_port_alone(
    running: MemoryCluster, ppo: Plugin
) -> None:
    result = ppo("dashboard", "products", "--tensorboard", "--port", "7000")

    assert (result.exit_code, result.stdout) == (0, "http://127.0.0.1:7000\n")
    (pod,) = running.created
    name, (container,) = pod["metadata"]["name"], pod["spec"]["containers"]
    assert [command[0] for command in running.commands] == ["create", "wait", "port-forward", "delete"]
    assert running.commands[2] == ("port-forward", "--namespace=team", f"pod/{name}", "7000:6006")
    serve = ["tensorboard", f"--logdir={ROOT}/tensorboard", "--host=127.0.0.1", "--port=6006"]
    assert container["command"] == serve
    assert container["volumeMounts"][0]["readOnly"]
    assert pod["spec"]["activeDeadlineSeconds"] == 8 * 3600


def test_a_head_that_is_being_deleted_is_not_asked(running: MemoryCluster, ppo: Plugin) -> None:
    running.objects["pods"] = [{**HEAD, "metadata": {**HEAD["metadata"], "deletionTimestamp": "2026-01-31T13:00:00Z"}}]

    ppo("logs", "products")

    assert len(running.created) == 1


def test_a_job_that_has_not_begun_has_no_logs(running: MemoryCluster, ppo: Plugin) -> None:
    running.objects["ppojobs.ppojob.dev"][0]["status"] = {}

    result = ppo("logs", "products")

    assert result.stderr == "error: team/products has not started: see kubectl ppo explain-pending products\n"
    assert running.created == []


def test_the_last_steps_come_from_the_runs_own_file(running: MemoryCluster, ppo: Plugin) -> None:
    result = ppo("metrics", "products", "--steps", "2", "--metric", "critic/score/mean", "--metric", "none")

    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines == [["step", "critic/score/mean", "none"], ["2", "0.2", "-"], ["3", "0.3", "-"]]


def test_all_metrics_can_be_fetched(running: MemoryCluster, ppo: Plugin, tmp_path: Path) -> None:
    target = tmp_path / "all.jsonl"

    assert ppo("metrics", "products", "-o", target).stdout == f"{target}\n"
    assert target.read_bytes() == METRICS


def test_metrics_that_are_not_written_yet_are_an_error_with_their_path(running: MemoryCluster, ppo: Plugin) -> None:
    running.files.clear()

    result = ppo("metrics", "products", "--steps", "1")

    assert (result.exit_code, result.stderr) == (
        1,
        f"error: {ROOT}/metrics.jsonl does not exist: the run has not written it yet\n",
    )


def test_a_picture_is_drawn_from_the_runs_metrics(running: MemoryCluster, ppo: Plugin, tmp_path: Path) -> None:
    target = tmp_path / "plot.png"

    result = ppo("plot", "products", "-o", target)

    assert result.exit_code == 0, result.stderr
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("advice", ["pool critic was 38% busy", ""])
def test_a_picture_of_timings_has_what_the_run_says_of_its_layout(
    running: MemoryCluster, ppo: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: str
) -> None:
    running.files[f"{ROOT}/trace.json"] = b"[]"
    if advice:
        running.files[f"{ROOT}/recommendation.json"] = json.dumps({"recommendation": advice}).encode()
    drawn: list[timing_plot.Timing] = []
    draw = timing_plot._draw
    monkeypatch.setattr(timing_plot, "_draw", lambda timings: drawn.extend(timings) or draw(timings))

    result = ppo("plot", "products", "--timing", "-o", tmp_path / "timing.png")

    assert result.exit_code == 0, result.stderr
    assert [timing.advice for timing in drawn] == [advice]


def test_the_dashboard_is_forwarded_from_the_heads_service(running: MemoryCluster, ppo: Plugin) -> None:
    head = {"head": {"serviceName": "products-abc-head-svc"}}
    running.objects["raycluster.ray.io"] = [{"metadata": {"name": "products-abc"}, "status": head}]

    result = ppo("dashboard", "products", "--port", "9000")

    first, second = result.stdout.splitlines()
    assert first == "http://127.0.0.1:9000"
    assert "get secret products-abc-ray -n team" in second
    assert running.commands == [("port-forward", "--namespace=team", "service/products-abc-head-svc", "9000:8265")]


def test_a_job_without_a_cluster_has_no_dashboard(running: MemoryCluster, ppo: Plugin) -> None:
    del running.objects["ppojobs.ppojob.dev"][0]["status"]["rayCluster"]

    result = ppo("dashboard", "products")

    assert result.stderr == "error: team/products has no RayCluster: it has not started, or has ended\n"


def test_the_storage_of_a_job_with_a_template_is_that_of_the_completed_spec(
    running: MemoryCluster, ppo: Plugin
) -> None:
    running.objects["pods"] = []
    [job] = running.objects["ppojobs.ppojob.dev"]
    template = {"image": "theirs:2", "storage": {"claimName": "theirs", "mountPath": "/mnt"}}
    job["spec"] = {"templateRef": {"name": "gpus"}, "image": "ours:1"}
    job["status"]["template"] = {"spec": {"template": template}}

    assert ppo("logs", "products").exit_code == 0

    (pod,) = running.created
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "ours:1"
    assert container["volumeMounts"][0]["mountPath"] == "/mnt"
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "theirs"
    assert running.commands[2][-1].endswith("/mnt/ppojob/team/products/logs/attempt-2/driver.log")


def test_a_job_whose_template_is_missing_has_no_storage_to_read(running: MemoryCluster, ppo: Plugin) -> None:
    running.objects["pods"] = []
    running.objects["ppojobs.ppojob.dev"][0]["spec"] = {"templateRef": {"name": "gpus"}}

    result = ppo("logs", "products")

    assert result.exit_code == 1
    assert "the template of products is not resolved yet" in result.stderr
