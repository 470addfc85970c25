"""The order in which a model computes micro-batches: one after the other, or as a pipeline.

Called by the engine. Both give the same numbers: an optimizer step is on the sum of all micro-batches' gradients.

    InOrder      forward, backward, forward, backward, ...
    Pipelined    1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2) by torch.distributed.pipelining:

        stage 0    F0 F1 ........ B0 F2 ... B1 F3 ...        F: forward, B: backward of a micro-batch
        stage 1       F0 B0 F1 B1 ...

Packed micro-batches have different numbers of tokens, and the schedule's messages one size. So the hidden states are
padded to the widest micro-batch of the pass when they are sent, and cut again when they are received: padding costs
bytes between two stages, and no arithmetic. FSDP sees ordinary forward and backward passes, so it gathers layers and
reduces gradients as without a pipeline.

Suffixes: T tokens of the widest micro-batch, D size of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ppojob_trainer.engines.train.batch import MicroBatch, MicroBatchPlan
from ppojob_trainer.engines.train.pipeline import PipelinePeers

__all__ = ["Compute", "InOrder", "Passes", "Pipelined", "Received"]

WINDOW: Final = 8
"""Micro-batches for each stage of one forward pass's schedule, which has a receive buffer for each: more of them would
take memory, fewer would leave the stages idle for longer."""


class Received:
    """What a stage receives for a micro-batch: hidden states [T, D], and T. None of both is received by stage 0."""

    def __init__(self, hidden: Tensor | None, width: int) -> None:
        self.hidden, self.width = hidden, width


Compute: TypeAlias = Callable[[MicroBatch, "Received | None"], tuple[Tensor, ...]]
"""Computes the model's outputs of a micro-batch; of a stage before the last, one output, the hidden states [T, D]."""
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
    """`Passes` of a pipeline stage."""

    def __init__(
        self,
        peers: PipelinePeers,
        hidden: Tensor,
        before_backward: Callable[[bool], None],
    ) -> None:
        """`hidden`: [D], of the device and the dtype of hidden states."""
        self._peers, self._hidden, self._before_backward = peers, hidden, before_backward

    def forward(
        self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute
    ) -> list[tuple[Tensor, Sequence[Tensor]]]:
        """See `Passes`."""
        found: list[tuple[Tensor, Sequence[Tensor]]] = []

        def run(hidden: Tensor | None = None) -> Tensor:
            micro = next(micros)
            outputs = compute(micro, Received(hidden, plan.width))
            if not self._peers.is_last:
                return outputs[0]
            found.append((micro.indices, outputs))
            # The schedule wants an output, and nobody reads it.
            return self._hidden

        most = WINDOW * self._peers.size
        for first in range(0, plan.number, most):
            size = min(most, plan.number - first)
            stage = self._stage(run, plan.width, is_trained=False)
            ScheduleGPipe(stage, size).step(return_outputs=False)
        return found

    def backward(self, micros: Iterator[MicroBatch], plan: MicroBatchPlan, compute: Compute, loss: Loss) -> None:
        """See `Passes`."""

        def run(hidden: Tensor | None = None) -> Tensor:
            micro = next(micros)
            outputs = compute(micro, Received(hidden, plan.width))
            return loss(micro, outputs) if self._peers.is_last else outputs[0]

        stage = self._stage(run, plan.width, is_trained=True)
        # 1F1B refuses fewer micro-batches than stages, with which it would be the other schedule.
        kind = Schedule1F1B if plan.number >= self._peers.size else ScheduleGPipe
        schedule = kind(stage, plan.number, _as_it_is, scale_grads=False)
        target = torch.zeros(plan.number) if self._peers.is_last else None
        schedule.step(target=target, return_outputs=False)

    def _stage(self, run: Callable[..., Tensor], width: int, *, is_trained: bool) -> _Stage:
        peers = self._peers
        message = torch.empty(
            (width, *self._hidden.shape), dtype=self._hidden.dtype, device="meta", requires_grad=is_trained
        )
        return _Stage(
            _Function(run),
            peers.stage,
            peers.size,
            self._hidden.device,
            input_args=() if peers.is_first else message,
            output_args=message,
            group=peers.group,
        ).calling(self._before_backward)


class _Function(nn.Module):
    """A stage's function as a module without parameters. As FSDP's own module, the schedule would take over its
    gathering and reducing, and keep the stage's parameters and their gradients whole through a step."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *received: Tensor) -> Tensor:
        return self._function(*received)


class _Stage(PipelineStage):
    """A stage that announces its backward passes."""

    def calling(self, before_backward: Callable[[bool], None]) -> _Stage:
        self._before_backward = before_backward
        return self

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._before_backward(last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


def _as_it_is(output: Tensor, _: Tensor) -> Tensor:
    return output
