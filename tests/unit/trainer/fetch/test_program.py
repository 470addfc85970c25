"""The program: two at once, one that is killed, its reports, and its end. Each is a separate process."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import JobFile, Reporting
from tests.unit.trainer.fetch.conftest import DATA, MODEL, MakeJob, files_source, model_files
from tests.unit.trainer.fetch.hub_server import BLOCK, TOKEN, Hub, Repository

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Start = Callable[..., subprocess.Popen[str]]
LARGE = os.urandom(40 * BLOCK)
LIMIT_S = 500.0
PATIENCE = {"HF_HUB_DOWNLOAD_TIMEOUT": "240", "HF_HUB_ETAG_TIMEOUT": "240"}
"""Of the hub's client, in seconds: no download is repeated because the machine is busy."""


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(job: JobFile, **environment: str) -> subprocess.Popen[str]:
        number = len(started)
        file = tmp_path / f"job-{number}.json"
        file.write_text(job.encode())
        command = [sys.executable, "-m", "ppojob_trainer.commands.fetch", "--job", str(file)]
        of_hub = {**PATIENCE, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        with (tmp_path / f"log-{number}").open("w") as log:
            process = subprocess.Popen(
                [*command, "--termination-message", str(tmp_path / f"message-{number}")],
                env={**os.environ, **of_hub, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(30)


def until(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(0.05)


def has_text(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


@pytest.fixture
def shards(hub: Hub) -> dict[str, bytes]:
    files = {**model_files(), "model.safetensors": LARGE, "model-2.safetensors": LARGE}
    hub.repositories["models", MODEL] = Repository(files)
    return files


def test_of_two_processes_one_downloads_and_the_other_waits(
    hub: Hub, start: Start, make_job: MakeJob, shards: dict[str, bytes], tmp_path: Path
) -> None:
    hub.block_delay_s = 0.2
    job = make_job()

    processes = [start(job), start(job)]

    assert [process.wait(LIMIT_S) for process in processes] == [0, 0], (tmp_path / "log-0").read_text()
    assert (Path(job.spec.model.actor.path) / "model.safetensors").read_bytes() == LARGE
    assert hub.downloads("model.safetensors") == 1
    assert hub.downloads("model-2.safetensors") == 1


def test_after_a_kill_another_one_takes_over_and_continues(
    hub: Hub, start: Start, make_job: MakeJob, shards: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repositories["models", MODEL].files["model-2.safetensors"] = small = b"w" * 100
    hub.block_delay_s = 0.5
    job = make_job()
    folder = Path(job.sources[0].folder)
    incomplete = folder.with_name(f".{folder.name}.incomplete")
    first = start(job)
    # The hub's library writes it after the file, and downloads a file without it again.
    until(lambda: has_text(incomplete / ".cache/huggingface/download/model-2.safetensors.metadata"), "the small shard")
    until(lambda: hub.downloads("model.safetensors"), "the large shard to begin")

    first.send_signal(signal.SIGKILL)
    first.wait(LIMIT_S)
    assert not folder.exists()
    hub.block_delay_s = 0.0
    second = start(job)

    assert second.wait(LIMIT_S) == 0, (tmp_path / "log-1").read_text()
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert (folder / "model-2.safetensors").read_bytes() == small
    assert hub.downloads("model-2.safetensors") == 1, "what was complete is not downloaded again"
    assert not list(folder.parent.rglob("*.incomplete")), "nothing of the killed one is left"


def test_a_process_that_is_asked_to_end_leaves_its_lock(
    hub: Hub, start: Start, make_job: MakeJob, shards: dict[str, bytes]
) -> None:
    hub.block_delay_s = 0.5
    job = make_job()
    lock = Path(job.sources[0].folder).with_name(".main.lock")
    process = start(job)
    until(lambda: hub.downloads("model.safetensors"), "the download")

    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT_S) == 143
    assert not lock.exists()


def test_what_is_refused_ends_with_its_own_code_and_a_message_without_the_token(
    hub: Hub, start: Start, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(train=files_source(f"hf://datasets/{DATA}/main/train.parquet", promptColumn=TOKEN))

    process = start(job, HF_TOKEN=TOKEN)

    assert process.wait(LIMIT_S) == 3
    message = (tmp_path / "message-0").read_text()
    assert message.startswith("spec.data.train: ")
    assert "there are question, answer" in message
    assert TOKEN not in message + (tmp_path / "log-0").read_text()


def test_what_may_pass_ends_with_another_code(hub: Hub, start: Start, make_job: MakeJob, tmp_path: Path) -> None:
    process = start(make_job(), HF_ENDPOINT="http://127.0.0.1:9")

    assert process.wait(LIMIT_S) == 1
    assert "set HF_ENDPOINT in spec.env to a mirror" in (tmp_path / "message-0").read_text()


def test_an_image_that_is_older_than_the_operator_is_refused_before_gpus_are_held(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = json.loads(make_job().encode())
    job["spec"]["fieldOfTomorrow"] = 1
    (tmp_path / "job.json").write_text(json.dumps(job))

    files = ("--job", tmp_path / "job.json", "--termination-message", tmp_path / "message")
    done = subprocess.run([sys.executable, "-m", "ppojob_trainer.commands.fetch", *files], timeout=LIMIT_S, check=False)

    assert done.returncode == 3
    assert "does not know spec.fieldOfTomorrow" in (tmp_path / "message").read_text()


class _Operator:
    """A status endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.status = 200


@pytest.fixture
def operator() -> Iterator[tuple[_Operator, str]]:
    found = _Operator()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found.paths.add(self.path)
            self.send_response(found.status)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing on stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found, f"http://127.0.0.1:{server.server_port}/v1alpha1/namespaces/a/ppojobs/b/progress"
    server.shutdown()
    server.server_close()
    thread.join()


def _reporting(job: JobFile, url: str, folder: Path) -> JobFile:
    (folder / "token").write_text("t")
    return job.model_copy(
        update={"reporting": Reporting(url=url, token_path=str(folder / "token"), interval_seconds=1)}
    )


def test_bytes_and_the_end_are_reported(
    hub: Hub, start: Start, make_job: MakeJob, shards: dict[str, bytes], operator: tuple[_Operator, str], tmp_path: Path
) -> None:
    hub.block_delay_s = 0.3
    endpoint, url = operator

    process = start(_reporting(make_job(), url, tmp_path))

    assert process.wait(LIMIT_S) == 0, (tmp_path / "log-0").read_text()
    assert endpoint.paths == {"/v1alpha1/namespaces/a/ppojobs/b/fetch"}
    running = [report for report in endpoint.reports if report.get("address") and report.get("totalBytes")]
    assert any(0 < report["bytes"] < report["totalBytes"] for report in running), endpoint.reports
    last = endpoint.reports[-1]
    assert "address" not in last
    assert last["bytes"] == last["totalBytes"] > 2 * len(LARGE)
    assert [source["revision"] for source in last["sources"]] == ["c" * 40]
    assert [report["number"] for report in endpoint.reports] == list(range(1, len(endpoint.reports) + 1))


def test_a_failure_is_reported(
    hub: Hub, start: Start, make_job: MakeJob, operator: tuple[_Operator, str], tmp_path: Path
) -> None:
    endpoint, url = operator

    process = start(_reporting(make_job("hf://acme/nothing"), url, tmp_path))

    assert process.wait(LIMIT_S) == 3
    assert "there is no model acme/nothing" in endpoint.reports[-1]["message"]


def test_a_fetch_whose_job_has_ended_ends_too(
    hub: Hub, start: Start, make_job: MakeJob, shards: dict[str, bytes], operator: tuple[_Operator, str], tmp_path: Path
) -> None:
    hub.block_delay_s = 5.0
    endpoint, url = operator
    endpoint.status = 410

    process = start(_reporting(make_job(), url, tmp_path))

    assert process.wait(LIMIT_S) == 0
    assert not Path(make_job().spec.model.actor.path).exists()
