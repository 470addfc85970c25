"""A rank of a real pipeline, which writes how many bytes it held between updates and at most in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.objectives import PolicyObjective
from ppojob_trainer.planning.fake_device import LiveBytes
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.planning.batches import MICRO_BATCHES, PROMPT, RESPONSE, SEQUENCES, real_batch


def live_bytes(parallel: ParallelMesh, model: Path, _: DataProto, __: Path) -> dict[str, Any]:
    """Two updates with gradient checkpointing; the second one has AdamW's moments from the beginning."""
    training = ActorSpec(max_tokens_per_gpu=SEQUENCES * (PROMPT + RESPONSE))
    engine = FSDPEngine(EngineSetup(ActorModel(path=str(model)), training, PolicyObjective(training, AlgorithmSpec())))
    batch, live = real_batch(SEQUENCES * MICRO_BATCHES), LiveBytes()
    with live:
        engine.load(parallel, total_steps=2)
        engine.update(batch)
        idle = live.now
        live.restart()
        engine.update(batch)
        update = live.peak
        live.restart()
        engine.forward(batch)
    return {"idle": idle, "update": update, "forward": live.peak}
