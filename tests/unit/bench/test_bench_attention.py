"""The comparison of attention kernels, with the trainer's own one on the processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ppojob_trainer.engines.train.fsdp import attention
from tests.bench.bench_attention import TINY, Found, measure, table


def test_the_trainers_attention_is_exact_on_the_processor() -> None:
    found = measure(TINY["tiny"], torch.device("cpu"))
    assert found.forward_ms > 0
    assert found.backward_ms > 0
    assert (found.output_error, found.gradient_error) == (0, 0)


def test_errors_of_a_kernel_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = attention.packed_attention

    def wrong(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
        output, _ = exact(*inputs, **options)
        return 1.5 * output, None

    monkeypatch.setattr(attention, "packed_attention", wrong)
    found = measure(TINY["tiny"], torch.device("cpu"))
    assert found.output_error == pytest.approx(0.5)
    assert found.gradient_error == pytest.approx(0.5)


def test_ratios_are_speeds_beside_the_first_kernel() -> None:
    shown = table({"a": {"torch": Found(2.0, 6.0, 0.0, 0.0), "vllm-fa4": Found(1.0, 4.0, 0.0, 0.0)}})
    assert [list(column.cells) for column in shown.columns[3:6:2]] == [["1.00", "2.00"], ["1.00", "1.50"]]
