"""The interleaved schedule: who computes what, for how long a rank waits, and what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from ppojob_trainer.engines.train.batch import num_passes
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.passes import Pipelined, _Interleaved
from ppojob_trainer.planning.fake_device import fake_ranks
from ppojob_trainer.planning.seconds import waits_of_update

FORWARD, BACKWARD = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
SECONDS = {FORWARD: 1, BACKWARD: 2}
SIZES = [(2, 2), (2, 3), (3, 2), (4, 2), (4, 3)]


@contextmanager
def orders(ranks: int, virtual: int, number: int) -> Iterator[list[list[_Action]]]:
    """The passes of each rank in their order."""
    with fake_ranks(ParallelDims(pipeline=ranks, virtual=virtual)) as parallel:
        assert parallel.pipeline is not None
        passes = Pipelined(parallel.pipeline, torch.zeros(2), lambda _: None)
        stages = passes._stages([], 4, lambda *_: (), lambda *_: torch.zeros(()), is_trained=True)
        found = _Interleaved(stages, number).pipeline_order_with_comms
        yield [[one for one in found[rank] if one.computation_type in SECONDS] for rank in range(ranks)]


def run(found: list[list[_Action]], num_stages: int) -> tuple[int, list[int]]:
    """Return the seconds of all passes, if no message takes time, and how many micro-batches each rank holds at most.

    A pass waits for the one of the stage before or, of a backward pass, behind.
    """
    ended: dict[tuple[_ComputationType, int, int], int] = {}
    times, held, most = [0] * len(found), [0] * len(found), [0] * len(found)
    waiting = [list(order) for order in found]
    while any(waiting):
        before = len(ended)
        for rank, order in enumerate(waiting):
            if not order:
                continue
            kind, stage, micro = order[0].computation_type, order[0].stage_index, order[0].microbatch_index
            assert micro is not None
            needed = {(kind, stage + (1 if kind is BACKWARD else -1), micro), (FORWARD, stage, micro)}
            needed = {one for one in needed if 0 <= one[1] < num_stages and one != (kind, stage, micro)}
            if needed <= ended.keys():
                order.pop(0)
                times[rank] = max([times[rank], *(ended[one] for one in needed)]) + SECONDS[kind]
                ended[kind, stage, micro] = times[rank]
                held[rank] += 1 if kind is FORWARD else -1
                most[rank] = max(most[rank], held[rank])
        assert len(ended) > before, "the ranks wait for one another"
    return max(times), most


@pytest.mark.parametrize(("ranks", "virtual"), SIZES)
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 9, 12])
def test_each_stage_computes_each_micro_batch_once_and_waits_as_planned(ranks: int, virtual: int, number: int) -> None:
    num_stages, of_a_pass = ranks * virtual, sum(SECONDS.values())

    with orders(ranks, virtual, number) as found:
        seconds, held = run(found, num_stages)

    counted = Counter((one.computation_type, one.stage_index) for order in found for one in order)
    assert counted == {(kind, stage): number for kind in SECONDS for stage in range(num_stages)}
    planned = of_a_pass * (virtual * number + waits_of_update(number, ranks, virtual))
    assert seconds == planned if number % ranks == 0 else seconds <= planned
    # Megatron-LM's warm-up, and the pass between it and the first backward pass.
    assert held[0] <= (virtual - 1) * ranks + 2 * (ranks - 1) + 1 < 2 * num_stages


def test_more_stages_of_a_rank_wait_for_less() -> None:
    plain, interleaved = (waits_of_update(8, 4, virtual) / (virtual * 8) for virtual in (1, 2))
    assert interleaved == plain / 2


@pytest.mark.parametrize(
    ("sequences", "ranks", "virtual", "expected"),
    [(9, 1, 1, 3), (9, 4, 1, 4), (9, 2, 2, 4), (9, 2, 1, 3), (3, 2, 2, 2), (1, 2, 2, 1), (12, 3, 2, 6), (4, 3, 2, 3)],
)
def test_a_minibatch_is_divided_into_rounds(sequences: int, ranks: int, virtual: int, expected: int) -> None:
    """Three sequences of 10 tokens fit into a micro-batch; a round has as many micro-batches as there are ranks."""
    assert num_passes([10] * sequences, 30, ranks, virtual) == expected


def test_too_few_sequences_for_a_round_are_a_micro_batch_each() -> None:
    assert num_passes([10] * 5, 10, 2, 2) == 5
