"""The critic: values of response tokens and their update. Each rank runs one engine, in one process.

Called by the critic role. All methods but `destroy` are collective: every rank calls them with its own shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ppojob_api.v1alpha1.model import TrainedModel
from ppojob_api.v1alpha1.training import CriticSpec
from ppojob_trainer.engines.train.batch import MicroBatch
from ppojob_trainer.engines.train.fsdp import checkpoint
from ppojob_trainer.engines.train.fsdp.background_saves import BackgroundSaves
from ppojob_trainer.engines.train.fsdp.experts import imbalance_metrics
from ppojob_trainer.engines.train.fsdp.flops import mfu
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, ValueModule, load_critic
from ppojob_trainer.engines.train.fsdp.offload import Offloader
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.fsdp.policy import step_metrics
from ppojob_trainer.engines.train.fsdp.update import Passes, UpdateResult
from ppojob_trainer.engines.train.fsdp.warmup import synthetic_batches
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.maths.losses import Denominators, Loss, value_loss
from ppojob_trainer.maths.masked import Moments, explained_variance
from ppojob_trainer.protocol import DataProto, Keys

_FIELDS = (Keys.RESPONSE_MASK, Keys.VALUES, Keys.RETURNS)
"""The fields that the loss reads."""


class CriticEngine:
    """The value model, which is trained."""

    def __init__(
        self,
        parallel: ParallelMesh,
        model: TrainedModel,
        actor_path: str,
        training: CriticSpec,
        *,
        total_steps: int,
        seed: int,
        stays_gathered: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Load and shard the model, and create its optimizer. Collective.

        Args:
            model: without a path, the actor's weights are loaded.
            total_steps: updates of the run, for the learning-rate schedule.
            seed: of new adapters, and of a new value head if the checkpoint has none.
            stays_gathered: see `PolicyEngine`.
            dtype: of the computation, except for the value head, which is float32.

        Raises:
            ModelNotFoundError, ModelUnsupportedError: see `model.load_critic`.
        """
        options = LoadOptions.of(model, dtype, stays_gathered=stays_gathered)
        self.parallel, self.training = parallel, training
        self.module: ValueModule = load_critic(model.path or actor_path, options, parallel, seed=seed)
        self.optimizer = Optimizer(self.module, training, total_steps)
        self._offloader = Offloader(self.module, model.offload, parallel.device, self.optimizer.adamw)
        self._passes = Passes(parallel, self.module, training.max_tokens_per_gpu, stays_gathered=stays_gathered)

    def compute_values(self, batch: DataProto) -> DataProto:
        """Return `values` of the response tokens, 0 where response_mask is False.

        Reads input_ids and response_mask.
        """
        with self._offloader.on_device():
            return self._passes.compute(batch, (Keys.VALUES,), self._values)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Run the value loss's minibatches over this rank's shard; return the metrics, equal on all ranks.

        Reads the fields of `compute_values`, values, returns, and the meta_info entries of `EngineMeta`.

        Raises:
            NonFiniteError: too many steps in a row had a gradient that is not finite.
            ProtocolError: something is missing, or the shard cannot be split into the minibatches.
        """
        with self._offloader.on_device(moments=True):
            result = self._passes.update(batch, _FIELDS, self.optimizer, self._loss)
        return self._metrics(result, self._explained_variance(batch))

    def warm_up(self, prompt_tokens: int, response_tokens: int) -> None:
        """Compile the layers before the first step, see `warmup`. Collective."""
        for batch in synthetic_batches(prompt_tokens, response_tokens):
            self.compute_values(batch)
            with self._offloader.on_device():
                self._passes.warm_up(batch, _FIELDS, self._loss)

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

    def destroy(self) -> None:
        """Leave the process group."""
        self.parallel.destroy()

    def _values(self, micro: MicroBatch) -> Sequence[Tensor]:
        return [micro.spread(self.module(micro.tokens))]

    def _loss(self, micro: MicroBatch, denominators: Denominators) -> Loss:
        return value_loss(
            micro.spread(self.module(micro.tokens)),
            micro.fields[Keys.VALUES],
            micro.fields[Keys.RETURNS],
            micro.fields[Keys.RESPONSE_MASK],
            denominators,
            self.training.clip_range_value,
            self.training.loss_aggregation.value,
        )

    def _explained_variance(self, batch: DataProto) -> float:
        """Return the explained variance of the values before the update, over all ranks."""
        returns, mask = batch.ragged(Keys.RETURNS).values, batch.ragged(Keys.RESPONSE_MASK).values
        residuals = returns - batch.ragged(Keys.VALUES).values
        both = torch.stack([Moments.of(returns, mask).to_tensor(), Moments.of(residuals, mask).to_tensor()])
        summed = self.parallel.sum(both)
        return explained_variance(Moments.from_tensor(summed[0]), Moments.from_tensor(summed[1]))

    def _metrics(self, result: UpdateResult, explained: float) -> dict[str, float]:
        metrics = {f"critic/{name}": result.mean(name) for name in result.shares}
        metrics |= step_metrics("critic", result)
        metrics |= imbalance_metrics("critic", self.module.backbone, self.parallel)
        metrics["critic/vf_explained_var"] = explained
        if (share := mfu(self.module.backbone, result, self.parallel)) is not None:
            metrics["perf/mfu/critic"] = share
        return metrics
