"""The model families that this version trains, and what is tested of each: the support matrix as a table.

`engines.train.fsdp.families` refuses every other family by name, and `tools.site` writes the table in
docs/support-matrix.md. A family is listed when a test compares its log-probs, values and export with transformers' own.
The tests of the other columns compare their families with this table. Standard library only, because the documents are
written without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["FAMILIES", "Family", "Support", "table"]


class Support(StrEnum):
    """What is known of a feature with a family. The value is the cell of the table."""

    TESTED = "yes"
    NOT_EXPERTS = "not on experts"
    UNTESTED = "no test"
    REFUSED = "refused"


@dataclass(frozen=True)
class Family:
    """What is tested of a family, in addition to training and export.

    variants: settings of the family that the tests have. lora: adapters on all linear layers, those of experts too.
    push: weights are sent to a real vLLM. tensor_parallel, pipeline: `tensorParallelSize` and `pipelineParallelSize`
    above 1.
    """

    variants: str = ""
    push: Support = Support.UNTESTED
    lora: Support = Support.TESTED
    tensor_parallel: Support = Support.UNTESTED
    pipeline: Support = Support.TESTED


_TIED: Final = "tied and untied embeddings"
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(
        f"{_TIED}, Llama 3 RoPE scaling",
        push=Support.TESTED,
        tensor_parallel=Support.TESTED,
    ),
    "qwen2": Family(
        f"{_TIED}, sliding window above a layer (vLLM refuses it)", push=Support.TESTED, tensor_parallel=Support.TESTED
    ),
    "qwen3": Family(_TIED, push=Support.TESTED, tensor_parallel=Support.TESTED),
    "mistral": Family("with and without sliding window", push=Support.TESTED, tensor_parallel=Support.TESTED),
    "gemma": Family(push=Support.TESTED, tensor_parallel=Support.TESTED),
    "gemma2": Family("without logit soft-capping", push=Support.TESTED, tensor_parallel=Support.TESTED),
    "gemma3_text": Family("sliding window", push=Support.TESTED, tensor_parallel=Support.TESTED),
    "phi3": Family("without LongRoPE", push=Support.TESTED, tensor_parallel=Support.REFUSED),
    "olmo2": Family(push=Support.TESTED, tensor_parallel=Support.REFUSED),
    "smollm3": Family(push=Support.TESTED, tensor_parallel=Support.TESTED),
    "glm4": Family(push=Support.TESTED, tensor_parallel=Support.REFUSED),
    "deepseek_v3": Family(
        "with and without dense layers, groups of experts, compressed queries, YaRN",
        push=Support.TESTED,
        tensor_parallel=Support.REFUSED,
    ),
    "gpt_oss": Family(
        "sliding windows, YaRN; checkpoints in bfloat16 alone",
        push=Support.TESTED,
        tensor_parallel=Support.NOT_EXPERTS,
    ),
    "mixtral": Family(
        "with and without sliding window",
        push=Support.TESTED,
        tensor_parallel=Support.NOT_EXPERTS,
    ),
    "qwen3_moe": Family(
        "with and without dense layers between those with experts",
        push=Support.TESTED,
        tensor_parallel=Support.NOT_EXPERTS,
    ),
}
"""By `model_type` of config.json."""


def table() -> str:
    """Return the table of families in Markdown."""
    lines = [
        "| family | tested variants | training and export | push to vLLM | `lora` | `tensorParallelSize` "
        "| `pipelineParallelSize` |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        known = (Support.TESTED, family.push, family.lora, family.tensor_parallel, family.pipeline)
        cells = (f"`{name}`", family.variants, *known)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)
