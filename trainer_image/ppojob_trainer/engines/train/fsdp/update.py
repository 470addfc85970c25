"""The two kinds of passes over a batch: computing a result for every sequence, and PPO's minibatch updates.

Called by the policy and critic engines with the function for a micro-batch, which is all that differs. All ranks divide
their shards into the same number of micro-batches and minibatches, because each involves collectives. Losses and
metrics are shares of the whole minibatch over all ranks (`maths.losses`), so neither the micro-batches nor the number
of ranks changes a gradient. The host reads nothing from the device before the end of an update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ppojob_trainer.engines.train.batch import (
    EngineMeta,
    MicroBatch,
    MicroBatchPlan,
    build_micro_batches,
    sequence_lengths,
    split_minibatches,
)
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.maths.losses import Denominators, Loss
from ppojob_trainer.maths.packing import num_micro_batches
from ppojob_trainer.protocol import DataProto, Keys, Meta, ProtocolError, Ragged

LossOf = Callable[[MicroBatch, Denominators], Loss]


@dataclass
class UpdateResult:
    """The result of an update, over all ranks.

    shares: for each metric the sum over the optimizer steps. grad_norms: of every step, skipped ones too.
    num_tokens, num_policy_tokens, num_token_pairs: sums over all passes of the sequences' lengths, of their
    response_mask, and of their squared lengths, for the count of operations.
    """

    num_steps: int
    num_skipped: int
    learning_rate: float
    shares: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: float = 0.0
    num_policy_tokens: float = 0.0
    num_token_pairs: float = 0.0
    seconds: float = 0.0

    def mean(self, name: str) -> float:
        """Mean over the optimizer steps."""
        return self.shares[name] / self.num_steps


class Passes:
    """Runs passes over batches with one sharded module."""

    def __init__(
        self, parallel: ParallelMesh, module: nn.Module, max_tokens: int, *, stays_gathered: bool = False
    ) -> None:
        self.parallel = parallel
        self.module = module
        self._is_reduced_once = stays_gathered and parallel.num_averaged > 1
        # Of a whole micro-batch; with sequence parallelism a rank computes a slice of it.
        self.max_tokens = max_tokens * parallel.sequence_size

    @torch.no_grad()
    def compute(
        self, batch: DataProto, names: Sequence[str], forward: Callable[[MicroBatch], Sequence[Tensor]]
    ) -> DataProto:
        """Return what `forward` gives for every micro-batch ([b, R] for each name) as ragged columns on the CPU."""
        self.module.eval()
        (plan,) = self._plans([batch])
        mask = batch.ragged(Keys.RESPONSE_MASK)
        width = int(mask.lengths.max())
        found: list[tuple[Tensor, Sequence[Tensor]]] = []
        for micro in build_micro_batches(batch, plan, (), width, self.parallel.device, self.parallel.sequence):
            found.append((micro.indices, forward(micro)))
        order = torch.cat([indices for indices, _ in found]).argsort()
        outputs = {
            name: Ragged.concat([mask.take(indices).unpadded(each[number].float().cpu()) for indices, each in found])
            for number, name in enumerate(names)
        }
        # A pass without backward leaves parameters gathered, and the copies would be stale after the next update.
        _reshard(self.module)
        return DataProto.from_dict({name: column.take(order) for name, column in outputs.items()})

    def update(self, batch: DataProto, fields: Sequence[str], optimizer: Optimizer, loss_of: LossOf) -> UpdateResult:
        """Run the epochs and minibatches that `batch.meta_info` asks for. Collective."""
        started = time.perf_counter()
        epochs, minibatches = (
            _meta(batch, EngineMeta.EPOCHS),
            split_minibatches(batch, _meta(batch, EngineMeta.NUM_MINI_BATCHES)),
        )
        counts = self.parallel.sum(
            torch.stack([Denominators.of(part.padded(Keys.RESPONSE_MASK)).to_tensor() for part in minibatches])
        )
        denominators = [Denominators.from_tensor(row) for row in counts]
        plans = self._plans(minibatches)
        self.module.train()
        result = UpdateResult(epochs * len(minibatches), 0, optimizer.learning_rate)
        sums: dict[str, Tensor] = {}
        norms: list[Tensor] = []
        for _ in range(epochs):
            for part, denominator, plan in zip(minibatches, denominators, plans, strict=True):
                for micro in self._of_step(part, plan, fields):
                    self._backward(micro, denominator, loss_of, sums)
                # Gathered parameters would be stale after the step, and the optimizer needs the shards.
                _reshard(self.module)
                norms.append(optimizer.step())
        result.grad_norms = optimizer.finish_update(norms)
        result.num_skipped = sum(not math.isfinite(norm) for norm in result.grad_norms)
        self._reduce(result, sums, batch, epochs)
        result.seconds = time.perf_counter() - started
        return result

    def warm_up(self, batch: DataProto, fields: Sequence[str], loss_of: LossOf) -> None:
        """Run forward and backward as an update does, and drop the gradients. Collective."""
        self.module.train()
        denominators = Denominators.of(batch.padded(Keys.RESPONSE_MASK))
        (plan,) = self._plans([batch])
        for micro in self._micro_batches(batch, plan, fields):
            self._backward(micro, denominators, loss_of, {})
        _reshard(self.module)
        self.module.zero_grad(set_to_none=True)

    def _of_step(self, minibatch: DataProto, plan: MicroBatchPlan, fields: Sequence[str]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an optimizer step; if requested, gradients are reduced only in the last one."""
        for number, micro in enumerate(self._micro_batches(minibatch, plan, fields), start=1):
            if self._is_reduced_once:
                cast(FSDPModule, self.module).set_requires_gradient_sync(number == plan.number)
            yield micro

    def _micro_batches(self, part: DataProto, plan: MicroBatchPlan, fields: Sequence[str]) -> Iterator[MicroBatch]:
        width = _meta(part, EngineMeta.RESPONSE_LENGTH)
        return build_micro_batches(part, plan, fields, width, self.parallel.device, self.parallel.sequence)

    def _backward(
        self, micro: MicroBatch, denominators: Denominators, loss_of: LossOf, sums: dict[str, Tensor]
    ) -> None:
        loss, shares = loss_of(micro, denominators)
        # FSDP averages gradients over ranks, and the shares of all ranks must add up.
        torch.autograd.backward(loss * self.parallel.num_averaged)
        for name, share in shares.items():
            sums[name] = sums[name] + share if name in sums else share

    def _reduce(self, result: UpdateResult, sums: dict[str, Tensor], batch: DataProto, epochs: int) -> None:
        lengths = batch.ragged(Keys.INPUT_IDS).lengths.double()
        policy_tokens = batch.ragged(Keys.RESPONSE_MASK).values.sum().double()
        work = torch.stack([lengths.sum(), policy_tokens, lengths.square().sum()]) * epochs
        shares = torch.stack([share.double() for share in sums.values()]).cpu()
        *summed, tokens, policy, pairs = self.parallel.sum(torch.cat([shares, work])).tolist()
        result.shares = dict(zip(sums, summed, strict=True))
        result.num_tokens, result.num_policy_tokens, result.num_token_pairs = tokens, policy, pairs

    def _plans(self, parts: Sequence[DataProto]) -> list[MicroBatchPlan]:
        mine = [num_micro_batches(sequence_lengths(part), self.max_tokens) for part in parts]
        return [MicroBatchPlan(int(most), self.max_tokens) for most in self.parallel.max(torch.tensor(mine))]


def temperature_of(batch: DataProto) -> float:
    """Return the temperature at which the responses were sampled.

    Raises:
        ProtocolError: the batch does not say.
    """
    return float(_entry(batch, Meta.TEMPERATURE))


def _meta(batch: DataProto, key: str) -> int:
    return int(_entry(batch, key))


def _entry(batch: DataProto, key: str) -> float:
    if key not in batch.meta_info:
        raise ProtocolError(
            f"the batch has no meta_info entry {key!r}, which the engine needs; there are {sorted(batch.meta_info)}"
        )
    value: float = batch.meta_info[key]
    return value


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
