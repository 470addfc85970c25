"""Compares kernels for attention over packed sequences on one GPU: forward and backward pass, one after the other.

    python -m tests.bench.bench_attention --output DIR [--kernels torch,vllm-fa4]

`torch` is what the trainer uses: torch's varlen attention with its FlashAttention 2. `vllm-fa4` is FlashAttention 4,
whose kernels for Hopper and Blackwell come with vLLM, registered with torch for the same call; they are compiled at
their first use. Differences are to the same attention in float32, as shares of its largest
number: those of the kernels should be equally large. On a CPU, only `torch` runs, with the trainer's own code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import attention as torch_attention

from ppojob_trainer.engines.train.batch import Segments
from ppojob_trainer.engines.train.fsdp import attention
from tests.bench.bench_checkpoint import seconds_of

_VLLM_FA4: Final = "vllm.vllm_flash_attn.cute.interface"
KERNELS: Final = ("torch", "vllm-fa4")
_WARM_UP, _REPEATS = 3, 10


@dataclass(frozen=True)
class Case:
    """Sequences of equal length; query heads, key heads and the size of a head."""

    sequences: int
    length: int
    heads: int
    key_heads: int
    size: int


CASES: Final[dict[str, Case]] = {
    "7 B, 24 x 642": Case(24, 642, 28, 4, 128),
    "0.5 B, 24 x 642": Case(24, 642, 14, 2, 64),
    "30B-A3B, 8 x 2,030": Case(8, 2030, 32, 4, 128),
    "7 B, 1 x 32,768": Case(1, 32_768, 28, 4, 128),
}
TINY: Final = {"tiny": Case(2, 24, 4, 2, 16)}


@dataclass(frozen=True)
class Found:
    """Milliseconds of a pass, and the largest differences to float32 of outputs and of gradients."""

    forward_ms: float
    backward_ms: float
    output_error: float
    gradient_error: float


def main() -> None:
    """Measure, print, and write `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kernels", default="torch")
    arguments = parser.parse_args()
    kernels = arguments.kernels.split(",")
    if unknown := [name for name in kernels if name not in KERNELS]:
        parser.error(f"--kernels {unknown[0]}: take some of {', '.join(KERNELS)}")
    # What is registered with torch stays.
    kernels.sort(key=KERNELS.index)
    has_gpu = torch.cuda.is_available()
    found: dict[str, dict[str, Found]] = {name: {} for name in (CASES if has_gpu else TINY)}
    for kernel in kernels:
        if kernel == "vllm-fa4":
            _activate_fa4()
        for name, case in (CASES if has_gpu else TINY).items():
            found[name][kernel] = measure(case, torch.device("cuda" if has_gpu else "cpu"))
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = {name: {kernel: asdict(one) for kernel, one in of_case.items()} for name, of_case in found.items()}
    (arguments.output / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    Console(width=130).print(table(found))


def measure(case: Case, device: torch.device) -> Found:
    """Return the medians of several passes of the kernel that is active, and how far its numbers are from float32's."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = case.sequences * case.length
    shapes = [(1, heads, tokens, case.size) for heads in (case.heads, case.key_heads, case.key_heads)]
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    outer = torch.randn(1, tokens, case.heads, case.size, device=device, dtype=dtype)
    segments = _segments(case, device)

    def forward() -> Tensor:
        output, _ = attention.packed_attention(torch.nn.Module(), *inputs, None, segments=segments)
        return output

    output = forward()
    gradients = torch.autograd.grad(output, inputs, outer)
    exact_output, exact_gradients = _exact(case, inputs, outer)
    first = slice(0, case.length)
    output_error = _distance(output[:, first], exact_output)
    gradient_error = max(
        _distance(one[:, :, first], exact) for one, exact in zip(gradients, exact_gradients, strict=True)
    )
    outputs: list[Tensor] = []
    forward_s = _median(lambda: outputs.append(forward()))
    # Each output has one backward pass.
    backward_s = _median(lambda: torch.autograd.grad(outputs.pop(), inputs, outer))
    return Found(1e3 * forward_s, 1e3 * backward_s, output_error, gradient_error)


def table(found: dict[str, dict[str, Found]]) -> Table:
    """Return a row for each case and kernel; ratios are speeds divided by the first kernel's."""
    shown = Table(
        "sequences", "kernel", "forward ms", "ratio", "backward ms", "ratio", "output error", "gradient error"
    )
    for name, of_case in found.items():
        base = next(iter(of_case.values()))
        for kernel, one in of_case.items():
            shown.add_row(
                name,
                kernel,
                f"{one.forward_ms:.3f}",
                f"{base.forward_ms / one.forward_ms:.2f}",
                f"{one.backward_ms:.3f}",
                f"{base.backward_ms / one.backward_ms:.2f}",
                f"{one.output_error:.1e}",
                f"{one.gradient_error:.1e}",
            )
    return shown


def _activate_fa4() -> None:
    """Let torch's varlen attention call vLLM's FlashAttention 4 from now on."""
    module = importlib.import_module("torch.nn.attention._fa4")
    register = module.register_flash_attention_fa4
    torch_attention.register_flash_attention_impl("vllm-fa4", register_fn=lambda: register(_VLLM_FA4))
    torch_attention.activate_flash_attention_impl("vllm-fa4")


def _segments(case: Case, device: torch.device, number: int | None = None) -> Segments:
    lengths = (case.length,) * (case.sequences if number is None else number)
    ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * case.length
    return Segments(ends, lengths)


def _exact(case: Case, inputs: list[Tensor], outer: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return output and gradients of the first sequence in float32."""
    exact = [one.detach()[:, :, : case.length].float().requires_grad_() for one in inputs]
    # The trainer's code for processors: SDPA of each sequence.
    output = attention._one_by_one(*exact, _segments(case, outer.device, 1), attention._Scores(None, None))
    gradients = torch.autograd.grad(output, exact, outer[:, : case.length].float())
    return output.detach(), gradients


def _distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().float() - exact).abs().max() / exact.abs().max())


def _median(work: Callable[[], object]) -> float:
    seconds = [seconds_of(work) for _ in range(_WARM_UP + _REPEATS)]
    return statistics.median(seconds[_WARM_UP:])


if __name__ == "__main__":
    main()
