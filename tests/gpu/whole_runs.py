"""Jobs of a model with 0.1 billion random weights, for tests that lose processes of whole runs on GPUs.

They need no network, and no package that only reads data: the prompts are a file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.trainer.runs import records_of, reward_of_letters, spec_of
from tests.integration.trainer.tiny_model import INITIALIZER_RANGE, write_tiny_model

NUM_STEPS = 4
PHASE_LIMIT_S = 100
"""Longer than vLLM takes to start."""
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": INITIALIZER_RANGE / 3,
}
"""The logits have about the standard deviation of those of the tiny model."""
ROLLOUT = {"enforceEager": True, "gpuMemoryUtilization": 0.2, "maxNumSeqs": 64}
_NUM_PROMPTS = 32


def write_inputs(folder: Path, **shape: Any) -> Path:
    """Write a model and prompts into an empty folder; return the model's folder.

    Args:
        shape: of the model, in place of SHAPE.
    """
    rows = [{"prompt": f"{number} * {number + 3} =", "data_source": "products"} for number in range(_NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_tiny_model(folder / "model", **(shape or SHAPE))


def lossy_spec(model: Path, pools: dict[str, int], placement: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the spec of a job whose scores take 0.1 s each.

    Args:
        model: what `write_inputs` returns.
        pools: the number of GPUs of each pool.
        changes: sections in place of these.
    """
    sections = {
        "device": "CUDA",
        "pools": [{"name": name, "gpusPerNode": number} for name, number in pools.items()],
        "placement": placement,
        "data": {
            "train": {"files": {"paths": [str(model.parent / "prompts.jsonl")]}},
            "trainBatchSize": 8,
            "maxPromptLength": 256,
            "maxResponseLength": 16,
        },
        "reward": reward_of_letters(0.1),
        "rollout": ROLLOUT,
        "actor": {"learningRate": 1e-5, "miniBatchSize": 4},
        "critic": {"learningRate": 1e-5, "miniBatchSize": 4},
        "trainer": {"totalSteps": NUM_STEPS, "phaseTimeoutSeconds": PHASE_LIMIT_S},
    }
    return spec_of(model, **sections | changes)


def seconds_to_next_step(root: Path, since: float) -> float:
    """Return the seconds from a time (as `time.time`) to the end of the first step that finished after it."""
    return min(at for record in records_of(root).values() if (at := record["time"]) > since) - since
