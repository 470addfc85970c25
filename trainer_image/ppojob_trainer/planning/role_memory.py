"""The memory of one role on a GPU, from one pass of its real model on fake tensors.

    build    the role's own module on the meta device: divided, sharded, with adapters
    pass     log-probs or values of a full micro-batch, without backward
    update   forward, backward and AdamW's step on a full micro-batch, beside the gradients of the one before
    push     the actor's weights, gathered for the engines

Called by `plan`. The engines' modules, FSDP, schedule, optimizer and losses are those of a real run; for compiled
layers, see `fake_compiler`. Rank 0 has the largest shards, so it is the rank that is measured. Of a pipeline, three
ranks are measured: the first one (embedding, most micro-batches in flight), the second one (messages from both sides)
and the last one (logits). All others need no more than the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import repeat
from operator import or_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.pools import REWARD_MODEL
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.batch import MicroBatch, MicroBatchPlan, build_micro_batches
from ppojob_trainer.engines.train.fsdp.experts import active_share, expert_modules
from ppojob_trainer.engines.train.fsdp.loading import allocate
from ppojob_trainer.engines.train.fsdp.lora import is_adapter
from ppojob_trainer.engines.train.fsdp.model import build_critic, build_policy
from ppojob_trainer.engines.train.fsdp.modules import PolicyModule, ValueModule, is_sent
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.fsdp.passes import Pipelined, Received, in_window
from ppojob_trainer.engines.train.fsdp.reward import build_reward_model
from ppojob_trainer.engines.train.fsdp.stages import sum_tied_gradients
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.objectives import Objective, PolicyObjective, ValueObjective
from ppojob_trainer.engines.weights.buckets import BUCKET_BYTES
from ppojob_trainer.maths.losses import Denominators
from ppojob_trainer.planning.fake_compiler import compile_on_fake_tensors
from ppojob_trainer.planning.fake_device import LiveBytes, as_on_cuda, fake_ranks
from ppojob_trainer.planning.work import Measured, Traffic, Work
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch

__all__ = ["measure"]

_READ_BY_LOSSES = (Keys.OLD_LOG_PROBS, Keys.ADVANTAGES, Keys.VALUES, Keys.RETURNS)


def measure(work: Work) -> Measured:
    """Run the role's passes once, on each rank of a pipeline that may need most."""
    last = work.dims.pipeline - 1
    return _most([measure_stage(work, stage) for stage in sorted({0, min(1, last), last})])


def measure_stage(work: Work, stage: int) -> Measured:
    """Run the role's passes once, on the first of the ranks that have a stage; without a pipeline, on rank 0."""
    live = LiveBytes(work.per_host)
    with fake_ranks(work.dims, stage) as parallel, as_on_cuda(live):
        live.kinds = _kinds(parallel)
        module = _built(work, parallel)
        counted = _counted(module, work.config)
        compile_on_fake_tensors(module)
        micro = None if work.kind == REWARD_MODEL else _micro_batch(work, work.sequences, parallel)
        updated = None if work.training is None else _micro_batch(work, work.update_sequences, parallel)
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            allocate(module, parallel.device)
            schedule = _Schedule.of(work, module, micro, parallel)
            found = replace(counted, weights=live.now, expert_layers=_expert_layers(module))
            found = _forward(work, module, micro, schedule, live, found)
            if work.kind == "actor":
                found = _pushed(work, cast(PolicyModule, module), live, found)
            if updated is None:
                return found
            schedule = _Schedule.of(work, module, updated, parallel)
            return _update(work, module, updated, schedule, live, found)


def _most(stages: Sequence[Measured]) -> Measured:
    numbers = ("weights", "gradients", "optimizer", "forward", "update", "push")
    most: dict[str, Any] = {name: max(getattr(stage, name) for stage in stages) for name in numbers}
    traffic = ("traffic", "update_traffic", "batch_traffic", "step_traffic", "push_traffic")
    most |= {name: reduce(or_, (getattr(stage, name) for stage in stages)) for name in traffic}
    return replace(stages[0], **most)


