"""The policy: log-probs of responses, PPO's update, and the frozen reference. Each rank runs one engine.

Called by the actor and ref roles. All methods but `destroy` are collective: every rank of the process group calls them
with its own shard. Suffixes as in `engines.train.batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec, CorrectionLevel, CorrectionMethod, RolloutCorrection
from ppojob_api.v1alpha1.model import ActorModel, FrozenOffload
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.algorithms import policy_loss_of
from ppojob_trainer.engines.train.batch import MicroBatch
from ppojob_trainer.engines.train.fsdp import checkpoint
from ppojob_trainer.engines.train.fsdp.background_saves import BackgroundSaves
from ppojob_trainer.engines.train.fsdp.experts import imbalance_metrics
from ppojob_trainer.engines.train.fsdp.export import export
from ppojob_trainer.engines.train.fsdp.flops import mfu
from ppojob_trainer.engines.train.fsdp.lora import adapters_off
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, PolicyModule, load_policy
from ppojob_trainer.engines.train.fsdp.offload import Offloader
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.fsdp.update import LossOf, Passes, UpdateResult, temperature_of
from ppojob_trainer.engines.train.fsdp.warmup import synthetic_batches
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.maths.importance import (
    SQUARES,
    WEIGHTS,
    Bounds,
    correction_metrics,
    effective_share,
    importance_weights,
)
from ppojob_trainer.maths.kl import kl_estimate
from ppojob_trainer.maths.losses import Denominators, Loss, entropy_bonus, kl_loss, policy_loss
from ppojob_trainer.maths.policy_losses import Clipping, PolicyLossInputs
from ppojob_trainer.protocol import DataProto, Keys

_CORRECTION = "rollout_corr"
"""Group of the correction's metrics, as in verl."""


