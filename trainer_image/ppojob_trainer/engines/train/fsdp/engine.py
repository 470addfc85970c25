"""The training engine with PyTorch's FSDP2: one rank of a policy or of a value model, trained or frozen.

Implements `TrainEngine`, whose docstrings say what each method promises; `loader` creates it. All ranks divide their
rows into the same number of micro-batches and minibatches, because each involves collectives. Losses and metrics are
shares of the whole minibatch over all ranks (`maths.losses`), so neither the micro-batches nor the number of ranks
changes a gradient. The host reads nothing from the device before the end of an update, except the sizes of messages
between ranks that divide experts, and one number that the stages of a pipeline exchange before its first pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ppojob_trainer.engines.train.batch import (
    EngineMeta,
    MicroBatch,
    MicroBatchPlan,
    build_micro_batches,
    num_passes,
    sequence_lengths,
    split_minibatches,
    widest,
)
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.engines.train.fsdp import checkpoint
from ppojob_trainer.engines.train.fsdp.background_saves import BackgroundSaves
from ppojob_trainer.engines.train.fsdp.balance import LoadBalance
from ppojob_trainer.engines.train.fsdp.divisions import check_divisions
from ppojob_trainer.engines.train.fsdp.experts import imbalance_metrics
from ppojob_trainer.engines.train.fsdp.export import export
from ppojob_trainer.engines.train.fsdp.families import refuse_unsupported
from ppojob_trainer.engines.train.fsdp.flops import mfu
from ppojob_trainer.engines.train.fsdp.lora import adapters_off
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, load_critic, load_policy
from ppojob_trainer.engines.train.fsdp.modules import PolicyModule, ValueModule, is_sent
from ppojob_trainer.engines.train.fsdp.offload import Offloader
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.fsdp.passes import InOrder, Passes, Pipelined, Received
from ppojob_trainer.engines.train.fsdp.routing import differing_metrics, replay_experts
from ppojob_trainer.engines.train.fsdp.stages import sum_tied_gradients
from ppojob_trainer.engines.train.fsdp.warmup import Recording, synthetic_batches
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import num_experts, read_config
from ppojob_trainer.engines.train.objectives import Objective, UpdateResult
from ppojob_trainer.maths.losses import Denominators
from ppojob_trainer.protocol import DataProto, Keys, Meta, ProtocolError, Ragged


class FSDPEngine:
    """See the module's docstring. `load` sets the attributes."""

    parallel: ParallelMesh
    module: PolicyModule | ValueModule
    _optimizer: Optimizer | None
    _offloader: Offloader
    _max_tokens: int
    _is_reduced_once: bool
    _passes: Passes
    _balance: LoadBalance

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self._saves = BackgroundSaves()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of a model that is trained."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer

    @property
    def objective(self) -> Objective:
        """What an update minimises."""
        assert self.setup.objective is not None, "a frozen model is not updated"
        return self.setup.objective

    def check(self) -> None:
        """See `TrainEngine`."""
        config = read_config(self.setup.path, trust_remote_code=self.setup.model.trust_remote_code)
        refuse_unsupported(config)
        check_divisions(config, self.setup.sizes, self.setup.per_host)

    def load(self, parallel: ParallelMesh, *, total_steps: int, stays_gathered: bool = False) -> None:
        """See `TrainEngine`."""
        setup, training = self.setup, self.setup.training
        options = LoadOptions.of(setup.model, setup.dtype, stays_gathered=stays_gathered)
        read = load_critic if setup.has_value_head else load_policy
        self.parallel = parallel
        self.module = read(setup.path, options, parallel, seed=setup.seed)
        self._optimizer = None if setup.objective is None else self._make_optimizer(total_steps)
        adamw = self._optimizer.adamw if self._optimizer is not None else None
        self._offloader = Offloader(self.module, setup.model.offload, parallel.device, adamw)
        self._is_reduced_once = stays_gathered and parallel.num_averaged > 1
        coefficient = getattr(training, "router_aux_loss_coefficient", 0.0) if setup.objective is not None else 0.0
        self._balance = LoadBalance(self.module.backbone, coefficient, parallel)
        self._passes = self._make_passes()
        # Of a whole micro-batch; with sequence parallelism a rank computes a slice of it.
        self._max_tokens = training.max_tokens_per_gpu * parallel.sequence_size

    def warm_up(self, prompt_tokens: int, response_tokens: int) -> None:
        """See `TrainEngine`. It runs forward and backward, and drops the gradients."""
        has_adapters = getattr(self.setup.model, "lora", None) is not None
        for batch in synthetic_batches(prompt_tokens, response_tokens, self._recording()):
            self.forward(batch)
            if has_adapters and not self.setup.has_value_head:
                self.forward(batch, with_adapters=False)
            if self.setup.objective is not None:
                with self._offloader.on_device():
                    self._warm_up_update(batch)
        # The first update's metrics of experts would include these.
        if self.setup.objective is not None:
            self._metrics_of_experts()

    @torch.no_grad()
    def forward(self, batch: DataProto, *, with_adapters: bool = True) -> DataProto:
        """See `TrainEngine`."""
        (plan,) = self._plans([batch])
        mask = batch.ragged(Keys.RESPONSE_MASK)
        micros = self._micro_batches(batch, plan, (), int(mask.lengths.max()))
        compute = partial(self._compute, self._temperature(batch))
        self.module.eval()
        with self._offloader.on_device(), nullcontext() if with_adapters else adapters_off(self.module):
            found = self._passes.forward(micros, plan, compute)
            columns = {name: _column(mask, found, number) for number, name in enumerate(self.setup.outputs)}
            # A pass without backward leaves parameters gathered, and the copies would be stale after the next update.
            _reshard(self.module)
        if self.parallel.pipeline is not None:
            last = self.parallel.pipeline.size - 1
            for column in columns.values():
                self.parallel.pipeline.broadcast(column.values, last)
        return DataProto.from_dict(columns)

    def update(self, batch: DataProto) -> dict[str, float]:
        """See `TrainEngine`."""
        objective, optimizer = self.objective, self.optimizer
        compute = partial(self._compute, self._temperature(batch))
        epochs, width = _entry(batch, EngineMeta.EPOCHS), _entry(batch, EngineMeta.RESPONSE_LENGTH)
        minibatches = split_minibatches(batch, _entry(batch, EngineMeta.NUM_MINI_BATCHES))
        columns = objective.columns(batch)
        self.module.train()
        with self._offloader.on_device(moments=True, waits=False):
            started = time.perf_counter()
            denominators, plans = self._denominators(minibatches), self._plans(minibatches)
            sizes = self.parallel.sum(torch.tensor([float(sum(sequence_lengths(part))) for part in minibatches]))
            steps = list(zip(minibatches, denominators, plans, sizes.tolist(), strict=True)) * epochs
            result = UpdateResult(len(steps), 0, optimizer.learning_rate)
            sums: dict[str, Tensor] = {}
            first: dict[str, Tensor] = {}
            norms: list[Tensor] = []
            for minibatch, denominator, plan, size in steps:
                self._balance.begin_minibatch(size)
                micros = self._micro_batches(minibatch, plan, columns, width)
                loss = partial(self._loss, denominator, sums)
                self._passes.backward(micros, plan, compute, loss)
                first = first or dict(sums)
                # Gathered parameters would be stale after the step, and the optimizer needs the shards.
                _reshard(self.module)
                sum_tied_gradients(self.module.language_model, self.module.stage)
                norm = optimizer.clip()
                self._saves.wait_until_copied()
                self._offloader.wait_for_moments()
                optimizer.step(norm)
                norms.append(norm)
            result.grad_norms = optimizer.finish_update(norms)
            result.num_skipped = sum(not math.isfinite(norm) for norm in result.grad_norms)
            self._sum_over_ranks(result, sums, first, batch, epochs)
            result.seconds = time.perf_counter() - started - self._saves.waited_s
        result.mfu = mfu(self.module.backbone, result, self.parallel, self.module.num_outputs)
        metrics = objective.metrics(batch, result, self.parallel)
        metrics |= self._metrics_of_experts()
        waited = self._saves.take_waited_s()
        return metrics if waited is None else metrics | {f"timing_s/checkpoint/wait_{self.setup.section}": waited}

    def weights(self) -> ShardedWeights:
        """See `TrainEngine`."""
        module = self.module
        return ShardedWeights(module.language_model, self.setup.dtype, self._offloader.on_device, module.stage)

    def export(self, folder: Path) -> None:
        """See `TrainEngine`."""
        lora = getattr(self.setup.model, "lora", None)
        with self._offloader.on_device():
            export(folder, self.module.language_model, Path(self.setup.path), self.parallel, lora, self.module.stage)

    def prepare_saves(self) -> None:
        """See `TrainEngine`."""
        self._offloader.prepare_copies()

    def save(self, location: str | Path, *, in_background: bool = False) -> None:
        """See `TrainEngine`."""
        background = self._saves if in_background else None
        checkpoint.save(location, self.module, self.optimizer, self.parallel, self._offloader, background)

    def is_saved(self) -> bool:
        """See `TrainEngine`."""
        return self._saves.is_done()

    def restore(self, location: str | Path) -> None:
        """See `TrainEngine`."""
        with self._offloader.on_device(moments=True):
            checkpoint.load(location, self.module, self.optimizer, self.parallel)

    def _make_optimizer(self, total_steps: int) -> Optimizer:
        module, stage = self.module, self.module.stage
        copy = None if stage is None or stage.copy is None else module.language_model.get_parameter(stage.copy)
        return Optimizer(module, self.setup.training, total_steps, self.parallel.pipeline, copy)

    def _make_passes(self) -> Passes:
        peers = self.parallel.pipeline
        if peers is None:
            return InOrder(self._reduce_gradients)
        width = self.module.language_model.config.get_text_config().hidden_size
        hidden = torch.zeros(width, dtype=self.setup.dtype, device=self.parallel.device)
        replay = partial(replay_experts, self.module.backbone)
        return Pipelined(peers, hidden, self._reduce_gradients, replay, self._balance.none)

    def _compute(self, temperature: float, micro: MicroBatch, received: Received | None) -> tuple[Tensor, ...]:
        """Return the model's outputs for a micro-batch, float32 [b, R] each; or a stage's hidden states."""
        self._balance.begin(micro, None if received is None else received.balance)
        outputs: tuple[Tensor, ...]
        if isinstance(self.module, PolicyModule):
            outputs = self.module(micro.tokens, temperature, received)
        else:
            outputs = (self.module(micro.tokens, received),)
        if is_sent(received):
            return (*outputs, *self._balance.to_send()) if self.module.training else outputs
        return tuple(micro.spread(each) for each in outputs)

    def _loss(
        self, denominator: Denominators, sums: dict[str, Tensor], micro: MicroBatch, outputs: tuple[Tensor, ...]
    ) -> Tensor:
        """Return what the backward pass of a micro-batch begins with; add the shares of its metrics to `sums`."""
        loss, shares = self._balance.add(*self.objective.loss(outputs, micro.fields, denominator), micro)
        for name, share in shares.items():
            sums[name] = sums[name] + share if name in sums else share
        # FSDP averages gradients over ranks, and the shares of all ranks must add up.
        return loss * self.parallel.num_averaged

    def _micro_batches(
        self, part: DataProto, plan: MicroBatchPlan, columns: Sequence[str], width: int
    ) -> Iterator[MicroBatch]:
        return build_micro_batches(part, plan, columns, width, self.parallel.device, self.parallel.sequence)

    def _plans(self, parts: Sequence[DataProto]) -> list[MicroBatchPlan]:
        """Return how each part is divided; all ranks have equally many micro-batches, a pipeline enough for 1F1B."""
        dims = self.parallel.dims
        mine = [num_passes(sequence_lengths(part), self._max_tokens, dims.pipeline, dims.virtual) for part in parts]
        plans = [MicroBatchPlan(int(most), self._max_tokens) for most in self.parallel.max(torch.tensor(mine))]
        if self.parallel.pipeline is None:
            return plans
        peers = self.parallel.sequence
        return [replace(plan, width=widest(part, plan, peers)) for part, plan in zip(parts, plans, strict=True)]

    def _denominators(self, minibatches: Sequence[DataProto]) -> list[Denominators]:
        """Return what the losses of each minibatch are divided by, counted over all ranks."""
        mine = [Denominators.of(part.padded(Keys.RESPONSE_MASK)).to_tensor() for part in minibatches]
        return [Denominators.from_tensor(row) for row in self.parallel.sum(torch.stack(mine))]

    def _reduce_gradients(self, is_last: bool) -> None:
        """Where the model stays gathered, sum gradients over the ranks only in a step's last micro-batch."""
        if self._is_reduced_once:
            cast(FSDPModule, self.module).set_requires_gradient_sync(is_last)

    def _sum_over_ranks(
        self, result: UpdateResult, sums: dict[str, Tensor], first: dict[str, Tensor], batch: DataProto, epochs: int
    ) -> None:
        lengths = batch.ragged(Keys.INPUT_IDS).lengths.double()
        policy_tokens = batch.ragged(Keys.RESPONSE_MASK).values.sum().double()
        work = torch.stack([lengths.sum(), policy_tokens, lengths.square().sum()]) * epochs
        # A pipeline's stages before the last have none.
        of_both = [share.double() for share in (*sums.values(), *first.values())]
        shares = torch.stack(of_both).cpu() if of_both else work[:0]
        *summed, tokens, policy, pairs = self.parallel.sum(torch.cat([shares, work])).tolist()
        result.shares = dict(zip(sums, summed[: len(sums)], strict=True))
        result.first_shares = dict(zip(first, summed[len(sums) :], strict=True))
        if (peers := self.parallel.pipeline) is not None:
            result.shares, result.first_shares = peers.of_last(result.shares), peers.of_last(result.first_shares)
        result.num_tokens, result.num_policy_tokens, result.num_token_pairs = tokens, policy, pairs

    def _metrics_of_experts(self) -> dict[str, float]:
        """Return the metrics of the routers' choices since the last call. Collective."""
        of_module = self.setup.section, self.module.backbone, self.parallel
        return imbalance_metrics(*of_module) | differing_metrics(*of_module)

    def _recording(self) -> Recording | None:
        """Return what a batch's recorded experts are; None if it has none."""
        config: Any = self.module.backbone.config
        number = num_experts(config) if self.setup.replays_experts else None
        return None if number is None else Recording(config.num_hidden_layers, config.num_experts_per_tok, number)

    def _warm_up_update(self, batch: DataProto) -> None:
        """Run an update's forward and backward pass, and drop the gradients."""
        objective, compute = self.objective, partial(self._compute, self._temperature(batch))
        denominators = Denominators.of(batch.padded(Keys.RESPONSE_MASK))
        (plan,) = self._plans([batch])
        self.module.train()
        width = _entry(batch, EngineMeta.RESPONSE_LENGTH)
        micros = self._micro_batches(batch, plan, objective.columns(batch), width)
        loss = partial(self._loss, denominators, {})
        self._passes.backward(micros, plan, compute, loss)
        _reshard(self.module)
        self.module.zero_grad(set_to_none=True)

    def _temperature(self, batch: DataProto) -> float:
        """Return the temperature at which the responses were sampled; values have none."""
        return 1.0 if self.setup.has_value_head else float(_meta(batch, Meta.TEMPERATURE))


def _column(mask: Ragged, found: Sequence[tuple[Tensor, Sequence[Tensor]]], number: int) -> Ragged:
    """Return an output of all rows in their order; zeros where another pipeline stage has it."""
    if not found:
        return mask.with_values(torch.zeros(len(mask.values)))
    order = torch.cat([indices for indices, _ in found]).argsort()
    parts = [mask.take(at).unpadded(outputs[number].float().cpu()) for at, outputs in found]
    return Ragged.concat(parts).take(order)


def _entry(batch: DataProto, key: str) -> int:
    return int(_meta(batch, key))


def _meta(batch: DataProto, key: str) -> float:
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