def _kinds(parallel: ParallelMesh) -> dict[str, str]:
    """Return the traffic of groups that do one thing: rows for experts, and keys and values of other context ranks."""
    found: dict[str, str] = {}
    if parallel.experts is not None:
        found[parallel.experts.mesh.get_group().group_name] = "experts"
    if parallel.sequence is not None and parallel.sequence.context is not None:
        found[parallel.sequence.context.group.group_name] = "keys"
    return found


def _built(work: Work, parallel: ParallelMesh) -> nn.Module:
    if work.kind == REWARD_MODEL:
        return build_reward_model(work.config, work.options, parallel)[0]
    build: Any = build_critic if work.kind == "critic" else build_policy
    module: nn.Module = build(work.config, work.options, parallel)[0]
    return module


def _counted(module: nn.Module, config: PretrainedConfig) -> Measured:
    """Count the parameters of the whole model, and the numbers of its decoder layers that compute for a token."""
    if isinstance(module, PolicyModule | ValueModule) and module.stage is not None:
        parts = module.stage.parts
        shapes = [(part.name, part.shape) for part in parts]
        in_layers = [(part.name, part.shape) for part in parts if part.layer is not None]
        value_head = config.get_text_config().hidden_size + 1 if isinstance(module, ValueModule) else 0
    else:
        backbone = module.backbone if isinstance(module, PolicyModule | ValueModule) else module
        layers = [part for part in backbone.modules() if isinstance(part, nn.ModuleList)][:1]
        shapes, value_head = _shapes(module), 0
        in_layers = [shape for part in layers for shape in _shapes(part)]
    active = [(name, math.prod(shape) * active_share(name, shape, config)) for name, shape in in_layers]
    return Measured(
        num_parameters=sum(math.prod(shape) for _, shape in shapes) + value_head,
        weights=0,
        layer_parameters=sum(number for _, number in active),
        num_adapters=sum(math.prod(shape) for name, shape in shapes if is_adapter(name)),
        layer_adapters=sum(number for name, number in active if is_adapter(name)),
    )


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


def _expert_layers(module: nn.Module) -> int:
    if not isinstance(module, PolicyModule | ValueModule) or module.stage is None:
        return sum(1 for _ in expert_modules(module))
    return len({part.layer for part in module.stage.parts if len(part.shape) == 3})


def _micro_batch(work: Work, sequences: int, parallel: ParallelMesh) -> MicroBatch:
    prompts, responses = [0] * work.prompt_tokens, [0] * work.response_tokens
    rows = rollout_batch([prompts] * sequences, [responses] * sequences)
    mask = rows[Keys.RESPONSE_MASK]
    zeros = mask.with_values(torch.zeros(len(mask.values)))
    batch = DataProto.from_dict(rows | dict.fromkeys(_READ_BY_LOSSES, zeros))
    plan = MicroBatchPlan(1, sequences * (work.prompt_tokens + work.response_tokens))
    fields = (Keys.RESPONSE_MASK, *_READ_BY_LOSSES)
    (micro,) = build_micro_batches(batch, plan, fields, work.response_tokens, parallel.device, parallel.sequence)
    return micro


