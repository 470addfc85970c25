"""A worker that continues in the next attempt: what prepared it is not done again, and what was begun is ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.errors import (
    CheckpointUnwritableError,
    EngineError,
    EngineLostError,
    WeightLinkError,
    WeightReceiptError,
)
from ppojob_trainer.protocol import DataProto, Keys, Ragged
from ppojob_trainer.telemetry import CurrentPhase, within_phase
from ppojob_trainer.worker_groups import samples as kept_samples
from ppojob_trainer.worker_groups.errors import GPUFaultError, NotRenewableError, SupersededError
from ppojob_trainer.worker_groups.roles.gpu_holder import GpuHolder
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.trained import EngineWorker
from ppojob_trainer.worker_groups.samples import SampleKeeper
from ppojob_trainer.worker_groups.worker_process import WorkerContext, WorkerProcess
from tests.bad_specs import GOOD
from tests.unit.trainer.worker_groups.test_rollout_collect import Replica

CONTEXT = WorkerContext(
    "role", rank=0, world_size=1, local_world_size=1, log_file=Path("/logs/role-0.log"), timeout_s=1
)


@dataclass
class Engine:
    """Counts its calls; `saves` are the answers to `is_saved`."""

    calls: list[str] = field(default_factory=list)
    saves: list[bool | EngineError] = field(default_factory=lambda: [True])

    def load(self, *_: Any, **__: Any) -> None:
        self.calls.append("load")

    def prepare_saves(self) -> None:
        self.calls.append("prepare_saves")

    def is_saved(self) -> bool:
        answer = self.saves.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return answer


class Trained(EngineWorker):
    def __init__(self) -> None:
        spec = resolve(parse_spec({**GOOD["spec"], "device": "CPU"}))
        super().__init__(CONTEXT, spec, spec.actor)
        self.fake = Engine()
        self._engine = cast("Any", self.fake)
        self._parallel = cast("Any", SimpleNamespace(connect=lambda: {"GLOO": 1}))

    @cached_property
    def setup(self) -> Any:
        return SimpleNamespace(model=SimpleNamespace(compile=False))


def test_a_model_is_loaded_once() -> None:
    worker = Trained()
    with pytest.raises(NotRenewableError, match="its model was not loaded yet"):
        worker.renew()

    for _ in range(2):
        worker.load(False, 3)
        worker.prepare_saves()
        worker.renew()
        worker.fake.saves = [True]

    assert worker.fake.calls == ["load", "prepare_saves"]


def test_a_save_of_the_last_attempt_ends_first_and_may_fail() -> None:
    worker = Trained()
    worker.load(False, 3)
    worker.fake.saves = [False, False, CheckpointUnwritableError("the folder is gone"), True]

    worker.renew()

    assert worker.fake.saves == []


def test_responses_that_are_generated_are_dropped_and_the_engine_must_live(tmp_path: Path) -> None:
    replica = Replica(tmp_path / "log")
    failures: list[Exception] = []

    def check() -> None:
        if failures:
            raise failures[0]

    vars(replica.engine)["check"] = check
    with pytest.raises(NotRenewableError, match="vLLM had not started yet"):
        RolloutWorker.renew(replica)
    replica._starting = cast("Any", SimpleNamespace(done=lambda: True))
    replica.give([1, 2])
    RolloutWorker.renew(replica)
    assert replica._drawn.number == 0
    failures.append(EngineLostError("vLLM's engine exited"))
    with pytest.raises(EngineLostError, match="vLLM's engine exited"):
        RolloutWorker.renew(replica)
    replica.end()


@dataclass
class Worker:
    renewals: int = 0

    def renew(self) -> None:
        self.renewals += 1


def process_of(worker: Any) -> WorkerProcess:
    """Return the object in the process, without Ray."""
    process = object.__new__(WorkerProcess)
    process._worker, process._context, process._failure, process._attempt = worker, CONTEXT, None, 0
    return process


def failing(error: Exception) -> Any:
    def call(_: Any) -> None:
        raise error

    return SimpleNamespace(function=call)


@pytest.mark.parametrize(
    ("error", "continues"),
    [
        (WeightLinkError("the engine is gone"), True),
        (WeightReceiptError("the actor is gone"), True),
        (CheckpointUnwritableError("the folder is gone"), True),
        (KeyError("x"), False),
    ],
)
def test_a_worker_whose_method_failed_does_not_continue(error: Exception, continues: bool) -> None:
    process = process_of(Worker())
    assert process.renew(1) == CONTEXT.log_file

    with pytest.raises(type(error)):
        process._computed(failing(error), [], {})

    if continues:
        assert process.renew(2) == CONTEXT.log_file
    else:
        with pytest.raises(NotRenewableError, match="a call has failed: KeyError: 'x'"):
            process.renew(2)
    assert process._worker.renewals == 1 + continues


def test_an_engines_other_node_continues_unless_its_workers_have_ended() -> None:
    holder = GpuHolder(CONTEXT, resolve(parse_spec(GOOD["spec"])), "actor")
    holder.renew()

    def ended() -> None:
        raise EngineLostError("vLLM's worker 1 exited")

    holder._follower = cast("Any", SimpleNamespace(check=ended))

    with pytest.raises(NotRenewableError, match="vLLM's worker 1 exited"):
        holder.renew()


@pytest.mark.parametrize("address", [None, "10.0.0.7"])
def test_a_failed_gpu_is_that_of_the_node_whose_worker_failed(address: str | None) -> None:
    error = WeightReceiptError("vLLM's worker 3 failed: CUDA error: uncorrectable ECC error encountered")
    error.address = address

    with pytest.raises(GPUFaultError) as caught:
        process_of(Worker())._computed(failing(error), [], {})

    assert caught.value.address == (address or CONTEXT.address)


def test_calls_of_an_earlier_attempt_are_refused() -> None:
    process = process_of(Worker())
    process.renew(4)

    with pytest.raises(SupersededError, match="attempt 3 calls, and the process works for attempt 4"):
        process.execute(cast("Any", None), (), {}, False, None, attempt=3)
    with pytest.raises(NotRenewableError, match="it works for attempt 4"):
        process.renew(4)


def test_samples_of_a_step_that_is_repeated_are_written_again(tmp_path: Path) -> None:
    keeper = SampleKeeper(CONTEXT, resolve(parse_spec(GOOD["spec"])))
    keeper._kept = {("reward", 6): 4}

    keeper.renew()

    assert keeper._kept == {}


def test_steps_that_are_scored_in_turns_have_their_samples_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With older weights, parts of several steps are scored between each other, and validations between them."""
    keeper, written = SampleKeeper(CONTEXT, resolve(parse_spec(GOOD["spec"]))), Counter[tuple[str, int]]()

    class Log:
        def write(self, samples: list[int], *, phase: str, step: int) -> None:
            written[phase, step] += len(samples)

    scored = DataProto.from_dict({Keys.TOKEN_LEVEL_SCORES: Ragged.from_rows([[0.5]], torch.float32)})
    keeper._log = Log()  # type: ignore[assignment]
    keeper._number = 3
    monkeypatch.setattr(kept_samples, "samples_of", lambda batch, scores, decoder, number, extras: [0] * min(2, number))
    for name, step in [("reward", 7), ("reward", 8), ("testing", 6), ("reward", 7), ("reward", 8), ("reward", 7)]:
        with within_phase(CurrentPhase(name, "reward", step, deadline=0.0)):
            keeper.keep(scored, None)  # type: ignore[arg-type]

    assert written == {("reward", 7): 3, ("reward", 8): 3, ("testing", 6): 2}


def test_every_worker_of_a_continuing_role_can_be_renewed() -> None:
    from ppojob_trainer.main import groups

    workers = [value for name, value in vars(groups).items() if name.endswith("Worker") or name == "GpuHolder"]

    assert len(workers) >= 8
    assert [worker.__name__ for worker in workers if not hasattr(worker, "renew")] == []
