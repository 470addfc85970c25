"""The gradient and the changed weights of one optimizer step, computed in several ways that must not matter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppojob_api.v1alpha1.algorithm import KL, AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec, LossAggregation
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Meta
from tests.unit.trainer.engines.fsdp_engines import critic_engine, policy_engine
from tests.unit.trainer.engines.tiny_llama import make_batch

ROWS = 8
TEMPERATURE = 0.7
KL_IN_LOSS = AlgorithmSpec(kl=KL(in_loss=True, loss_coefficient=0.1))
ENTROPY_COEFFICIENT = 0.02
ROLES = ("actor", "critic")


@dataclass(frozen=True)
class Way:
    """How the same minibatch is gone through: tokens of a micro-batch, and the order of its rows."""

    max_tokens: int
    order: tuple[int, ...] = tuple(range(ROWS))


WAYS = {
    "one micro-batch": Way(1000),
    "micro-batches by tokens": Way(33),
    # The longest sequence has 16 tokens, and no two fit.
    "one sequence at a time": Way(16),
    "rows backwards": Way(33, tuple(reversed(range(ROWS)))),
    "rows shuffled": Way(1000, (5, 0, 3, 6, 1, 7, 2, 4)),
}


def whole_batch() -> DataProto:
    """One minibatch of eight rows of 2 to 16 tokens."""
    batch = make_batch(ROWS, num_mini_batches=1)
    batch.meta_info[Meta.TEMPERATURE] = TEMPERATURE
    return batch


def one_step(parallel: ParallelMesh, model: Path, role: str, way: Way, aggregation: LossAggregation) -> dict[str, Any]:
    """Return the gradient before clipping and the weights after the step, whole and in float32, and the metrics."""
    peers = parallel.dims.model_parallel
    part, number = ROWS * peers // parallel.world_size, parallel.rank // peers
    batch = whole_batch()[list(way.order[number * part : (number + 1) * part])]
    engine = _engine(parallel, model, role, way, aggregation)
    gradients: dict[str, Tensor] = {}
    clip = engine.optimizer.clip

    def observed_clip() -> Tensor:
        gradients.update(_whole_gradients(engine.module))
        return clip()

    engine.optimizer.clip = observed_clip  # type: ignore[method-assign]
    before = _weights(engine.module)
    metrics = engine.update(batch)
    return {"gradients": gradients, "before": before, "weights": _weights(engine.module), "metrics": metrics}


def all_ways(parallel: ParallelMesh, model: Path, _batch: DataProto, _folder: Path) -> dict[str, Any]:
    """What every way gives, by role, aggregation and name."""
    return {
        f"{role} {aggregation.value} {name}": one_step(parallel, model, role, way, aggregation)
        for role in ROLES
        for aggregation in LossAggregation
        for name, way in WAYS.items()
    }


def _engine(parallel: ParallelMesh, model: Path, role: str, way: Way, aggregation: LossAggregation) -> FSDPEngine:
    settings = {"learning_rate": 1e-3, "max_tokens_per_gpu": way.max_tokens, "loss_aggregation": aggregation}
    run: dict[str, Any] = {"total_steps": 10, "dtype": torch.float32}
    if role == "critic":
        spec = CriticSpec(**settings, clip_range_value=0.2)
        return critic_engine(parallel, TrainedModel(gradient_checkpointing=False), str(model), spec, seed=1, **run)
    training = ActorSpec(**settings, entropy_coefficient=ENTROPY_COEFFICIENT)
    actor = ActorModel(path=str(model), gradient_checkpointing=False)
    return policy_engine(parallel, actor, training, KL_IN_LOSS, **run)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(parameter.detach()) for name, parameter in module.named_parameters()}


def _whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()
