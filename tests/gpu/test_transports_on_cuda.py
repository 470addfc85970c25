"""Two GPUs: the transport that is reported is the one that NCCL was left with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppojob_trainer.engines.network import listen
from tests.gpu import transport_ranks
from tests.gpu.two_ranks import run_two_ranks

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(400),
]

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
    store = listen("127.0.0.1", LIMIT_SECONDS)
    run_two_ranks(transport_ranks, [store.port, tmp_path], limit=LIMIT_SECONDS, **settings)
    for rank in (0, 1):
        (transport,) = json.loads((tmp_path / f"rank-{rank}.json").read_text()).items()
        assert transport[0].startswith(kind)
        assert transport[1] == 1
