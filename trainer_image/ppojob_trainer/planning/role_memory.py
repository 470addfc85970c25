"""The memory of one role on a GPU, from one pass of its real model on fake tensors.

    build    the role's own module on the meta device: divided, sharded, with adapters
    pass     log-probs or values of a full micro-batch, without backward
    update   forward, backward and AdamW's step on a full micro-batch, beside the gradients of the one before

Called by `plan`. The engines' modules, FSDP, optimizer and losses are those of a real run; layers are not compiled.
Rank 0 has the largest shards, so it is the rank that is measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.batch import MicroBatch, MicroBatchPlan, build_micro_batches
from ppojob_trainer.engines.train.fsdp.experts import active_share
from ppojob_trainer.engines.train.fsdp.loading import allocate
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, build_critic, build_policy
from ppojob_trainer.engines.train.fsdp.modules import PolicyModule, ValueModule
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.fsdp.reward import build_reward_model
from ppojob_trainer.engines.train.mesh import ParallelDims, ParallelMesh
from ppojob_trainer.engines.train.objectives import Objective, PolicyObjective, ValueObjective
from ppojob_trainer.maths.losses import Denominators
from ppojob_trainer.planning.fake_device import LiveBytes, as_on_cuda, fake_ranks
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch

__all__ = ["Measured", "Work", "measure"]

_READ_BY_LOSSES = (Keys.OLD_LOG_PROBS, Keys.ADVANTAGES, Keys.VALUES, Keys.RETURNS)


@dataclass(frozen=True)
class Work:
    """One role's model and its fullest pass.

    kind: actor, critic, ref or reward_model. dims: of its ranks. sequences: of a full micro-batch, each of
    prompt_tokens and response_tokens. num_passes: micro-batches of a minibatch. training: None if nothing is trained.
    """

    kind: str
    config: PretrainedConfig
    options: LoadOptions
    dims: ParallelDims
    sequences: int
    num_passes: int
    prompt_tokens: int
    response_tokens: int
    training: ActorSpec | CriticSpec | None = None


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank, beside the parameters of the whole model. layer_parameters: that compute for a token.

    forward, update: most live bytes in a pass without backward, and in an optimizer step. traffic, update_traffic:
    bytes that the rank receives in collectives in such a pass, by kind.
    """

    num_parameters: int
    weights: int
    layer_parameters: float = 0.0
    gradients: int = 0
    optimizer: int = 0
    forward: int = 0
    update: int = 0
    traffic: Counter[str] = field(default_factory=Counter)
    update_traffic: Counter[str] = field(default_factory=Counter)

    @property
    def peak(self) -> int:
        """Most live bytes in any of the role's phases."""
        return max(self.forward, self.update)

    @property
    def activations(self) -> int:
        """What the peak holds beside weights, gradients and optimizer: activations, gathered layers, logits."""
        return self.peak - self.weights - self.gradients - self.optimizer


def measure(work: Work) -> Measured:
    """Run the role's passes once."""
    live = LiveBytes()
    with fake_ranks(work.dims) as parallel, as_on_cuda(live):
        module = _built(work, parallel)
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        layer_parameters = _active(module, work.config)
        micro = None if work.kind == "reward_model" else _micro_batch(work, parallel)
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            allocate(module, parallel.device)
            found = Measured(num_parameters, live.now, layer_parameters)
            found = _forward(work, module, micro, live, found)
            if work.training is None:
                return found
            assert micro is not None, "a reward model is not trained"
            return _update(work, module, micro, live, found)


def _built(work: Work, parallel: ParallelMesh) -> nn.Module:
    options = replace(work.options, compile=False)
    if work.kind == "reward_model":
        return build_reward_model(work.config, options, parallel)[0]
    build: Any = build_critic if work.kind == "critic" else build_policy
    module: nn.Module = build(work.config, options, parallel)[0]
    return module


