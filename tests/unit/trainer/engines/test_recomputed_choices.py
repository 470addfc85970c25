"""A recomputed layer of a mixture has the experts of its first computation, whatever its router would choose then."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppojob_trainer.engines.train.fsdp import experts, model, routing
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.layers import ATTENTION_PART, prepare_layer
from ppojob_trainer.engines.train.fsdp.routing import routers
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines import gradient_ranks
from tests.unit.trainer.engines.test_engine_routing import (
    gradients_of_update,
    make_policy,
    next_but,
    random_recording,
)
from tests.unit.trainer.engines.tiny_experts import MIXTURES, save_tiny_experts


@pytest.fixture(scope="module", params=MIXTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_experts(tmp_path_factory.mktemp("experts") / request.param, family=request.param)


def choose_otherwise_again(policy: FSDPEngine) -> list[Tensor]:
    """Let the routers choose another second expert of each token in a backward pass; return those choices."""
    found: list[Tensor] = []

    def forward(compute: Any, hidden: Tensor) -> Any:
        logits, weights, chosen = compute(hidden)
        # As torch's checkpoint finds out whether a backward pass runs.
        if torch._C._current_graph_task_id() != -1:
            other = next_but(chosen[:, 0], chosen[:, 1])
            found.append(other)
            chosen = torch.stack([chosen[:, 0], other], dim=1)
        return logits, weights, chosen

    for _, router in routers(policy.module.backbone):
        setattr(router, routing._COMPUTE, partial(forward, getattr(router, routing._COMPUTE)))
    return found


def partly_recorded() -> DataProto:
    """Half of the choices are recorded; the routers choose the others."""
    batch = random_recording(gradient_ranks.whole_batch())
    column = batch.ragged("routed_experts")
    values = column.values.to(torch.int64)
    values[::2] = -1
    return batch.with_fields({"routed_experts": column.with_values(values)})


@pytest.mark.slow
# torch traces mixtral in a third of the time of the others.
@pytest.mark.parametrize(
    "path",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.long) for name in MIXTURES if name != "mixtral")],
    indirect=True,
)
# torch's tracer makes one of each of ours.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_layers_of_two_parts_keep_them_too(parallel: ParallelMesh, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with divided experts, which one rank does not have."""
    batch = gradient_ranks.whole_batch()
    expected = gradients_of_update(make_policy(parallel, path, gradient_checkpointing=False), batch)
    monkeypatch.setattr(
        model, "prepare_layer", lambda layer, **how: prepare_layer(layer, **how | {"gathers_experts": True})
    )
    # As in test_engine_compile: torch's tracing and partitioning without Inductor's code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", dynamic=True))
    torch.compiler.reset()

    policy = make_policy(parallel, path, gradient_checkpointing=True, compile=True)
    others = choose_otherwise_again(policy)
    assert_equal(gradients_of_update(policy, batch), expected)

    assert len(others) >= MIXTURES[path.name].num_sparse, "the layers are computed again"
    assert sum(hasattr(layer, ATTENTION_PART) for layer in policy.module.backbone.layers) > 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_gradients_are_those_of_the_first_choices(parallel: ParallelMesh, path: Path, is_recorded: bool) -> None:
    batch = partly_recorded() if is_recorded else gradient_ranks.whole_batch()
    expected = gradients_of_update(make_policy(parallel, path, gradient_checkpointing=False), batch)

    policy = make_policy(parallel, path, gradient_checkpointing=True)
    others = choose_otherwise_again(policy)
    found = gradients_of_update(policy, batch)

    assert len(others) >= MIXTURES[path.name].num_sparse, "the layers are computed again"
    assert_equal(found, expected)


def test_the_rows_of_a_layer_are_planned_once(
    parallel: ParallelMesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan = experts._planned

    def counted(module: Any, peers: Any, chosen: Tensor) -> Any:
        planned.append(id(module))
        return plan(module, peers, chosen)

    monkeypatch.setattr(experts, "_planned", counted)
    policy = make_policy(parallel, path, gradient_checkpointing=True)
    batch = gradient_ranks.whole_batch()
    policy.forward(batch)
    of_forward = len(planned)
    planned.clear()
    gradients_of_update(policy, batch)

    assert len(planned) == of_forward > 0, "not again in the backward pass"
    assert len(set(planned)) == MIXTURES[path.name].num_sparse


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(found[name] / scale, gradient / scale, atol=1e-4, rtol=0, msg=name)
