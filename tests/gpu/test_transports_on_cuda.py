"""Two GPUs: the transport that is reported is the one that NCCL was left with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppojob_trainer.engines.network import free_port
from tests.gpu import transport_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(400),
]

PROJECT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 120
NO_P2P = {"NCCL_P2P_DISABLE": "1"}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "P2P/"),
        (NO_P2P, "SHM"),
        ({**NO_P2P, "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo"}, "NET/Socket"),
    ],
)
def test_the_transport_is_read_out_of_nccls_log(tmp_path: Path, settings: dict[str, str], kind: str) -> None:
    port = str(free_port("127.0.0.1"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", transport_ranks.__name__, str(rank), port, str(tmp_path)],
            cwd=PROJECT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank), "NCCL_NVLS_ENABLE": "0", **settings},
        )
        for rank in (0, 1)
    ]
    try:
        codes = [rank.wait(LIMIT_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert codes == [0, 0]
    for rank in (0, 1):
        (transport,) = json.loads((tmp_path / f"rank-{rank}.json").read_text()).items()
        assert transport[0].startswith(kind)
        assert transport[1] == 1
