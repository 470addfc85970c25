"""Two GPUs: every combination of compile, gradient checkpointing, offload, LoRA and division makes the same update.

Each row is compared with the same weights or adapters on one rank, eager, without checkpointing and offload. The last
test prints the table: run it with -s.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ppojob_trainer.engines.network import listen
from tests.gpu import combination_ranks
from tests.gpu.combination_ranks import COMBINATIONS, PARTS, Combination
from tests.gpu.two_ranks import run_two_ranks

pytestmark = [
    pytest.mark.gpu(2),
    # Whichever test comes first waits for all combinations.
    pytest.mark.timeout(1080),
]

LIMIT_SECONDS = 1020
Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What rank 0 computed, which is in every division. All parts run at once: most of the time is compilation."""
    out = tmp_path_factory.mktemp("combinations")
    model = combination_ranks.write_model(tmp_path_factory.mktemp("models") / "random")

    def run(part: tuple[str, str]) -> Seen:
        store = listen("127.0.0.1", LIMIT_SECONDS)
        arguments = ["CUDA", model, out, *part, store.port]
        run_two_ranks(combination_ranks, arguments, limit=LIMIT_SECONDS, TORCHINDUCTOR_COMPILE_THREADS="2")
        found: Seen = json.loads((out / f"{', '.join(part)}, rank 0.json").read_text())
        return found

    with ThreadPoolExecutor(len(PARTS)) as threads:
        return {name: row for rows in threads.map(run, PARTS) for name, row in rows.items()}


def plain_of(combination: Combination) -> Combination:
    return Combination("one rank", False, False, "nothing offloaded", combination.trained)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: combination.name)
def test_the_update_is_that_of_the_plain_model(seen: Seen, combination: Combination) -> None:
    computed, plain = seen[combination.name], seen[plain_of(combination).name]

    assert "error" not in computed, computed["error"]
    # bfloat16 keeps eight bits, and each combination adds in another order.
    assert computed["grad_norms"][0] == pytest.approx(plain["grad_norms"][0], rel=0.02)
    moved = difference(plain["after"], plain["before"])
    assert moved > 0.1, "two updates move the policy by more than rounding does"
    assert difference(computed["before"], plain["before"]) < 0.06
    assert difference(computed["after"], plain["after"]) < 0.06 + 0.2 * moved


def difference(mine: list[float], other: list[float]) -> float:
    """Return the mean distance of two lists of log-probs, where they have the same tokens."""
    length = min(len(mine), len(other))
    return sum(abs(a - b) for a, b in zip(mine[:length], other[:length], strict=True)) / length


def test_the_table(seen: Seen) -> None:
    lines = [f"{'combination':86}{'seconds':>8}{'norm 1':>9}{'norm 2':>9}"]
    for name, row in seen.items():
        norms = "".join(f"{norm:9.4f}" for norm in row.get("grad_norms", []))
        lines.append(f"{name:86}{row.get('seconds', 0.0):8.2f}{norms or '   failed'}")
    sys.stdout.write(f"\ntorch {torch.__version__}, {torch.cuda.get_device_name()}\n" + "\n".join(lines) + "\n")
    assert len(seen) == len(COMBINATIONS)
