"""Loaded FSDP engines of actor, critic and reference, as the roles create them."""

from __future__ import annotations

from typing import Any

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, FrozenModel, FrozenOffload, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.objectives import PolicyObjective, ValueObjective


def policy_engine(
    parallel: ParallelMesh, model: ActorModel, training: ActorSpec, algorithm: AlgorithmSpec, **run: Any
) -> FSDPEngine:
    """Return a policy; `run`: total_steps, stays_gathered, seed, dtype and replays_experts."""
    setup = EngineSetup(model, training, PolicyObjective(training, algorithm), **_of_setup(run))
    return _loaded(parallel, setup, **run)


def critic_engine(
    parallel: ParallelMesh, model: TrainedModel, actor_path: str, training: CriticSpec, **run: Any
) -> FSDPEngine:
    """Return a critic; without a path it loads the actor's weights."""
    model = model.model_copy(update={"path": model.path or actor_path})
    setup = EngineSetup(model, training, ValueObjective(training), has_value_head=True, **_of_setup(run))
    return _loaded(parallel, setup, **run)


def reference_engine(
    parallel: ParallelMesh,
    path: str,
    *,
    max_tokens_per_gpu: int,
    offload: FrozenOffload | None = None,
    stays_gathered: bool = False,
    compile: bool = False,
    **run: Any,
) -> FSDPEngine:
    """Return a reference."""
    model = FrozenModel(path=path, offload=offload or FrozenOffload(), compile=compile)
    setup = EngineSetup(model, ActorSpec(max_tokens_per_gpu=max_tokens_per_gpu), objective=None, **run)
    return _loaded(parallel, setup, total_steps=0, stays_gathered=stays_gathered)


def _of_setup(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run.pop(name) for name in ("seed", "dtype", "replays_experts") if name in run}


def _loaded(
    parallel: ParallelMesh, setup: EngineSetup, *, total_steps: int, stays_gathered: bool = False
) -> FSDPEngine:
    engine = FSDPEngine(setup)
    engine.load(parallel, total_steps=total_steps, stays_gathered=stays_gathered)
    return engine
