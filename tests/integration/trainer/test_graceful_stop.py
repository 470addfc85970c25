"""The operator's command stops a real trainer gracefully, and the next attempt resumes there with another layout.

Real processes on CPU, as the operator submits them: Ray, FSDP2, vLLM, the job file with its hash, the reports. Only the
endpoint is a small server, which gives the command when a step is reported; what it reads and says is the contract's.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import Command, FailureRecord, ProgressReply, ProgressReport
from ppojob_api.v1alpha1.resolve import JobFile, Reporting, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator.status_server import refusals
from tests.integration.trainer.runs import ONE_POOL, SPLIT, kill, records_of, reward_of_letters, spec_of

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow, pytest.mark.long]

STEPS = 6
LIMIT_S = 500.0
DELETED_LIMIT_S = 60.0
OF_A_CLUSTER = {"RAY_CLUSTER_NAME": "tiny-1a2b3"}


class Endpoint(http.server.ThreadingHTTPServer):
    """Takes reports; an attempt that has done `stop_after` steps is asked to stop."""

    def __init__(self, stop_after: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stop_after = stop_after
        self.is_job_deleted = False
        self.reports: list[ProgressReport] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        """Answer a report."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        report = ProgressReport.model_validate_json(body)
        self.server.reports.append(report)
        if self.server.is_job_deleted:
            refusal = refusals.job_not_found("test/tiny")
            self._answer(refusal.status, {"reason": refusal.reason, "message": refusal.message})
            return
        is_asked = report.step >= self.server.stop_after
        reply = ProgressReply(command=Command.STOP if is_asked else Command.NONE)
        self._answer(200, reply.to_wire())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        answer = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the test's output is the trainer's."""


@contextmanager
def serving(stop_after: int) -> Iterator[Endpoint]:
    """Run an endpoint."""
    endpoint = Endpoint(stop_after)
    thread = threading.Thread(target=endpoint.serve_forever, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.shutdown()
        endpoint.server_close()
        thread.join()


def run_attempt(root: Path, model: Path, attempt: int, endpoint: Endpoint, layout: dict[str, Any]) -> tuple[int, str]:
    """Run the trainer as it is submitted; return its exit code and what it printed."""
    spec = spec_of(
        model,
        # So slow that a report comes before the last step.
        reward=reward_of_letters(0.2),
        checkpoint={"everySteps": 0, "export": "Never"},
        trainer={"totalSteps": STEPS, "validateEverySteps": 0},
        **layout,
    )
    (root / "token").write_text("none is looked at")
    address = f"http://127.0.0.1:{endpoint.server_address[1]}/"
    reporting = Reporting(url=address, token_path=str(root / "token"), interval_seconds=1)
    job = JobFile(
        namespace="test", name="tiny", uid="u", root=str(root), spec=resolve(parse_spec(spec)), reporting=reporting
    )
    (root / "job.json").write_text(job.encode())
    options = ["--job", str(root / "job.json"), "--hash", JobFile.digest(job.encode())]
    command = [sys.executable, "-m", "ppojob_trainer.main", *options, "--generation", "1", "--attempt", str(attempt)]
    path = root / f"output-{attempt}.txt"
    with path.open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **OF_A_CLUSTER})
    try:
        code = run.wait(LIMIT_S)
    finally:
        kill(run)
    return code, path.read_text(errors="replace")


def hold_after_the_first_step(
    root: Path,
    endpoint: Endpoint,
    held: list[subprocess.CompletedProcess[str]],
    *,
    is_job_deleted: bool = False,
    seconds: list[float] | None = None,
) -> None:
    """Do what a pod that is being deleted does, because its PPOJob was deleted or for another cause."""
    deadline = time.monotonic() + LIMIT_S
    while not any(report.step >= 1 for report in endpoint.reports):
        assert time.monotonic() < deadline, f"no step was reported within {LIMIT_S:g} s"
        time.sleep(0.1)
    endpoint.is_job_deleted, begin = is_job_deleted, time.monotonic()
    command = [str(Path(sys.executable).with_name("ppojob")), "hold", "--limit", str(LIMIT_S)]
    environment = {**os.environ, **OF_A_CLUSTER}
    held.append(
        subprocess.run(
            [*command, "--job", str(root / "job.json")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 60,
            check=False,
        )
    )
    if seconds is not None:
        seconds.append(time.monotonic() - begin)


def test_a_pod_that_is_deleted_is_held_until_the_trainer_has_put_a_checkpoint_down(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    held: list[subprocess.CompletedProcess[str]] = []

    with serving(stop_after=STEPS + 1) as endpoint:
        hook = threading.Thread(target=hold_after_the_first_step, args=(root, endpoint, held), daemon=True)
        hook.start()
        code, output = run_attempt(root, model, 0, endpoint, SPLIT)
        hook.join(LIMIT_S)

    assert code == 130, output[-4000:]
    [done] = held
    assert (done.returncode, done.stderr) == (0, ""), "no process of the run is left"
    stopped_at = json.loads((root / "checkpoints" / "tracker.json").read_text())["step"]
    assert 1 <= stopped_at < STEPS
    left = [path.name for path in root.glob("terminating-*")]
    assert left == ["terminating-tiny-1a2b3.ended"], "the hook removes request and answer; that the run ended stays"


def test_the_pods_of_a_deleted_job_are_released_without_a_checkpoint(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    held: list[subprocess.CompletedProcess[str]] = []
    seconds: list[float] = []

    with serving(stop_after=STEPS + 1) as endpoint:
        options = {"is_job_deleted": True, "seconds": seconds}
        hook = threading.Thread(
            target=hold_after_the_first_step, args=(root, endpoint, held), kwargs=options, daemon=True
        )
        hook.start()
        code, output = run_attempt(root, model, 0, endpoint, SPLIT)
        hook.join(LIMIT_S)

    assert code == 1, output[-4000:]
    record = FailureRecord.from_log(output)
    assert record is not None
    assert record.message == "the PPOJob was deleted: the run ends at once, without a checkpoint"
    [done] = held
    assert (done.returncode, done.stderr) == (0, ""), "no process of the run is left"
    assert seconds[0] < DELETED_LIMIT_S
    saved = root / "checkpoints" / "tracker.json"
    assert not saved.exists() or json.loads(saved.read_text())["step"] is None, saved.read_text()


def test_a_trainer_that_was_asked_to_stop_resumes_at_that_step_with_another_layout(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()

    with serving(stop_after=1) as endpoint:
        code, output = run_attempt(root, model, 0, endpoint, SPLIT)
    assert code == 130, output[-4000:]
    record = FailureRecord.from_log(output)
    assert record is not None
    assert record.reason == Reason.INTERRUPTED
    stopped_at = json.loads((root / "checkpoints" / "tracker.json").read_text())["step"]
    assert 1 <= stopped_at < STEPS
    assert f"stopped gracefully after step {stopped_at}" in record.message
    last = endpoint.reports[-1]
    assert last.checkpoint is not None, "the last report tells of the checkpoint"
    assert last.checkpoint.step == stopped_at

    with serving(stop_after=STEPS + 1) as endpoint:
        code, output = run_attempt(root, model, 1, endpoint, ONE_POOL)
    assert code == 0, output[-4000:]
    assert f"resuming after step {stopped_at}" in output
    assert list(records_of(root)) == [*range(1, STEPS + 1)], "every step, none twice"
    lines = (root / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
