"""Prometheus and promtool, where they are installed (Debian: `apt-get install prometheus` brings both)."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.monitoring.simulation import Sample
from tests.ports import server_port

MISSING = "there is no prometheus and promtool on the PATH: on Debian `apt-get install prometheus` brings both"
_TIMEOUT_S = 120.0


def are_installed() -> bool:
    """Return whether both programs are there."""
    return all(shutil.which(name) for name in ("prometheus", "promtool"))


def promtool(*arguments: str, folder: Path) -> str:
    """Run promtool in a folder and return its output.

    Raises:
        RuntimeError: it failed; with its output.
    """
    done = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"promtool {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Line:
    """One series of an answer: its labels, and values over time (seconds since 1970)."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def over(self, expression: str, start: float, end: float, step: float) -> list[Line]:
        """Evaluate an expression at each step of a time range.

        Raises:
            urllib.error.HTTPError: Prometheus refuses the expression.
        """
        asked = {"query": expression, "start": f"{start}", "end": f"{end}", "step": f"{step}"}
        found = self._ask("query_range", asked)["result"]
        return [Line(each["metric"], tuple((at, float(value)) for at, value in each["values"])) for each in found]

    def now(self, expression: str) -> list[Mapping[str, str]]:
        """Return the labels of what an expression finds now."""
        return [each["metric"] for each in self._ask("query", {"query": expression})["result"]]

    def _ask(self, path: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data

    def is_ready(self) -> bool:
        """Return whether it answers."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, HTTPException):
            return False


def load(samples: Iterable[Sample], folder: Path) -> Path:
    """Write samples into a database below `folder` and return its path."""
    file, database = folder / "samples.txt", folder / "database"
    with file.open("w") as lines:
        lines.writelines(f"{sample.line()}\n" for sample in samples)
        lines.write("# EOF\n")
    promtool("tsdb", "create-blocks-from", "openmetrics", str(file), str(database), folder=folder)
    return database


@contextmanager
def serving(folder: Path, database: Path, configuration: str = "", *, lookback: str = "59s") -> Iterator[Prometheus]:
    """Run a Prometheus on a free port of this machine.

    Args:
        lookback: how long a sample counts. A loaded one is followed by no mark of its end, as a scraped one is, so it
            must not count any more at the next scrape.

    Raises:
        RuntimeError: it ended at once; with the end of its log.
        TimeoutError: it was not ready in time.
    """
    config = folder / "prometheus.yml"
    config.write_text(configuration)
    address = f"127.0.0.1:{server_port()}"
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={database}", f"--web.listen-address={address}",
        "--storage.tsdb.retention.time=100y", "--log.level=warn", f"--query.lookback-delta={lookback}",
    ]  # fmt: skip
    log = folder / "prometheus.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            server = Prometheus(f"http://{address}")
            wait_until(lambda: process.poll() is not None or server.is_ready(), "Prometheus to be ready")
            if process.poll() is not None:
                raise RuntimeError(f"Prometheus ended at once: {log.read_text()[-2000:]}")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=120)


def wait_until(is_true: Callable[[], object], what: str) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it was not so in time.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_TIMEOUT_S:g} s for {what}")
        time.sleep(0.05)