def _active(module: nn.Module, config: PretrainedConfig) -> float:
    """Return how many numbers of the decoder layers compute for a token."""
    backbone = module.backbone if isinstance(module, PolicyModule | ValueModule) else module
    layers = [part for part in backbone.modules() if isinstance(part, nn.ModuleList)][:1]
    parameters = [parameter for part in layers for parameter in part.parameters()]
    return sum(parameter.numel() * active_share(parameter, config) for parameter in parameters)


def _micro_batch(work: Work, parallel: ParallelMesh) -> MicroBatch:
    prompts, responses = [0] * work.prompt_tokens, [0] * work.response_tokens
    rows = rollout_batch([prompts] * work.sequences, [responses] * work.sequences)
    mask = rows[Keys.RESPONSE_MASK]
    zeros = mask.with_values(torch.zeros(len(mask.values)))
    batch = DataProto.from_dict(rows | dict.fromkeys(_READ_BY_LOSSES, zeros))
    plan = MicroBatchPlan(1, work.sequences * (work.prompt_tokens + work.response_tokens))
    fields = (Keys.RESPONSE_MASK, *_READ_BY_LOSSES)
    (micro,) = build_micro_batches(batch, plan, fields, work.response_tokens, parallel.device, parallel.sequence)
    return micro


@torch.no_grad()
def _forward(work: Work, module: nn.Module, micro: MicroBatch | None, live: LiveBytes, found: Measured) -> Measured:
    module.eval()
    live.restart()
    if micro is None:
        shape = (work.sequences, work.prompt_tokens + work.response_tokens)
        module(input_ids=torch.zeros(shape, dtype=torch.int64), attention_mask=torch.ones(shape, dtype=torch.int64))
    elif isinstance(module, PolicyModule):
        module(micro.tokens, 1.0)
    else:
        module(micro.tokens)
    _reshard(module)
    return replace(found, forward=live.peak, traffic=live.received)


def _update(work: Work, module: nn.Module, micro: MicroBatch, live: LiveBytes, found: Measured) -> Measured:
    assert work.training is not None, "only trained roles are updated"
    sharded = cast(FSDPModule, module)
    optimizer = Optimizer(module, work.training, total_steps=1)
    # AdamW creates its moments in the first step, and from the second on they are there.
    _give_gradients(optimizer)
    optimizer.step(optimizer.clip())
    moments = live.now - found.weights
    module.train()
    live.restart()
    num_averaged, waits = work.dims.world_size // work.dims.tensor, work.options.stays_gathered
    if work.num_passes > 1 and waits and num_averaged > 1:
        sharded.set_requires_gradient_sync(False)
        _backward(work, module, micro, num_averaged)
        sharded.set_requires_gradient_sync(True)
    elif work.num_passes > 1:
        _give_gradients(optimizer)
    live.received.clear()
    _backward(work, module, micro, num_averaged)
    _reshard(module)
    gradients = live.now - found.weights - moments
    optimizer.step(optimizer.clip())
    return replace(found, gradients=gradients, optimizer=moments, update=live.peak, update_traffic=live.received)


def _backward(work: Work, module: nn.Module, micro: MicroBatch, num_averaged: int) -> None:
    mask = micro.fields[Keys.RESPONSE_MASK]
    objective: Objective
    if isinstance(work.training, ActorSpec):
        # A loss of the user needs its module; in memory it differs little from PPO's.
        objective = PolicyObjective(work.training, AlgorithmSpec())
        outputs = tuple(micro.spread(values) for values in module(micro.tokens, 1.0))
    else:
        assert work.training is not None, "only trained roles are updated"
        objective = ValueObjective(work.training)
        outputs = (micro.spread(module(micro.tokens)),)
    loss, _ = objective.loss(outputs, micro.fields, Denominators(float(mask.numel()), float(len(mask))))
    torch.autograd.backward(loss * num_averaged)


def _give_gradients(optimizer: Optimizer) -> None:
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