@dataclass(frozen=True)
class _Schedule:
    """The engine's schedule of a rank of a pipeline, with fewer micro-batches: from `enough` of them on, each further
    one adds its messages alone.

    window: of a forward pass. width: tokens of a message. messages: bytes of a micro-batch's messages from or to other
    ranks.
    """

    passes: Pipelined
    micro: MicroBatch
    enough: int
    window: int
    width: int
    messages: int

    @classmethod
    def of(cls, work: Work, module: nn.Module, micro: MicroBatch | None, parallel: ParallelMesh) -> _Schedule | None:
        """Return the schedule of a rank; None without a pipeline."""
        peers = parallel.pipeline
        if peers is None or micro is None:
            return None
        hidden = torch.zeros(work.config.get_text_config().hidden_size, dtype=work.options.dtype)
        is_reduced_once = work.options.stays_gathered and parallel.num_averaged > 1

        def before_backward(is_last: bool) -> None:
            if is_reduced_once:
                cast(FSDPModule, module).set_requires_gradient_sync(is_last)

        width = micro.tokens.input_ids.shape[1]
        neighbours = 2 * peers.virtual - peers.is_first - peers.is_last
        # Of interleaved stages, the first rank holds less than two rounds of as many micro-batches as ranks.
        enough = peers.size + 1 if peers.virtual == 1 else 2 * peers.size
        passes, messages = Pipelined(peers, hidden, before_backward), neighbours * width * hidden.nbytes
        return cls(passes, micro, enough, in_window(peers.size, peers.virtual), width, messages)

    def forward(self, module: nn.Module, number: int, live: LiveBytes) -> tuple[int, Traffic]:
        """Run a forward pass of a number of micro-batches; return its peak, and the traffic of a micro-batch."""
        plan = self._plan(min(number, self.window))
        self.passes.forward(repeat(self.micro, plan.number), plan, partial(_compute, module))
        return self._extended(min(number, self.window), plan, live)

    def backward(self, work: Work, module: nn.Module, num_averaged: int, live: LiveBytes) -> tuple[int, Traffic]:
        """Run forward and backward passes of a minibatch; return their peak, and the traffic of a micro-batch."""
        plan = self._plan(work.num_passes)
        loss = partial(_loss, work, num_averaged)
        self.passes.backward(repeat(self.micro, plan.number), plan, partial(_compute, module), loss)
        return self._extended(work.num_passes, plan, live)

    def _plan(self, number: int) -> MicroBatchPlan:
        return MicroBatchPlan(min(number, self.enough), self.width, self.width)

    def _extended(self, number: int, plan: MicroBatchPlan, live: LiveBytes) -> tuple[int, Traffic]:
        return live.peak + (number - plan.number) * self.messages, live.traffic // plan.number


def _compute(module: nn.Module, micro: MicroBatch, received: Received | None = None) -> tuple[Tensor, ...]:
    """Return the module's outputs for a micro-batch, as the engine's passes do."""
    outputs = (
        module(micro.tokens, 1.0, received) if isinstance(module, PolicyModule) else module(micro.tokens, received)
    )
    found: tuple[Tensor, ...] = outputs if isinstance(outputs, tuple) else (outputs,)
    assert isinstance(module, PolicyModule | ValueModule), "a reward model is not trained"
    return found if is_sent(received) else tuple(micro.spread(values) for values in found)


@torch.no_grad()
def _forward(
    work: Work,
    module: nn.Module,
    micro: MicroBatch | None,
    schedule: _Schedule | None,
    live: LiveBytes,
    found: Measured,
) -> Measured:
    module.eval()
    live.restart()
    if schedule is not None:
        peak, received = schedule.forward(module, work.num_forward, live)
        _reshard(module)
        return replace(found, forward=peak, traffic=received)
    if micro is None:
        shape = (work.sequences, work.prompt_tokens + work.response_tokens)
        module(input_ids=torch.zeros(shape, dtype=torch.int64), attention_mask=torch.ones(shape, dtype=torch.int64))
    else:
        _compute(module, micro)
    first = live.traffic
    if micro is not None and work.options.stays_gathered:
        # Later micro-batches find the weights gathered.
        live.traffic = Traffic()
        _compute(module, micro)
    _reshard(module)
    return replace(found, forward=live.peak, traffic=live.traffic, batch_traffic=first - live.traffic)


