"""A rank of a real pipeline, which writes how many bytes it held between updates and at most in one."""

from __future__ import annotations

from collections.abc import Callable
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

_ROUNDS = 3


def live_bytes(parallel: ParallelMesh, model: Path, _: DataProto, __: Path) -> dict[str, Any]:
    """Several updates with gradient checkpointing; those after the first have AdamW's moments from the beginning.

    gloo's threads release the tensors of a collective a little after its end, and later on a busy machine: a number is
    the least of several rounds.
    """
    training = ActorSpec(max_tokens_per_gpu=SEQUENCES * (PROMPT + RESPONSE))
    engine = FSDPEngine(EngineSetup(ActorModel(path=str(model)), training, PolicyObjective(training, AlgorithmSpec())))
    batch, live = real_batch(SEQUENCES * MICRO_BATCHES), LiveBytes()

    def held(call: Callable[[DataProto], Any]) -> tuple[int, int]:
        """Bytes at the most in one call, and after it."""
        live.restart()
        call(batch)
        return live.peak, live.now

    def least(call: Callable[[DataProto], Any]) -> tuple[int, ...]:
        return tuple(map(min, zip(*(held(call) for _ in range(_ROUNDS)), strict=True)))

    with live:
        engine.load(parallel, total_steps=1 + _ROUNDS)
        engine.update(batch)
        update, idle = least(engine.update)
        forward = least(engine.forward)[0]
    return {"idle": idle, "update": update, "forward": forward}
