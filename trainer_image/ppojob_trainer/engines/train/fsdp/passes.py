"""The order in which a model computes micro-batches: one after the other, or as a pipeline.

Called by the engine. Both give the same numbers: an optimizer step is on the sum of all micro-batches' gradients.

    InOrder      forward, backward, forward, backward, ...
    Pipelined    1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2) by torch.distributed.pipelining:

        stage 0    F0 F1 ........ B0 F2 ... B1 F3 ...        F: forward, B: backward of a micro-batch
        stage 1       F0 B0 F1 B1 ...

If ranks have several stages, it is the interleaved 1F1B of the same section: a rank computes as many micro-batches as
there are ranks in one of its stages, then in the next one. A rank's stages take the micro-batches in the same order.

Packed micro-batches have different numbers of tokens, and the schedule's messages one size. So the hidden states are
padded to the widest micro-batch of the pass when they are sent, and cut again when they are received: padding costs
bytes between two stages, and no arithmetic. FSDP sees ordinary forward and backward passes, so it gathers layers and
reduces gradients as without a pipeline.

Suffixes: T tokens of the widest micro-batch, D size of the hidden states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from ppojob_trainer.engines.train.batch import MicroBatch, MicroBatchPlan
from ppojob_trainer.engines.train.pipeline import PipelinePeers

__all__ = ["Compute", "InOrder", "Passes", "Pipelined", "Received", "in_window"]

_WINDOW: Final = 8
_YES: Final = torch.ones(1, dtype=torch.int32)


def in_window(size: int, virtual: int) -> int:
    """Return the micro-batches of one forward pass's schedule, of `size` ranks with `virtual` stages each.

    The schedule has a receive buffer for each, in each stage: more of them would take memory, fewer would leave the
    ranks idle for longer. So it does not depend on `virtual` how much of their time they wait.
    """
    return max(size, _WINDOW * size // virtual)


class Received:
    """What a stage receives for a micro-batch: hidden states [T, D], which the first stage does not receive, and T.

    stage: its number; is_last: whether it is the pipeline's last stage. balance: the sums of the load-balancing loss
    over the layers of earlier stages; None: there are none.
    """

    def __init__(
        self,
        hidden: Tensor | None,
        width: int,
        stage: int = 0,
        *,
        is_last: bool = False,
        balance: Tensor | None = None,
    ) -> None:
        self.hidden, self.width, self.stage, self.is_last, self.balance = hidden, width, stage, is_last, balance


Compute: TypeAlias = Callable[[MicroBatch, "Received | None"], tuple[Tensor, ...]]
"""Computes the model's outputs of a micro-batch; of a stage before the last the hidden states [T, D] and, in training
with a load-balancing loss, its sums so far."""
Loss: TypeAlias = Callable[[MicroBatch, tuple[Tensor, ...]], Tensor]


class Passes(Protocol):
    """Runs a number of micro-batches through the model."""

    def forward(
        self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute
    ) -> list[tuple[Tensor, Sequence[Tensor]]]:
        """Return each micro-batch's indices and outputs, on the stage that has them; on the others nothing."""
        ...

    def backward(self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute, loss: Loss) -> None:
        """Add the gradients of the losses of all micro-batches."""
        ...


class InOrder:
    """`Passes` of ranks that have all layers."""

    def __init__(self, before_backward: Callable[[bool], None]) -> None:
        """`before_backward` is called with whether a micro-batch is the last one."""
        self._before_backward = before_backward

    def forward(
        self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute
    ) -> list[tuple[Tensor, Sequence[Tensor]]]:
        """See `Passes`."""
        return [(micro.indices, compute(micro, None)) for micro in micros]

    def backward(self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute, loss: Loss) -> None:
        """See `Passes`."""
        for at, micro in enumerate(micros, start=1):
            self._before_backward(at == plan.number)
            # No name for the outputs: the next forward pass must not find this graph in memory.
            torch.autograd.backward(loss(micro, compute(micro, None)))