def _pushed(work: Work, module: PolicyModule, live: LiveBytes, found: Measured) -> Measured:
    """Gather all weights, as the first push does; its peak includes the sender's bucket."""
    weights = ShardedWeights(module.language_model, work.options.dtype, stage=module.stage)
    # transformers converts tensors without memory for it, which would count.
    specs = weights.specs()
    changing = [spec.num_bytes for spec in specs if not spec.is_frozen]
    live.restart()
    for _ in weights.gather_parameters():
        pass
    return replace(
        found,
        push=live.peak + BUCKET_BYTES,
        changing=sum(changing) if len(changing) < len(specs) else None,
        push_traffic=live.traffic,
    )


def _update(
    work: Work,
    module: nn.Module,
    micro: MicroBatch,
    schedule: _Schedule | None,
    live: LiveBytes,
    found: Measured,
) -> Measured:
    assert work.training is not None, "only trained roles are updated"
    sharded = cast(PolicyModule | ValueModule, module)
    optimizer = _optimizer(work.training, sharded)
    # AdamW creates its moments in the first step, and from the second on they are there.
    _give_gradients(optimizer)
    optimizer.step(optimizer.clip())
    moments = live.now - found.weights
    module.train()
    live.restart()
    num_averaged = work.dims.of_stage // work.dims.tensor
    once = Traffic()
    if schedule is not None:
        peak, received = schedule.backward(work, module, num_averaged, live)
        live.traffic = Traffic()
    else:
        received, once = _backward(work, module, micro, optimizer, num_averaged, live)
        peak = live.peak
    _reshard(module)
    gradients = live.now - found.weights - moments
    sum_tied_gradients(sharded.language_model, sharded.stage)
    optimizer.step(optimizer.clip())
    return replace(
        found,
        gradients=gradients,
        optimizer=moments,
        update=max(peak, live.peak),
        update_traffic=received,
        step_traffic=once if schedule is None else live.traffic,
    )


def _optimizer(training: ActorSpec | CriticSpec, module: PolicyModule | ValueModule) -> Optimizer:
    stage = module.stage
    if stage is None:
        return Optimizer(module, training, total_steps=1)
    copy = None if stage.copy is None else module.language_model.get_parameter(stage.copy)
    return Optimizer(module, training, 1, stage.peers, copy)


def _backward(
    work: Work, module: nn.Module, micro: MicroBatch, optimizer: Optimizer, num_averaged: int, live: LiveBytes
) -> tuple[Traffic, Traffic]:
    """Run the last micro-batch of a minibatch, beside the gradients of those before.

    Returns:
        The traffic of each micro-batch, and what is once in a minibatch beside it.
    """
    sharded = cast(FSDPModule, module)

    def run() -> Traffic:
        live.traffic = Traffic()
        # No name for the outputs, as in the engine.
        torch.autograd.backward(_loss(work, num_averaged, micro, _compute(module, micro)))
        return live.traffic

    if work.num_passes == 1 or not work.options.stays_gathered or num_averaged == 1:
        if work.num_passes > 1:
            _give_gradients(optimizer)
        return run(), Traffic()
    # The first one gathers the weights, and the last one reduces the gradients of all.
    sharded.set_requires_gradient_sync(False)
    first, each = run(), run()
    sharded.set_requires_gradient_sync(True)
    last = run()
    return each, (first - each) + (last - each)


def _loss(work: Work, num_averaged: int, micro: MicroBatch, outputs: tuple[Tensor, ...]) -> Tensor:
    assert work.training is not None, "only trained roles are updated"
    mask = micro.fields[Keys.RESPONSE_MASK]
    # A loss of the user needs its module; in memory it differs little from PPO's.
    objective: Objective = (
        PolicyObjective(work.training, AlgorithmSpec())
        if isinstance(work.training, ActorSpec)
        else ValueObjective(work.training)
    )
    loss, _ = objective.loss(outputs, micro.fields, Denominators(float(mask.numel()), float(len(mask))))
    return loss * num_averaged


def _give_gradients(optimizer: Optimizer) -> None:
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
