"""The tiny model, the undisturbed run with which other runs are compared, and an S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.trainer.runs import LIMIT_S, Run, checkpointed_spec, log_of, started
from tests.integration.trainer.s3_server import S3Server, serving
from tests.integration.trainer.tiny_model import write_tiny_model

# Ray starts its workers with niceness 15: beside the builds of `make test` they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`ppojob run`: three steps on a mixture in two pools, in the mode that Auto chooses, a checkpoint after each.

    The run waits for each checkpoint.
    """
    root = tmp_path_factory.mktemp("undisturbed")
    with started(root, checkpointed_spec(model, **{"async": False})) as run:
        assert run.wait(LIMIT_S) == 0, log_of(root)
    return Run(root)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serving(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def s3_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the server's address and credentials in the environment."""
    for name, value in server.settings.items():
        monkeypatch.setenv(name, value)
