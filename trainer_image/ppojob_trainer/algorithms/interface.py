"""The types of a user's own estimator and policy loss. B: rows (responses), R: data.maxResponseLength.

A function is called with its inputs and the `kwargs` of its block in the PPOJob. It must not change its inputs, and
must depend on nothing else: each process calls it with its own rows, and a resumed run calls it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ppojob_trainer.maths.advantages import AdvantageInputs
from ppojob_trainer.maths.policy_losses import PolicyLossInputs

__all__ = ["AdvantageFunction", "AdvantageInputs", "PolicyLossFunction", "PolicyLossInputs"]


class AdvantageFunction(Protocol):
    """An estimator of advantages, for `algorithm.advantageFunction`.

    It is called on the CPU with some rows of a step's batch; all responses to a prompt are among them.
    """

    def __call__(self, inputs: AdvantageInputs, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return advantages, float32 [B, R], or advantages and returns, float32 [B, R] each.

        Returns are what the critic learns; without them they are the advantages. What is outside the mask is ignored.
        Inside, all must be finite. `inputs.values` is there with needsValues, `inputs.groups` with needsGroups.
        """
        ...


class PolicyLossFunction(Protocol):
    """A policy loss, for `algorithm.policyLossFunction`.

    It is called on the device that trains with some rows of a minibatch. It must not read numbers from the device
    (`item`, `tolist`, a condition on a tensor), because each would wait for all queued work.
    """

    def __call__(self, inputs: PolicyLossInputs, **kwargs: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each token, float32 [B, R], with a gradient by `inputs.log_prob`; and metrics.

        actor.lossAggregation makes one number of the losses. Metrics are [B, R] tensors by name: the mean over all
        tokens of the policy becomes `actor/<name>`. The names must be the same in every call.
        """
        ...
