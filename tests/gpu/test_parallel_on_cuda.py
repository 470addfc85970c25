"""Two GPUs: what peers compute equals what one GPU computes, whole runs with peers in every role, and what both cost.

Four GPUs: the same updates with heads divided over two and keys gathered over two.

Random weights, nothing from a network. Tables of memory and speed go to the output: run it with -s.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.network import listen
from tests.gpu import parallel_ranks
from tests.gpu.two_ranks import PROJECT, run_ranks
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(400),
]

LIMIT_SECONDS = 320
Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = parallel_ranks.write_model(tmp_path_factory.mktemp("models") / "random")
    torch.cuda.empty_cache()
    return written


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return computed_by(2, list(parallel_ranks.LAYOUTS), model, tmp_path_factory.mktemp("ranks"))


def computed_by(num_ranks: int, layouts: list[str], model: Path, out: Path) -> Seen:
    """What rank 0 of each layout wrote, with the weights of rank 1."""
    stores = {name: listen("127.0.0.1", LIMIT_SECONDS) for name in layouts}
    ports = [f"{name}={store.port}" for name, store in stores.items()]
    run_ranks(num_ranks, parallel_ranks, [model, out, *ports], limit=LIMIT_SECONDS)
    found, others = (json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    for name, layout in others.items():
        found[name]["weights of rank 1"] = layout.get("weights")
    computed: Seen = found
    return computed


@pytest.mark.parametrize("name", list(parallel_ranks.LAYOUTS))
def test_every_layout_is_computed(seen: Seen, name: str) -> None:
    assert "error" not in seen[name], seen[name]["error"]
    # What is whole on both ranks is changed by both, and must not drift apart.
    assert seen[name].get("weights of rank 1", seen[name]["weights"]) == seen[name]["weights"]


def test_every_layout_makes_the_same_update(seen: Seen) -> None:
    computed = {name: layout for name, layout in seen.items() if "error" not in layout}
    show_layouts(computed)
    assert_same_updates(computed, computed["one GPU"])


@pytest.mark.gpu(4)
def test_four_gpus_that_gather_keys_make_the_same_update(model: Path, tmp_path: Path) -> None:
    computed = computed_by(4, ["one GPU", *parallel_ranks.OF_FOUR_GPUS], model, tmp_path)
    errors = [layout["error"] for layout in computed.values() if "error" in layout]
    assert not errors, "\n".join(errors)
    show_layouts(computed)
    one = computed.pop("one GPU")
    for layout in computed.values():
        assert layout["weights of rank 1"] == layout["weights"]
    assert_same_updates(computed, one)


def assert_same_updates(computed: Seen, one: dict[str, Any]) -> None:
    for name, layout in computed.items():
        assert layout["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.02), name
        assert layout["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1.0), name
        difference = [abs(a - b) for a, b in zip(layout["log_probs"], one["log_probs"], strict=True)]
        # Random tokens have log-probs near -12, where bfloat16's hidden states move them a little.
        assert sum(difference) / len(difference) < 0.02, name


def test_peers_need_less_memory_than_one_gpu(seen: Seen) -> None:
    for name in ("sequence 2", "context 2", "tensor 2", "pipeline 2"):
        assert seen[name]["peak_gb"] < seen["one GPU"]["peak_gb"], name


def show_layouts(seen: Seen) -> None:
    tokens = sum(
        parallel_ranks.PROMPT + parallel_ranks.RESPONSE - 100 * row for row in range(parallel_ranks.NUM_SEQUENCES)
    )
    heads = ("peak GB", "update s", "tokens/s", "MFU", "grad norm")
    lines = [f"{'layout (0.5B, 8 x 4k tokens)':30}" + "".join(f"{head:>11}" for head in heads)]
    lines += [
        f"{name:30}{layout['peak_gb']:11.1f}{layout['seconds']:11.2f}{tokens / layout['seconds']:11.0f}"
        f"{layout['mfu']:11.3f}{layout['grad_norm']:11.4f}"
        for name, layout in seen.items()
    ]
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


ONE_POOL = {
    "pools": [{"name": "both", "gpusPerNode": 2}],
    "placement": {"actor": "both"},
    "actor": {"learningRate": 1e-3, "miniBatchSize": 4, "sequenceParallelSize": 2},
    "critic": {"learningRate": 1e-3, "miniBatchSize": 4, "tensorParallelSize": 2},
    "rollout": {"tensorParallelSize": 2},
}
ACTOR_DIVIDED = {
    **ONE_POOL,
    "actor": {"learningRate": 1e-3, "miniBatchSize": 4, "tensorParallelSize": 2},
    "critic": {"learningRate": 1e-3, "miniBatchSize": 4, "sequenceParallelSize": 2},
    "rollout": {},
}
STAGES = {
    **ONE_POOL,
    "actor": {"learningRate": 1e-3, "miniBatchSize": 4, "pipelineParallelSize": 2},
    "critic": {"learningRate": 1e-3, "miniBatchSize": 4, "pipelineParallelSize": 2},
    "rollout": {},
}
APART = {
    "pools": [{"name": "train", "gpusPerNode": 1}, {"name": "write", "gpusPerNode": 1}],
    "placement": {"actor": "train", "rollout": ["write"]},
    "actor": {"learningRate": 1e-3, "miniBatchSize": 4},
    "critic": {"learningRate": 1e-3, "miniBatchSize": 4},
    "rollout": {},
}

SHARED = {
    **APART,
    "pools": [{"name": "actor", "gpusPerNode": 1}, {"name": "critic", "gpusPerNode": 1}],
    "placement": {"actor": "actor", "critic": "critic", "rollout": ["actor", "critic"]},
}
BORROWING = {**APART, "placement": {"actor": "train", "rollout": ["write", "train"]}}


def spec_of(model: Path, changes: dict[str, Any]) -> dict[str, Any]:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = {"task": "products", "size": 32, "seed": 1, "config": config}
    reward = PROJECT / "tests" / "integration" / "trainer" / "count_letters.py"
    return {
        "image": "i",
        "device": "CUDA",
        "model": {"actor": {"path": str(model)}},
        "data": {
            "train": {"reasoningGym": task},
            "trainBatchSize": 8,
            "maxPromptLength": 256,
            "maxResponseLength": 32,
        },
        "reward": {"function": {"path": str(reward), "numWorkers": 1}},
        "algorithm": {"kl": {"inReward": True}},
        "storage": {"claimName": "c"},
        "checkpoint": {"everySteps": 0, "export": "Final"},
        "trainer": {"totalSteps": 3, "validateEverySteps": 0},
        **changes,
        "rollout": {"enforceEager": True, "gpuMemoryUtilization": 0.2, **changes["rollout"]},
    }


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    settings: dict[str, Any] = {"num_hidden_layers": 4, "intermediate_size": 1024, "initializer_range": 0.1}
    return write_tiny_model(tmp_path_factory.mktemp("small"), **sizes, **settings)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("actor sequence 2, critic tensor 2, rollout tensor 2", ONE_POOL),
        ("actor tensor 2, critic sequence 2, 2 replicas", ACTOR_DIVIDED),
        ("actor and critic pipeline 2, 2 replicas", STAGES),
        ("actor and critic 1, rollout in a pool of its own", APART),
        ("split, and the critic's pool shared with the rollout", SHARED),
        ("rollout in a pool of its own, and the trainers' shared with it", BORROWING),
    ],
)
def test_whole_runs(name: str, changes: dict[str, Any], small_model: Path, tmp_path: Path) -> None:
    from ppojob_trainer.main import run_job

    spec = resolve(parse_spec(spec_of(small_model, changes)))
    job = JobFile(namespace="test", name="parallel", uid="uid-of-test", root=str(tmp_path), spec=spec)
    outcome = run_job(job, attempt=0, stop=threading.Event())
    assert outcome.is_finished
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    show_run(name, steps)
    for record in steps:
        # The policy moves at each step, so stale or wrongly divided weights would be seen here.
        assert record["training/rollout_probs_diff_mean"] < 0.02
        assert 0 < record["actor/grad_norm"] < float("inf")


def show_run(name: str, steps: list[dict[str, Any]]) -> None:
    keys = ("timing_s/gen", "timing_s/update_actor", "timing_s/update_critic", "timing_s/update_weights")
    last = steps[-1]
    shown = "  ".join(f"{key.removeprefix('timing_s/')} {last[key]:.2f} s" for key in keys if key in last)
    memory = "  ".join(f"{key.split('/', 1)[1]} {value:.1f}" for key, value in last.items() if "memory" in key)
    worst = max(record["training/rollout_probs_diff_mean"] for record in steps)
    sys.stdout.write(f"\n{name}: {shown}  probs diff {worst:.4f}  {memory}\n")
