"""The interface of a training engine: what actor, critic and ref call, and nothing else.

`TrainEngine` has one implementation here, with PyTorch's FSDP2 (`fsdp`); `loader` finds the one that a PPOJob names. An
engine is one rank's part of one model. The roles have joined the ranks before (`mesh`); batches, micro-batches and
losses are the same for every engine (`batch`, `objectives`).

    create  ─▶  check    on rank 0; seconds; nothing is loaded
            ─▶  load     all ranks
            ─▶  forward, update, weights, save, restore, export    in any order, all ranks

Suffixes: B rows of this rank, R data.maxResponseLength.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ppojob_api.v1alpha1.model import FrozenModel, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.objectives import Objective
from ppojob_trainer.engines.weights.buckets import WeightSource
from ppojob_trainer.protocol import DataProto, Keys

__all__ = ["EngineSetup", "ScoringEngine", "TrainEngine"]


@dataclass(frozen=True)
class EngineSetup:
    """Which model an engine computes, and how.

    model: with its path, which is never None; its offload, adapters and the like. training: of ref, the actor's.
    objective: what an update minimises; None for a model that is only computed. has_value_head: the model gives a value
    for each token instead of log-probs. seed: of new adapters and of a new value head. dtype: of the computation; what
    is trained, and sums of gradients, are float32. per_host: the role's ranks on this host; None: all of them.
    replays_experts: batches have recorded experts.
    """

    model: TrainedModel | FrozenModel
    training: ActorSpec | CriticSpec
    objective: Objective | None
    has_value_head: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    per_host: int | None = None
    replays_experts: bool = False

    @property
    def path(self) -> str:
        """The model's folder."""
        assert self.model.path is not None, "the roles fill in the actor's path"
        return self.model.path

    @property
    def section(self) -> str:
        """The section of the spec that `training` is; the reference's is the actor's."""
        return "critic" if isinstance(self.training, CriticSpec) else "actor"

    @property
    def sizes(self) -> dict[str, int]:
        """By field of the spec, the number of ranks over which the model is divided."""
        return {
            f"{self.section}.tensorParallelSize": self.training.tensor_parallel_size,
            f"{self.section}.sequenceParallelSize": self.training.sequence_parallel_size,
            f"{self.section}.pipelineParallelSize": self.training.pipeline_parallel_size,
            f"{self.section}.virtualPipelineParallelSize": self.training.virtual_pipeline_parallel_size,
            f"{self.section}.expertParallelSize": self.training.expert_parallel_size,
        }

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns that `TrainEngine.forward` returns."""
        return (Keys.VALUES,) if self.has_value_head else (Keys.OLD_LOG_PROBS, Keys.ENTROPYS)


class TrainEngine(Protocol):
    """One rank of a policy or of a value model, trained or frozen.

    Every method but `check`, `prepare_saves` and `is_saved` is collective: all ranks call it, each with its own rows,
    and the ranks of a tensor-, sequence- or pipeline-parallel group with the same rows; these return the same results.
    Between two calls, what `model.<role>.offload` names is on the host: a method reloads what it needs and offloads it
    again, so other roles have the GPU meanwhile. The engine reads from a batch the columns that its method names, and
    `meta_info`.
    """

    def check(self) -> None:
        """Refuse a model that cannot be computed or divided, from its configuration alone. Seconds; rank 0 calls it.

        Raises:
            ModelNotFoundError: there is no model at the path.
            ModelUnsupportedError: a part of the model is not supported.
            ModelMismatchError: it cannot be divided as the spec asks; names the field.
        """
        ...

    def load(self, parallel: ParallelMesh, *, total_steps: int, stays_gathered: bool = False) -> None:
        """Load the model and create its optimizer. Called once, before all methods below.

        Args:
            parallel: this rank's place among the others, and sums over them.
            total_steps: updates of the run, for the learning-rate schedule.
            stays_gathered: there is memory for the whole model on each rank through an optimizer step. An engine that
                does not divide a model's layers over ranks ignores it.

        Raises:
            ModelNotFoundError: the model cannot be read.
            ModelUnsupportedError: a part of it is not supported.
        """
        ...

    def warm_up(self, prompt_tokens: int, response_tokens: int) -> None:
        """Compile what the first step would compile, with sequences of up to these lengths.

        Called after `load` if the spec asks for `compile`. It changes neither parameters, optimizer nor random state.
        """
        ...

    def forward(self, batch: DataProto, *, with_adapters: bool = True) -> DataProto:
        """Return `EngineSetup.outputs` of the response tokens: ragged float32 columns on the CPU, rows in their order.

        A policy: old_log_probs and entropys in nats, at `Meta.TEMPERATURE`. A value model: values. 0 where
        response_mask is False. Reads input_ids and response_mask.

        Args:
            with_adapters: False: of the model as it was before its adapters were trained.
        """
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """Run PPO's epochs and minibatches over this rank's rows; return `Objective.metrics`.

        Each minibatch is an optimizer step, on gradients of the sum of `Objective.loss` over all micro-batches and
        data-parallel ranks, clipped to `gradClip`. A step with a gradient that is not finite changes nothing. The
        learning rate follows the schedule of the spec, by updates. Reads input_ids, `Objective.columns`, and the
        meta_info entries of `EngineMeta`; a policy reads `Meta.TEMPERATURE` too.

        Raises:
            NonFiniteError: `maxNonFiniteSteps` steps in a row had a gradient that is not finite.
            ProtocolError: an entry is missing, or the rows cannot be split into the minibatches.
        """
        ...

    def weights(self) -> WeightSource:
        """Return the current parameters for the rollout engines: whole, on the device, in the engine's dtype.

        They are those of the causal language model under HuggingFace's names, tied ones once, adapters merged. All
        ranks gather them in the same order. Policies only. If training changes only some of them, a
        `PartlyFrozenSource` has later pushes leave out the others.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write the policy as a HuggingFace folder: safetensors in bfloat16, config, tokenizer. Any rank may write.

        After an error of any rank, the folder is not a complete model.

        Raises:
            FileExistsError: the folder is not empty.
            CheckpointUnwritableError: the storage refused the write.
        """
        ...

    def prepare_saves(self) -> None:
        """Prepare, in the background, for saves in the background, so that the first takes no longer than later ones.

        Called at most once, after `load`, for a model that is trained. An engine may leave this method out.
        """
        ...

    def save(self, location: str | Path, *, in_background: bool = False) -> None:
        """Write all that an update changes to a new location: parameters, optimizer, schedule, random state.

        Args:
            location: a folder, or an address in an object store (s3://, gs://).
            in_background: return when later updates cannot change what is written. `is_saved` says when all is written.
                An update that waits for it may say how long, as `timing_s/checkpoint/wait_actor` or `.../wait_critic`.

        Raises:
            FileExistsError: the location is not empty.
            CheckpointUnwritableError: the storage refused the write.
            BucketFailedError: the object store failed.
        """
        ...

    def is_saved(self) -> bool:
        """Whether no save of this rank runs in the background.

        Raises:
            CheckpointUnwritableError, BucketFailedError: the last one failed; raised once.
        """
        ...

    def restore(self, location: str | Path) -> None:
        """Resume from a location of `save`, written by any number of ranks: the next update gives the same numbers.

        Raises:
            CheckpointUnreadableError: it is missing, incomplete or of another model.
            BucketFailedError: the object store failed.
        """
        ...


class ScoringEngine(Protocol):
    """One rank of a frozen sequence classifier, the reward model."""

    def score(self, token_lists: Sequence[Sequence[int]]) -> Tensor:
        """Return the score of each sequence, float32 [B] on the CPU. Collective; at least one sequence."""
        ...
