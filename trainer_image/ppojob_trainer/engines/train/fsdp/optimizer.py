"""AdamW with gradient clipping and a learning-rate schedule, which skips a step whose gradient is not finite.

Called by the engine's update, once for each minibatch. AdamW with decoupled weight decay: Loshchilov and Hutter 2019,
arXiv 1711.05101; betas (0.9, 0.999), epsilon 1e-8 and decay on all parameters, as in verl. The device itself decides
whether a step is skipped, so the host waits for no norm before the end of the update. It raises an error after
`maxNonFiniteSteps` skipped steps in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.errors import NonFiniteError
from ppojob_trainer.engines.train.learning_rate import learning_rate_factor
from ppojob_trainer.engines.train.pipeline import PipelinePeers


class Optimizer:
    """See the module's docstring."""

    def __init__(
        self,
        module: nn.Module,
        training: ActorSpec | CriticSpec,
        total_steps: int,
        peers: PipelinePeers | None = None,
        copy: nn.Parameter | None = None,
    ) -> None:
        """Create the optimizer for a sharded module's trainable parameters.

        Args:
            total_steps: updates of the run.
            peers: of a pipeline stage; the norm is that of all stages.
            copy: of a tied parameter, which an earlier stage has too: it counts once.
        """
        self.training = training
        self._peers, self._copy = peers, copy
        self.parameters: list[nn.Parameter] = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        first, second = training.betas
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=training.learning_rate,
            betas=(first, second),
            weight_decay=training.weight_decay,
            fused=True,
        )
        self._factor = learning_rate_factor(training, total_steps)
        self.num_updates = 0
        self.num_skipped_in_a_row = 0
        self._set_learning_rate()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current update."""
        return self.training.learning_rate * self._factor(self.num_updates)

    def clip(self) -> Tensor:
        """Clip the gradient to `gradClip`; return its norm before that, float32 [] on the device. Collective."""
        counted = (parameter for parameter in self.parameters if parameter is not self._copy)
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        norm = _norm(gradients)
        if self._peers is not None:
            norm = self._peers.sum(norm.square()).sqrt()
        if self.training.grad_clip > 0:
            for group in _of_meshes(self.parameters):
                torch.nn.utils.clip_grads_with_norm_(group, self.training.grad_clip, norm)
        return norm

    def step(self, norm: Tensor) -> None:
        """Update the parameters if the gradient, whose norm `clip` returned, is finite; clear it."""
        # The fused kernel reads it: 1 leaves parameters, moments and their step count unchanged.
        self.adamw.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def finish_update(self, norms: Sequence[Tensor]) -> list[float]:
        """Advance the learning rate, once for each update; return the norms of its steps. Waits for the device.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
        """
        found: list[float] = torch.stack(list(norms)).tolist()
        for norm in found:
            self._count(math.isfinite(norm), norm)
        self.num_updates += 1
        self._set_learning_rate()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without AdamW's moments."""
        return {"num_updates": self.num_updates, "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, after AdamW's moments were loaded."""
        self.num_updates = int(state["num_updates"])
        self.num_skipped_in_a_row = int(state["num_skipped_in_a_row"])
        self._set_learning_rate()

    def _count(self, is_finite: bool, grad_norm: float) -> None:
        self.num_skipped_in_a_row = 0 if is_finite else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row >= self.training.max_non_finite_steps:
            raise NonFiniteError(
                f"the gradient's norm was {grad_norm} in {self.num_skipped_in_a_row} optimizer steps in a row: "
                "lower learningRate or look for infinite rewards (maxNonFiniteSteps sets how many are skipped)"
            )

    def _set_learning_rate(self) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of gradients of which this rank has parts, float32 []. Collective.

    One sum for each axis over which some are divided. torch's norm of DTensors makes the same sums, but warns at each
    start that there are several, and computes with DTensors for each parameter.
    """
    found: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            found.setdefault((gradient.device_mesh, _axes_of(gradient)), []).append(gradient.to_local())
        else:
            found.setdefault((None, ()), []).append(gradient)
    squares = []
    for (mesh, axes), parts in found.items():
        squared = torch.nn.utils.get_total_norm(parts).square()
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(squared, group=mesh.get_group(axis))
        squares.append(squared)
    return torch.stack(squares).sum().sqrt()


def _axes_of(gradient: DTensor) -> tuple[int, ...]:
    """Return the axes of the mesh over which a gradient is divided; ranks of the others have the same."""
    # Of two axes that divide the same dimension, torch calls one by another class of placement, which is no shard.
    assert not any(placement.is_partial() for placement in gradient.placements)
    return tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())


def _of_meshes(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the tensors of each mesh: torch computes with those of one at a time. Divided experts have their own."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return found.values()
