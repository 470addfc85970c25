"""Two processes train as one: the same losses, gradients, weights, and a checkpoint for any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import RendezvousError
from ppojob_trainer.engines.network import connect, listen
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines import two_ranks
from tests.unit.trainer.engines.tiny_llama import assert_same_updates, save_tiny_model

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[4]
LIMIT_SECONDS = 540


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=two_ranks.NUM_LAYERS)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    store = listen("127.0.0.1", LIMIT_SECONDS)
    command = [sys.executable, "-m", two_ranks.__name__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), str(model_path), str(folder)],
            cwd=PROJECT,
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(two_ranks.WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=LIMIT_SECONDS)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(60)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return folder


@pytest.fixture(scope="module")
def of_two(out: Path) -> list[dict[str, Any]]:
    return [torch.load(out / f"rank-{rank}.pt") for rank in range(two_ranks.WORLD_SIZE)]


@pytest.fixture(scope="module")
def of_one(parallel: ParallelMesh, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks.run(parallel, model_path, two_ranks.whole_batch(), tmp_path_factory.mktemp("one-rank"))


def test_the_ranks_agree_on_metrics_and_weights(of_two: list[dict[str, Any]]) -> None:
    first, second = of_two
    assert first["metrics"] == second["metrics"]
    torch.testing.assert_close(first["weights"], second["weights"], atol=0, rtol=0)


def test_each_rank_computes_its_own_rows(of_two: list[dict[str, Any]], of_one: dict[str, Any]) -> None:
    for key in ("log_probs", "values"):
        whole = torch.zeros_like(of_one[key])
        for rank, seen in enumerate(of_two):
            whole[[4 * part + 2 * rank + row for part in (0, 1) for row in (0, 1)]] = seen[key]
        torch.testing.assert_close(whole, of_one[key], atol=1e-5, rtol=1e-4)


def test_one_rank_and_two_make_the_same_update(of_two: list[dict[str, Any]], of_one: dict[str, Any]) -> None:
    assert of_two[0]["metrics"] == pytest.approx(of_one["metrics"], rel=1e-4, abs=1e-5)
    # The weights are compared in the bfloat16 that the rollout gets: the updates were rounded alike almost everywhere.
    difference = torch.cat(
        [(a - b).abs().flatten() for a, b in zip(of_two[0]["weights"], of_one["weights"], strict=True)]
    )
    assert difference.mean() < 1e-6
    assert of_two[0]["second"] == pytest.approx(of_one["second"], rel=1e-3, abs=1e-4)


def test_adapters_and_offloading_are_the_same_on_two_ranks(
    of_two: list[dict[str, Any]], of_one: dict[str, Any]
) -> None:
    assert of_two[0]["of_adapters"] == of_two[1]["of_adapters"]
    assert of_two[0]["of_adapters"] == pytest.approx(of_one["of_adapters"], rel=1e-3, abs=1e-4)


def test_models_that_stay_gathered_compute_the_same(of_two: list[dict[str, Any]]) -> None:
    for seen in of_two:
        freed, gathered = seen["freed"], seen["gathered"]
        # Gradients are summed over micro-batches first, and then over ranks.
        for name, numbers in gathered["numbers"].items():
            rough: dict[str, float] = {"atol": 5e-2, "rtol": 5e-2} if "halved" in name else {"atol": 1e-5, "rtol": 1e-4}
            torch.testing.assert_close(numbers, freed["numbers"][name], atol=rough["atol"], rtol=rough["rtol"])
        for name in ("policy", "adapted"):
            assert_same_updates(
                *(
                    {str(number): tensor for number, tensor in enumerate(tensors)}
                    for tensors in (gathered["sent"][name], freed["sent"][name], freed["before"][name])
                )
            )
        pairs = zip(gathered["sent"]["halved"], freed["sent"]["halved"], strict=True)
        # Where a gradient is next to nothing, its rounding decides which way AdamW's first steps go.
        assert torch.cat([(left - right).abs().flatten().float() for left, right in pairs]).mean() < 1e-4


def test_models_that_stay_gathered_send_fewer_messages(of_two: list[dict[str, Any]]) -> None:
    # Of three layers two travel together, and all of them where they compute in half the bytes.
    together, halved, root, optimizer_steps = 2, 1, 1, 2
    for seen in of_two:
        freed, gathered = seen["freed"]["messages"], seen["gathered"]["messages"]
        assert gathered["log_probs"] == gathered["ref"] == (together + root, 0)
        once = optimizer_steps * (together + root)
        assert gathered["update_actor"] == gathered["update_kept"] == (once, once)
        assert gathered["update_halved"] == (optimizer_steps * (halved + root),) * 2
        with_head = once + optimizer_steps * two_ranks.VALUE_HEAD
        assert gathered["update_critic"] == (with_head, with_head)
        assert gathered["weights"][0] == freed["weights"][0] - (two_ranks.NUM_LAYERS - together)
        for name, (gathers, scatters) in freed.items():
            assert gathers > gathered[name][0]
            assert scatters == 0 or scatters >= 2 * gathered[name][1]


def test_a_checkpoint_of_two_ranks_is_read_by_one(
    out: Path, of_two: list[dict[str, Any]], parallel: ParallelMesh, model_path: Path
) -> None:
    policy = two_ranks.make_policy(parallel, model_path)
    policy.restore(out / "checkpoint")
    weights = [tensor.float().clone() for tensor in policy.weights().gather()]
    torch.testing.assert_close(weights, of_two[0]["weights"], atol=0, rtol=0)
    resumed = policy.update(two_ranks.whole_batch())
    assert resumed == pytest.approx(of_two[0]["second"], rel=1e-4, abs=1e-5)


def test_two_ranks_export_a_whole_model(out: Path, of_two: list[dict[str, Any]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(out / "export", dtype=torch.float32)
    exported = [parameter.detach() for parameter in model.parameters()]
    rounded = [weights.bfloat16().float() for weights in of_two[0]["weights"]]
    torch.testing.assert_close(exported, rounded, atol=0, rtol=0)


def test_a_rank_that_stays_alone_gives_up_in_time() -> None:
    store = listen("127.0.0.1", LIMIT_SECONDS)
    script = (
        "from ppojob_api.v1alpha1.runtime import Device\n"
        "from ppojob_trainer.engines.network import connect\n"
        "from ppojob_trainer.engines.train.dims import ParallelDims\n"
        "from ppojob_trainer.engines.train.mesh import init_process_group\n"
        f"store = connect('127.0.0.1', {store.port}, 60)\n"
        f"init_process_group(Device('{Device.CPU.value}'), 1, ParallelDims(shard=2), store, 2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=LIMIT_SECONDS, check=False)
    assert ended.returncode != 0
    assert f"{RendezvousError.__name__}: rank 1 of 2 did not connect to the other ranks" in ended.stderr.decode()


def test_a_rank_without_a_rank_zero_gives_up_in_time() -> None:
    store = listen("127.0.0.1", 1)
    port = store.port
    del store
    with pytest.raises(RendezvousError, match=f"rank 0 did not answer at 127.0.0.1:{port} within 1 s"):
        connect("127.0.0.1", port, 1)
