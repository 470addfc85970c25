"""What the support matrix calls tested on several ranks: each cell has a layout whose update a test compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ppojob_trainer.engines.train.dims import ParallelDims
from tests.gpu.combination_ranks import COMBINATIONS, DIVISIONS
from tests.unit.docs.test_reference_pages import MATRIX, rows, section
from tests.unit.trainer.engines import (
    test_context_parallel,
    test_engine_peer_options,
    test_engine_peers,
    test_engine_tensor_parallel_experts,
    test_expert_adapter_ranks,
)

OPTIONS = section(MATRIX, "Parallelism and memory options")
MODEL_TYPES = {
    **dict.fromkeys(("deep", "deeper", "many heads", "biases"), "llama"),
    **dict.fromkeys(("experts", "deep experts", "starved", "two experts"), "qwen3_moe"),
    "deepseek": "deepseek_v3",
}
"""The models of the tests that do not have the name of their family."""


@dataclass(frozen=True)
class Compared:
    """A layout whose update is compared with that of one rank. model: settings of its model."""

    dims: ParallelDims
    family: str
    model: Mapping[str, Any]


def on_the_cpu() -> Iterator[Compared]:
    for module in (
        test_engine_peer_options,
        test_engine_tensor_parallel_experts,
        test_expert_adapter_ranks,
        test_context_parallel,
    ):
        for layout in (module.LAYOUTS | module.LONG).values():
            family = MODEL_TYPES.get(layout.family, layout.family)
            yield Compared(layout.dims, family, {"lora": layout.lora, **layout.options})
    for dims, name in (test_engine_peers.LAYOUTS | test_engine_peers.LONG).values():
        yield Compared(dims, MODEL_TYPES.get(name, name), {})


def on_gpus() -> Iterator[Compared]:
    for combination in COMBINATIONS:
        yield Compared(DIVISIONS[combination.division].dims, "llama", combination.model)


Condition = Callable[[Compared], bool]
COLUMNS: dict[str, Condition] = {
    "FSDP2 (data parallelism)": lambda layout: layout.dims.shard > 1,
    "`sequenceParallelSize`": lambda layout: layout.dims.slices > 1,
    "`tensorParallelSize`": lambda layout: layout.dims.tensor > 1,
    "`pipelineParallelSize`": lambda layout: layout.dims.pipeline > 1,
    "`expertParallelSize`": lambda layout: layout.dims.expert > 1,
}
ROWS: dict[str, Condition] = {
    # The one rank recomputes, and these ranks do not. The others do.
    "`gradientCheckpointing`": lambda layout: layout.model.get("gradient_checkpointing") is False,
    "`compile`": lambda layout: bool(layout.model.get("compile")),
    "`offload`": lambda layout: bool(layout.model.get("offload")),
    "`activationOffload`": lambda layout: bool(layout.model.get("activation_offload")),
    "`lora`": lambda layout: bool(layout.model.get("lora")),
    "`sequenceParallelSize` above 1": COLUMNS["`sequenceParallelSize`"],
    "`tensorParallelSize` above 1": COLUMNS["`tensorParallelSize`"],
    "`pipelineParallelSize` above 1": COLUMNS["`pipelineParallelSize`"],
    "`virtualPipelineParallelSize` above 1": lambda layout: layout.dims.virtual > 1,
    "`fsdpSize` (HSDP)": lambda layout: layout.dims.replicate > 1,
}
GPUS_ALONE = {("`compile`", "`sequenceParallelSize`")}
"""Named above the table."""


def cells() -> Iterator[tuple[str, str]]:
    """Yield row and column of each cell of the table of options, except for those that are not offered."""
    head = next(line for line in OPTIONS.splitlines() if line.startswith("| option |"))
    names = [cell.strip() for cell in head.split("|")[2:-1]]
    table = head + OPTIONS.split(head)[1].split("\n\n")[0]
    for name, *texts in rows(table):
        offered = (text not in ("refused", "needs a pipeline") for text in texts)
        yield from ((name, column) for column, is_offered in zip(names, offered, strict=True) if is_offered)


@pytest.mark.parametrize(("row", "column"), list(cells()))
def test_a_cell_has_a_layout_on_several_ranks(row: str, column: str) -> None:
    def is_among(layouts: Iterator[Compared]) -> bool:
        return any(ROWS[row](layout) and COLUMNS[column](layout) for layout in layouts)

    if (row, column) in GPUS_ALONE:
        assert is_among(on_gpus())
    assert is_among(on_the_cpu()) != ((row, column) in GPUS_ALONE)
