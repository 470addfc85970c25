"""What loading, saving, exporting and resuming take of the host's memory, as multiples of a rank's float32 parameters.

Two processes with a model of 40 million parameters. Python and torch take some 10 MB here and there, hence the margins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.store import LocalStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ppojob_trainer.checkpoints import bucket
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.fsdp import object_storage
from ppojob_trainer.engines.train.fsdp.object_storage import reader_of, writer_of
from tests.unit.trainer.engines import host_memory_ranks
from tests.unit.trainer.engines.host_memory_ranks import most_taken
from tests.unit.trainer.engines.tiny_llama import save_tiny_model
from tests.unit.trainer.engines.two_ranks import WORLD_SIZE

PROJECT = Path(__file__).resolve().parents[4]
LIMIT_SECONDS = 400
MB = 10**6
SHAPE = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8, "vocab_size": 1000}


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Of each rank, what each call took as a multiple of its part of the parameters."""
    out = tmp_path_factory.mktemp("memory")
    model = save_tiny_model(out / "model", **SHAPE)
    part = (model / "model.safetensors").stat().st_size / WORLD_SIZE
    store = listen("127.0.0.1", LIMIT_SECONDS)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", host_memory_ranks.__name__, str(rank), str(store.port), str(model), str(out)],
            cwd=PROJECT,
            # Freed memory goes back at once, so that what one call leaves is not what the next one finds.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=LIMIT_SECONDS)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(60)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    found = [torch.load(out / f"rank-{rank}.pt") for rank in range(WORLD_SIZE)]
    return [{name: taken / part for name, taken in each.items()} for each in found]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize(
    ("call", "most"),
    [
        # The parameters, and as much of the file, whose pages the kernel keeps as long as there is room.
        ("build", 2.8),
        # What is on the host is written from there: nothing, the parameters, nothing.
        ("save, moments offloaded", 0.5),
        ("background, moments offloaded", 1.5),
        ("background, both offloaded", 0.5),
        # A file and a layer. All of it is 2 in float32 and 1 in bfloat16.
        ("export", 1.2),
        # The same: the adapters, 2.5 in float32, are written one at a time.
        ("export, adapters", 1.2),
        # Moments and, while torch makes them, gradients; no second copy of what is read.
        ("load", 3.5),
    ],
)
def test_a_call_takes_no_more_than_what_it_must_hold(shares: list[dict[str, float]], call: str, most: float) -> None:
    assert max(share[call] for share in shares) <= most


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_rank_holds_no_more_than_a_file_of_what_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(bucket, "from_url", lambda address, **options: LocalStore(tmp_path / "bucket", mkdir=True))
    monkeypatch.setattr(object_storage, "FILE_BYTES", 16 * MB)
    location = "s3://bucket/step-1/actor" if kind == "bucket" else str(tmp_path / "actor")
    # Half of a storage is copied before it is written, as what is on a device is.
    state: dict[str, Any] = {f"layer-{n}": torch.randn(2, 2 * MB)[0] for n in range(20)}

    taken = most_taken(lambda: save(dict(state), storage_writer=writer_of(location), no_dist=True))

    # A finished upload may still have parts of 10 MB on their way.
    assert taken < (120 if kind == "bucket" else 60) * MB
    found: dict[str, Any] = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    load(found, storage_reader=reader_of(location), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