class PolicyEngine:
    """The policy, which is trained."""

    def __init__(
        self,
        parallel: ParallelMesh,
        model: ActorModel,
        training: ActorSpec,
        algorithm: AlgorithmSpec,
        *,
        total_steps: int,
        seed: int = 0,
        stays_gathered: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Load and shard the model, and create its optimizer. Collective.

        Args:
            parallel: from `mesh.init_process_group`.
            algorithm: of it, the policy loss, the KL in the loss and the correction of the rollout.
            total_steps: updates of the run, for the learning-rate schedule.
            seed: of new adapters.
            stays_gathered: the layers are gathered once for each pass over a batch and each optimizer step, and
                gradients are summed over ranks once for each step.
            dtype: of the computation; float32 is for tests that compare small numbers.

        Raises:
            AlgorithmFunctionError: the user's policy loss cannot be loaded. `update` raises it for a wrong result.
            ModelNotFoundError, ModelUnsupportedError: see `model.load_policy`.
        """
        self.parallel, self.training, self.kl = parallel, training, algorithm.kl
        self._compute_policy_loss = policy_loss_of(algorithm)
        self._bounds = _bounds_of(algorithm.correction)
        self.path, self.lora, self._dtype = model.path, model.lora, dtype
        options = LoadOptions.of(model, dtype, stays_gathered=stays_gathered)
        self.module: PolicyModule = load_policy(model.path, options, parallel, seed=seed)
        self.optimizer = Optimizer(self.module, training, total_steps)
        self._offloader = Offloader(self.module, model.offload, parallel.device, self.optimizer.adamw)
        self._passes = Passes(parallel, self.module, training.max_tokens_per_gpu, stays_gathered=stays_gathered)

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return `old_log_probs` and `entropys` of the response tokens, 0 where response_mask is False.

        Reads input_ids and response_mask, and `Meta.TEMPERATURE`.
        """
        with self._offloader.on_device():
            return self._passes.compute(batch, (Keys.OLD_LOG_PROBS, Keys.ENTROPYS), _log_probs_of(self.module, batch))

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return `ref_log_prob` as a `ReferenceEngine` does, from the model without its adapters."""
        assert self.lora is not None, "only a policy with adapters holds its own reference"
        with self._offloader.on_device(), adapters_off(self.module):
            return _ref_log_prob(self._passes, self.module, batch)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Run PPO's minibatches over this rank's shard; return the metrics, equal on all ranks.

        Reads the fields of `compute_log_prob`, old_log_probs (absent: the policy has not changed since the batch was
        generated and is updated once), advantages, with KL in the loss ref_log_prob, with a correction of the rollout
        rollout_log_probs, and the meta_info entries of `EngineMeta`. The metrics are means over the optimizer steps.

        Raises:
            NonFiniteError: too many steps in a row had a gradient that is not finite.
            ProtocolError: something is missing, or the shard cannot be split into the minibatches.
        """
        loss_of = self._loss_at(temperature_of(batch))
        with self._offloader.on_device(moments=True):
            result = self._passes.update(batch, self._fields(batch), self.optimizer, loss_of)
        return self._metrics(result)

    def warm_up(self, prompt_tokens: int, response_tokens: int) -> None:
        """Compile the layers before the first step, see `warmup`. Collective."""
        for batch in synthetic_batches(prompt_tokens, response_tokens):
            self.compute_log_prob(batch)
            if self.lora is not None:
                self.compute_ref_log_prob(batch)
            with self._offloader.on_device():
                self._passes.warm_up(batch, self._fields(batch), self._loss_at(temperature_of(batch)))

    def save(self, location: str | Path, background: BackgroundSaves | None = None) -> None:
        """Write model, optimizer, schedule and random state to a new location, see `checkpoint.save`."""
        checkpoint.save(location, self.module, self.optimizer, self.parallel, self._offloader, background)

    def load(self, location: str | Path) -> None:
        """Resume from such a location, written by any number of ranks. Collective.

        Raises:
            CheckpointUnreadableError: it is missing, incomplete or of another model.
        """
        with self._offloader.on_device(moments=True):
            checkpoint.load(location, self.module, self.optimizer, self.parallel)

    def export(self, folder: Path) -> None:
        """Write the policy as a HuggingFace folder (safetensors, config, tokenizer). Collective; rank 0 writes."""
        with self._offloader.on_device():
            export(folder, self.module.language_model, Path(self.path), self.parallel, self.lora)

    def weights(self) -> ShardedWeights:
        """Return the parameters in the rollout engine's format, for a `WeightSender`."""
        return ShardedWeights(self.module.language_model, on_device=self._offloader.on_device, dtype=self._dtype)

    def destroy(self) -> None:
        """Leave the process group."""
        self.parallel.destroy()

    def _fields(self, batch: DataProto) -> list[str]:
        """Return the fields of this batch that the loss reads."""
        fields = [Keys.RESPONSE_MASK, Keys.ADVANTAGES]
        if Keys.OLD_LOG_PROBS in batch:
            fields.append(Keys.OLD_LOG_PROBS)
        if self.kl.in_loss:
            fields.append(Keys.REF_LOG_PROB)
        if self._bounds is not None:
            fields.append(Keys.ROLLOUT_LOG_PROBS)
        return fields

    def _loss_at(self, temperature: float) -> LossOf:
        def loss_of(micro: MicroBatch, denominators: Denominators) -> Loss:
            return self._loss(micro, denominators, temperature)

        return loss_of

    def _loss(self, micro: MicroBatch, denominators: Denominators, temperature: float) -> Loss:
        log_prob, entropy = (micro.spread(values) for values in self.module(micro.tokens, temperature))
        fields, training = micro.fields, self.training
        mask, aggregation = fields[Keys.RESPONSE_MASK], training.loss_aggregation.value
        clipping = Clipping(training.clip_ratio_low, training.clip_ratio_high, training.clip_ratio_dual)
        # Without old_log_probs this is the only update on the batch, so the current log-probs are used instead.
        old_log_prob, advantages = fields.get(Keys.OLD_LOG_PROBS, log_prob.detach()), fields[Keys.ADVANTAGES]
        corrections: dict[str, Tensor] = {}
        if self._bounds is not None:
            pair = (old_log_prob, fields[Keys.ROLLOUT_LOG_PROBS], mask)
            advantages = advantages * importance_weights(*pair, self._bounds)
            corrections = correction_metrics(*pair, self._bounds, denominators)
        inputs = PolicyLossInputs(log_prob, old_log_prob, advantages, mask, clipping)
        loss, metrics = policy_loss(inputs, denominators, self._compute_policy_loss, aggregation)
        metrics |= {f"{_CORRECTION}/{name}": share for name, share in corrections.items()}
        if training.entropy_coefficient == 0:
            entropy = entropy.detach()
        bonus, shares = entropy_bonus(entropy, mask, denominators, training.entropy_coefficient, aggregation)
        loss, metrics = loss + bonus, metrics | shares
        if self.kl.in_loss:
            estimate = kl_estimate(log_prob, fields[Keys.REF_LOG_PROB], self.kl.loss_estimator.value)
            penalty, shares = kl_loss(estimate, mask, denominators, self.kl.loss_coefficient, aggregation)
            loss, metrics = loss + penalty, metrics | shares
        return loss, metrics

    def _metrics(self, result: UpdateResult) -> dict[str, float]:
        metrics = {
            name if name.startswith(_CORRECTION) else f"actor/{name}": result.mean(name) for name in result.shares
        }
        if self._bounds is not None:
            square = metrics.pop(f"{_CORRECTION}/{SQUARES}")
            size = effective_share(metrics[f"{_CORRECTION}/{WEIGHTS}"], square)
            metrics[f"{_CORRECTION}/rollout_is_eff_sample_size"] = size
        metrics |= step_metrics("actor", result)
        metrics |= imbalance_metrics("actor", self.module.backbone, self.parallel)
        if self.kl.in_loss:
            metrics["actor/kl_coef"] = self.kl.loss_coefficient
        if (share := mfu(self.module.backbone, result, self.parallel, self.module.vocabulary_size)) is not None:
            metrics["perf/mfu/actor"] = share
        return metrics


class ReferenceEngine:
    """The frozen reference policy."""

    def __init__(
        self,
        parallel: ParallelMesh,
        path: str,
        *,
        trust_remote_code: bool = False,
        compile_layers: bool = False,
        offload: FrozenOffload | None = None,
        stays_gathered: bool = False,
        max_tokens_per_gpu: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Load and shard the model. Collective; raises what `model.load_policy` raises."""
        self.parallel = parallel
        options = LoadOptions(
            trust_remote_code=trust_remote_code,
            compile=compile_layers,
            dtype=dtype,
            is_frozen=True,
            stays_gathered=stays_gathered,
        )
        self.module = load_policy(path, options, parallel)
        self._offloader = Offloader(self.module, offload or FrozenOffload(), parallel.device)
        self._passes = Passes(parallel, self.module, max_tokens_per_gpu)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return `ref_log_prob`, 0 where response_mask is False; reads what `compute_log_prob` reads."""
        with self._offloader.on_device():
            return _ref_log_prob(self._passes, self.module, batch)

    def warm_up(self, prompt_tokens: int, response_tokens: int) -> None:
        """Compile the layers before the first step, see `warmup`. Collective."""
        for batch in synthetic_batches(prompt_tokens, response_tokens):
            self.compute_ref_log_prob(batch)

    def destroy(self) -> None:
        """Leave the process group."""
        self.parallel.destroy()


def _bounds_of(correction: RolloutCorrection | None) -> Bounds | None:
    if correction is None:
        return None
    lower = correction.lower_bound if correction.method is CorrectionMethod.MASK else None
    return Bounds(correction.level is CorrectionLevel.SEQUENCE, correction.upper, lower)


class _LogProbs:
    """Computes log-probs and entropies of a micro-batch at one temperature."""

    def __init__(self, module: PolicyModule, temperature: float) -> None:
        self.module, self.temperature = module, temperature

    def __call__(self, micro: MicroBatch) -> Sequence[Tensor]:
        return [micro.spread(values) for values in self.module(micro.tokens, self.temperature)]


def _log_probs_of(module: PolicyModule, batch: DataProto) -> _LogProbs:
    return _LogProbs(module, temperature_of(batch))


def _ref_log_prob(passes: Passes, module: PolicyModule, batch: DataProto) -> DataProto:
    both = passes.compute(batch, (Keys.REF_LOG_PROB, Keys.ENTROPYS), _log_probs_of(module, batch))
    return both.select([Keys.REF_LOG_PROB])


def step_metrics(role: str, result: UpdateResult) -> dict[str, float]:
    """Return the metrics that are common to actor and critic."""
    finite = [norm for norm in result.grad_norms if norm == norm and norm != float("inf")]
    return {
        f"{role}/grad_norm": sum(finite) / len(finite) if finite else float("nan"),
        f"{role}/lr": result.learning_rate,
        f"{role}/non_finite_steps": float(result.num_skipped),
    }
