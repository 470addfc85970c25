"""A weight link whose other end is gone: nobody waits for the link's limit, no process ends, and another link works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.engines.weights.waiting import break_off
from tests.gpu import link_ranks
from tests.gpu.two_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
]

# NCCL wants a GPU for each process.
two_gpus = pytest.mark.gpu(2)
each_backend = pytest.mark.parametrize(
    ("backend", "settings"),
    [
        pytest.param("nccl", {}, marks=two_gpus),
        pytest.param("nccl", {"NCCL_CUMEM_HOST_ENABLE": "0"}, marks=two_gpus),
        ("cuda_ipc", {}),
    ],
)


@each_backend
def test_a_sender_goes_on_when_its_receiver_is_lost(tmp_path: Path, backend: str, settings: dict[str, str]) -> None:
    def seen_by_the_controller() -> None:
        link_ranks.wait_for(tmp_path / "lost")
        link_ranks.write(tmp_path / "third")
        break_off(link_ranks.link_of(tmp_path, 1))

    run(tmp_path, backend, "lost", [1, 1], settings, seen_by_the_controller)

    failure = sender_of(tmp_path)["failure"]
    assert failure
    assert "did not come within" not in failure


@each_backend
def test_a_receiver_goes_on_when_its_sender_closes(tmp_path: Path, backend: str, settings: dict[str, str]) -> None:
    run(tmp_path, backend, "closed", [1], settings)

    failure = (tmp_path / "receiver").read_text()
    assert failure
    assert "did not come within" not in failure


@each_backend
def test_a_sender_opens_another_link_while_its_receiver_is_idle(
    tmp_path: Path, backend: str, settings: dict[str, str]
) -> None:
    run(tmp_path, backend, "idle", [1], settings)

    assert (tmp_path / "receipt-3").exists()


def run(
    folder: Path,
    backend: str,
    case: str,
    receivers: list[int],
    settings: dict[str, str],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run the ranks; the receivers' GPUs are those of the sender with CUDA IPC."""
    gpus = [0, *(receivers if backend == "nccl" else [0] * len(receivers))]
    run_ranks(
        len(gpus),
        link_ranks,
        [folder, backend, case],
        limit=2 * link_ranks.LIMIT_SECONDS,
        gpus=gpus,
        meanwhile=meanwhile,
        environment=settings,
    )
    print(backend, case, settings, sender_of(folder)["seconds"])


def sender_of(folder: Path) -> Any:
    return json.loads((folder / "sender").read_text())
