"""Compiled layers are planned with what torch.compile keeps for the backward pass."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.planning import role_memory
from ppojob_trainer.planning.fake_compiler import compile_on_fake_tensors
from ppojob_trainer.planning.fake_device import LiveBytes
from tests.unit.trainer.planning.measured import measure
from tests.unit.trainer.planning.test_role_memory import ALONE, SHARDED, work

ROWS, WIDTH = 512, 256
MIB_OF_ROWS = ROWS * WIDTH * 4 / 2**20


class Chain(nn.Module):
    """A product, a chain of pointwise operations with a reduction, and another product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [ROWS, WIDTH] to [ROWS, WIDTH]."""
        found = self.first(rows)
        found = nn.functional.silu(found) * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + 1e-6)
        result: Tensor = self.last(found + 1)
        return result


def kept_mib(*, is_compiled: bool) -> float:
    """Return what a pass through a chain keeps, with its result, in MiB."""
    live = LiveBytes()
    with FakeTensorMode(), live:
        chain, rows = Chain(), torch.ones(ROWS, WIDTH)
        if is_compiled:
            chain.compile()
            compile_on_fake_tensors(chain)
        chain(rows)
        before = live.now
        kept = chain(rows)
        found = (live.now - before) / 2**20
        del kept
    return found


def test_what_the_backward_pass_reads_is_kept() -> None:
    """The first product, the mean of each row, the input of the last product, and its result. Eager: also SiLU's."""
    planned, plain = (kept_mib(is_compiled=each) for each in (True, False))

    assert planned == pytest.approx(3 * MIB_OF_ROWS, rel=0.02)
    assert plain == pytest.approx(4 * MIB_OF_ROWS, rel=0.02)


@pytest.mark.slow
def test_a_layer_keeps_what_it_keeps_with_inductor() -> None:
    """A decoder layer, compiled for the CPU by Inductor itself."""
    config = Qwen2Config(hidden_size=64, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    sizes = []
    for is_planned in (False, True):
        torch._dynamo.reset()
        layer, rotary = Qwen2DecoderLayer(config, 0).bfloat16(), Qwen2RotaryEmbedding(config)
        layer.compile()
        if is_planned:
            compile_on_fake_tensors(layer)
        rows = torch.randn(1, 128, 64, dtype=torch.bfloat16, requires_grad=True)
        storages: dict[int, int] = {}

        def seen(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
            positions = torch.arange(128)[None]
            kept = layer(rows, position_embeddings=rotary(rows, positions), position_ids=positions)
        sizes.append(sum(storages.values()))
        del kept

    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.parametrize("dims", [ALONE, SHARDED], ids=str)
def test_a_role_with_compiled_layers_keeps_less(tmp_path: Path, dims: ParallelDims) -> None:
    plain = work(tmp_path, dims, gradient_checkpointing=False)
    found, without = (measure(replace(plain, options=replace(plain.options, compile=each))) for each in (True, False))

    states = ("num_parameters", "weights", "gradients", "optimizer", "traffic", "update_traffic")
    assert [getattr(found, name) for name in states] == [getattr(without, name) for name in states]
    assert found.update < without.update


def test_recomputed_layers_are_compiled_too(tmp_path: Path) -> None:
    counters.clear()
    planned = work(tmp_path, gradient_checkpointing=True)

    found = role_memory.measure(replace(planned, options=replace(planned.options, compile=True)))

    assert counters["stats"]["unique_graphs"] == 2  # of the pass without a backward pass, and of the update
    assert not counters["graph_break"]
    assert found.update == pytest.approx(measure(planned).update, rel=0.15)
