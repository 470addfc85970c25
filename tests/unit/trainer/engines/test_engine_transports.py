"""Which transport NCCL took, out of lines that NCCL wrote on machines of several kinds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.transports import NcclLog, log_connections, transports_of

NVLINK = """\
host:1768:1768 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
host:1768:1768 [0] NCCL INFO Channel 00/24 : 0 1
host:1768:1790 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1768:1790 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1768:1790 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""
INFINIBAND = """\
node-06:4539:4652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
node-06:4540:4653 [1] NCCL INFO Channel 01/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
node-06:4540:4653 [1] NCCL INFO Channel 03/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
node-06:4540:4653 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
"""
SOCKET = """\
worker-0:53:271 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[0] [receive] via NET/Socket/0
worker-0:53:271 [0] NCCL INFO Channel 01/0 : 3[0] -> 0[0] [send] via NET/Socket/0
worker-0:53:271 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (NVLINK, {"P2P/CUMEM": 1}),
        (INFINIBAND, {"NET/IB/GDRDMA": 1, "P2P/CUMEM": 1}),
        (SOCKET, {"NET/Socket": 1}),
        ("x:1:2 [6] NCCL INFO Channel 09 : 6[6] -> 7[7] via SHM/direct/direct\n", {"SHM": 1}),
        ("x:1:2 [0] NCCL INFO Channel 00/0 : 0[1000] -> 1[9000] via P2P/direct pointer/read\n", {"P2P/direct": 1}),
        ("x:1:2 [2] NCCL INFO Channel 01 : 2[201c0] -> 7[a01d0] via P2P/IPC/read\n", {"P2P/IPC": 1}),
        ("x:1:2 [0] NCCL INFO Ring 00 : 35 -> 34 [send] via NET/Socket/0\n", {"NET/Socket": 1}),
        ("x:1:2 [3] NCCL INFO Channel 03/1 : 17[1] -> 3[3] [send] via NET/IB/3(19)/GDRDMA/Shared\n",
         {"NET/IB/GDRDMA": 1}),
        ("x:1:2 [3] NCCL INFO Channel 00/0 : 0[3] -> 1[3] [send] via NET/IB/0/GDRDMA(PCI)\n", {"NET/IB/GDRDMA": 1}),
        ("x:1:2 [3] NCCL INFO Channel 00/0 : 0[3] -> 1[3] [send] via NET/IB/0\n", {"NET/IB": 1}),
        ("x:1:2 [0] NCCL INFO Channel 02/0 : 0[d6] -> 4[d6] [send] via NET/AWS Libfabric/2/GDRDMA comm 0x9b nRanks 8\n",
         {"NET/AWS Libfabric/GDRDMA": 1}),
        ("x:1:2 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1\nx:1:2 [0] NCCL INFO Using network Socket\n", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_the_transports_of_a_log(log: str, expected: dict[str, int]) -> None:
    assert transports_of(log) == expected


def test_each_rank_that_is_sent_to_is_counted_once() -> None:
    log = "".join(
        f"x:1:2 [0] NCCL INFO Channel {channel:02d}/0 : 0[0] -> {peer}[{peer}] via P2P/CUMEM\n"
        for channel in range(8)
        for peer in (1, 3)
    )

    assert transports_of(log) == {"P2P/CUMEM": 2}


def test_without_a_gpu_gloo_connects_each_rank_to_all_others() -> None:
    sizes = (ParallelDims(), ParallelDims(shard=3))
    alone, three = (ParallelMesh(torch.device("cpu"), cast(DeviceMesh, None), 0, dims) for dims in sizes)

    assert (alone.connect(), three.connect()) == ({}, {"GLOO/TCP": 2})


@pytest.fixture
def nccl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        # Set and taken away, so that it is restored also where the code sets it.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("nccl_variables")
def test_a_process_reads_what_nccl_wrote_since(tmp_path: Path) -> None:
    log_connections(tmp_path / "actor-0")
    file = tmp_path / f"actor-0.nccl-{os.getpid()}.log"

    before = NcclLog()
    file.write_text(NVLINK)
    after = NcclLog()
    with file.open("a") as more:
        more.write(SOCKET)

    assert before.take() == {"P2P/CUMEM": 1, "NET/Socket": 1}
    assert after.take() == {"NET/Socket": 1}
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT")


@pytest.mark.usefixtures("nccl_variables")
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "own.%h.%p"))

    log_connections(tmp_path / "actor-0")

    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert os.environ["NCCL_DEBUG_FILE"] == str(tmp_path / "own.%h.%p")
    assert NcclLog().take() == {}


@pytest.mark.usefixtures("nccl_variables")
def test_a_process_without_a_log_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NcclLog().take() == {}
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/dev/stdout")
    assert NcclLog().take() == {}
