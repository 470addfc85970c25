"""What a replica returns of a generation, and when: the real worker with its thread, over an engine of the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ppojob_trainer.engines.errors import EngineLostError, RolloutError, RolloutMemoryError
from ppojob_trainer.engines.rollout.options import Drafts
from ppojob_trainer.protocol import DataProto, Keys
from ppojob_trainer.protocol.ragged import Ragged
from ppojob_trainer.worker_groups.roles import rollout as rollout_module
from ppojob_trainer.worker_groups.roles.rollout import Collected, RolloutWorker
from ppojob_trainer.worker_groups.worker_process import WorkerContext

LITTLE_PATIENCE_S = 0.2


@dataclass
class Engine:
    """Finishes a prompt when the test says so; a response is its prompt's first token. Prompt 13 makes it fail."""

    loop: asyncio.AbstractEventLoop
    failure: Exception = field(default_factory=lambda: EngineLostError("vLLM's engine exited"))
    waiting: dict[int, asyncio.Event] = field(default_factory=dict)
    samplings: list[str] = field(default_factory=list)
    loss: EngineLostError | None = None

    async def stream(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: Any
    ) -> AsyncIterator[tuple[int, Any]]:
        self.samplings.append(sampling)
        events = [self.waiting.setdefault(prompt[0], asyncio.Event()) for prompt in prompts]
        for index, (prompt, event) in enumerate(zip(prompts, events, strict=True)):
            await event.wait()
            if prompt[0] == 13:
                raise self.failure
            yield index, prompt[0]

    def finish(self, *prompts: int) -> None:
        async def set_them() -> None:
            for prompt in prompts:
                self.waiting.setdefault(prompt, asyncio.Event()).set()

        asyncio.run_coroutine_threadsafe(set_them(), self.loop).result(120)


class Replica(RolloutWorker):
    """A replica without vLLM, whose rows are the numbers of their responses."""

    def __init__(self, log: Path) -> None:
        self.context = WorkerContext("rollout", 0, 1, 1, log, 120.0)
        self._loop = asyncio.new_event_loop()
        self.engine = Engine(self._loop)
        self._engine = cast("Any", self.engine)
        self._training, self._validation = cast("Any", "training"), cast("Any", "validation")
        self._drawn = rollout_module._Drawn(0)
        self.thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.thread.start()

    def _seeds(self, prompts: DataProto, step: int) -> list[int]:
        return [step] * len(prompts)

    def _batch(self, prompt_ids: list[list[int]], written: Sequence[Any]) -> DataProto:
        assert [prompt[0] for prompt in prompt_ids] == list(written)
        return cast("Any", list(written))

    def _drafts(self, written: Sequence[Any]) -> Drafts:
        return Drafts()

    def give(self, prompts: Sequence[int], generation: int = 1, is_validation: bool = False) -> None:
        batch = DataProto.from_dict({Keys.PROMPT_IDS: Ragged.from_rows([[prompt] for prompt in prompts], torch.int32)})
        self.begin(batch, [100 + prompt for prompt in prompts], 3, generation, is_validation)

    def find_too_few(self, num_rows: int) -> None:
        """Collect with little patience until a response is ready: nothing comes."""
        deadline = time.monotonic() + 60
        self._patience_s = LITTLE_PATIENCE_S
        while not self._drawn.ready:
            assert time.monotonic() < deadline, "no response is ready"
            assert self.collect(num_rows) is None
        self._patience_s = None

    def end(self) -> None:
        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(120)
        self._loop.close()


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr(rollout_module, "PATIENCE_S", 120.0)
    monkeypatch.setattr(rollout_module, "store_rows", lambda batch: batch)
    replica = Replica(tmp_path / "rollout-0.log")
    yield replica
    replica.end()


def test_responses_of_several_fills_come_under_their_numbers_as_they_finish(replica: Replica) -> None:
    replica.give([1, 2])
    replica.give([3])
    replica.engine.finish(3, 1)

    found = replica.collect(2)
    replica.engine.finish(2)

    assert isinstance(found, Collected)
    assert sorted(found.numbers) == [101, 103]
    assert replica.collect(1) == Collected((102,), cast("Any", [2]))


def test_too_few_responses_stay_until_there_are_enough(replica: Replica) -> None:
    replica.give([1])
    replica.give([2])
    replica.engine.finish(1)

    replica.find_too_few(2)
    replica.engine.finish(2)

    assert replica.collect(2) == Collected((101, 102), cast("Any", [1, 2]))


def test_a_failure_comes_after_everything_that_was_finished_before(replica: Replica) -> None:
    replica.give([1])
    replica.give([13])
    replica.engine.finish(1)
    replica.find_too_few(2)
    replica.engine.finish(13)

    assert replica.collect(2) == Collected((101,), cast("Any", [1]))
    with pytest.raises(EngineLostError, match="exited"):
        replica.collect(1)


def test_an_engine_that_is_given_up_while_vllm_runs_is_lost_with_its_unfinished_responses(replica: Replica) -> None:
    replica.give([1, 2])
    replica.engine.finish(1)
    replica.find_too_few(2)
    replica.engine.loss = EngineLostError("a worker waits for another one")
    replica._patience_s = LITTLE_PATIENCE_S

    assert replica.collect(2) == Collected((101,), cast("Any", [1]))
    for _ in range(2):
        with pytest.raises(EngineLostError, match="a worker waits"):
            replica.collect(1)


@pytest.mark.parametrize(
    ("failure", "log", "raised"),
    [
        (
            EngineLostError("exited"),
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
            RolloutMemoryError,
        ),
        (RolloutError("a request was refused"), "", RolloutError),
        (ValueError("of ours"), "", ValueError),
    ],
)
def test_out_of_memory_and_other_failures_are_no_loss_of_an_engine(
    replica: Replica, failure: Exception, log: str, raised: type[Exception]
) -> None:
    replica.context.log_file.write_text(log)
    replica.engine.failure = failure
    replica.give([13])
    replica.engine.finish(13)

    with pytest.raises(raised) as found:
        replica.collect(1)

    assert type(found.value) is raised


def test_a_new_generation_drops_the_rest_of_the_one_before(replica: Replica) -> None:
    replica.give([1, 2], generation=1)
    replica.engine.finish(1)
    replica.find_too_few(2)

    replica.give([3], generation=2, is_validation=True)
    replica.engine.finish(2, 3)

    assert replica.collect(1) == Collected((103,), cast("Any", [3]))
    assert replica.engine.samplings == ["training", "validation"]


def test_an_abort_ends_what_is_not_finished(replica: Replica) -> None:
    replica.give([1, 2, 3])
    replica.engine.finish(1)
    writing = replica._drawn.writing

    replica.abort()

    assert [task.cancelled() for task in writing] == [True]
    replica.give([4], generation=2)
    replica.engine.finish(2, 4)
    collected = replica.collect(1)
    assert collected is not None
    assert collected.numbers == (104,)