class Pipelined:
    """`Passes` of a rank of a pipeline."""

    def __init__(
        self,
        peers: PipelinePeers,
        hidden: Tensor,
        before_backward: Callable[[bool], None],
        replay: Callable[[Tensor | None], None] = lambda _: None,
        balance: Tensor | None = None,
    ) -> None:
        """Take what all passes have in common.

        Args:
            hidden: [D], of the device and the dtype of hidden states.
            replay: called before a backward pass, with the recorded experts of its micro-batch: later micro-batches may
                have changed those that a recomputed layer takes over.
            balance: of the form of `Received.balance`; None: there is no load-balancing loss.
        """
        self._peers, self._hidden, self._before_backward = peers, hidden, before_backward
        self._replay, self._balance = replay, balance
        self._is_connected = False

    def forward(
        self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute
    ) -> list[tuple[Tensor, Sequence[Tensor]]]:
        """See `Passes`."""
        found: list[tuple[Tensor, Sequence[Tensor]]] = []

        def finish(micro: MicroBatch, outputs: tuple[Tensor, ...]) -> Tensor:
            found.append((micro.indices, outputs))
            # The schedule wants an output, and nobody reads it.
            return self._hidden

        peers = self._peers
        most = in_window(peers.size, peers.virtual)
        for first in range(0, plan.number, most):
            size = min(most, plan.number - first)
            stages = self._stages(islice(micros, size), plan.width, compute, finish, is_trained=False)
            schedule = ScheduleGPipe(stages[0], size) if peers.virtual == 1 else ScheduleLoopedBFS([*stages], size)
            schedule.step(return_outputs=False)
            self._is_connected = True
        return found

    def backward(self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute, loss: Loss) -> None:
        """See `Passes`."""
        peers = self._peers
        stages = self._stages(micros, plan.width, compute, loss, is_trained=True)
        schedule: _Interleaved | Schedule1F1B | ScheduleGPipe
        if peers.virtual > 1:
            schedule = _Interleaved(stages, plan.number)
        else:
            # 1F1B refuses fewer micro-batches than stages, with which it would be the other schedule.
            kind = Schedule1F1B if plan.number >= peers.size else ScheduleGPipe
            schedule = kind(stages[0], plan.number, _as_it_is, scale_grads=False)
        target = torch.zeros(plan.number) if peers.is_last else None
        schedule.step(target=target, return_outputs=False)
        self._is_connected = True

    def _stages(
        self, micros: Iterable[MicroBatch], width: int, compute: Compute, finish: Loss, *, is_trained: bool
    ) -> list[_Stage]:
        """Return this rank's stages. Each computes all micro-batches; the last one gives its outputs to `finish`."""
        peers = self._peers
        message = torch.empty(
            (width, *self._hidden.shape), dtype=self._hidden.dtype, device="meta", requires_grad=is_trained
        )
        sent: tuple[Tensor, ...] = (message,)
        if is_trained and self._balance is not None:
            sent = (message, torch.empty_like(self._balance, device="meta", requires_grad=True))

        def stage(number: int, own: Iterator[MicroBatch]) -> _Stage:
            is_last, recorded = number == peers.num_stages - 1, dict[int, Tensor | None]()
            numbers = count()

            def run(hidden: Tensor | None = None, balance: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
                micro = next(own)
                if is_trained:
                    recorded[next(numbers)] = micro.tokens.experts
                outputs = compute(micro, Received(hidden, width, number, is_last=is_last, balance=balance))
                return finish(micro, outputs) if is_last else outputs

            def before_backward(micro: int, is_last_of_rank: bool) -> None:
                self._replay(recorded.pop(micro))
                self._before_backward(is_last_of_rank)

            return _Stage(
                _Function(run),
                number,
                peers.num_stages,
                self._hidden.device,
                input_args=() if number == 0 else sent,
                output_args=sent,
                group=peers.group,
            ).calling(before_backward, is_connected=self._is_connected)

        return [stage(number, own) for number, own in zip(peers.stages, _shared(micros, peers.virtual), strict=True)]


def _shared(micros: Iterable[MicroBatch], number: int) -> list[Iterator[MicroBatch]]:
    """Return iterators over the same micro-batches, each of which is freed when all have passed it.

    `itertools.tee` frees several dozen at a time.
    """
    source, waiting = iter(micros), [deque[MicroBatch]() for _ in range(number)]

    def own(mine: deque[MicroBatch]) -> Iterator[MicroBatch]:
        while True:
            if not mine:
                try:
                    micro = next(source)
                except StopIteration:
                    return
                for each in waiting:
                    each.append(micro)
                del micro
            yield mine.popleft()

    return [source] if number == 1 else [own(mine) for mine in waiting]


class _Function(nn.Module):
    """A stage's function as a module without parameters. As FSDP's own module, the schedule would take over its
    gathering and reducing, and keep the stage's parameters and their gradients whole through a step."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._function(*received)


class _Interleaved(ScheduleInterleaved1F1B):
    """Interleaved 1F1B of any number of micro-batches.

    torch's order is that of rounds with equally many of them. With others, it is the order of as many as fill the last
    round, without those that do not exist: what depends on one another is of the same micro-batch.
    """

    def __init__(self, stages: list[_Stage], number: int) -> None:
        self._number = number
        size = stages[0].group_size
        super().__init__([*stages], -(-number // size) * size, _as_it_is, scale_grads=False)

    def _prepare_schedule_with_comms(self, actions: Any, *rest: Any, **named: Any) -> None:
        self._n_microbatches = self._number
        own = {
            rank: [action for action in order if action is not None and action.microbatch_index < self._number]
            for rank, order in actions.items()
        }
        super()._prepare_schedule_with_comms(own, *rest, **named)


class _Stage(PipelineStage):
    """A stage that announces its backward passes by their micro-batch; the last one is the rank's, in its first stage.

    Before a schedule, stages ask each other by messages whether all know the sizes of what they receive, and the host
    waits for the answer. Ours always know; only the first schedule asks, because this also opens the connections.
    """

    def calling(self, before_backward: Callable[[int, bool], None], *, is_connected: bool) -> _Stage:
        self._before_backward, self._is_connected = before_backward, is_connected
        return self

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return _YES if self._is_connected else super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return _YES if self._is_connected else super()._warmup_backward_result(received_result)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        # Without gradients, the schedule of several stages calls it too.
        if self.has_backward:
            self._before_backward(bwd_chunk_id, last_backward and self.stage_index < self.group_size)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


def _as_it_is(output: Tensor, _: Tensor) -> Tensor:
    return output
