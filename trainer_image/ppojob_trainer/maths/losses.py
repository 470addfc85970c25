"""PPO's losses. Every number that leaves this module is a share: add the shares of all micro-batches and all ranks.

The denominators are those of the optimizer step's whole minibatch over all ranks, and they are passed in. So the
gradient depends neither on how the minibatch is cut nor on the number of ranks, and metrics add up the same way.
A data-parallel engine that averages gradients over n ranks (FSDP does) multiplies the loss by n before backward.
Called by the objectives of the training engines. `policy_losses` has the loss of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ppojob_trainer.maths.masked import masked_mean, masked_sum
from ppojob_trainer.maths.policy_losses import PolicyLoss, PolicyLossInputs, ppo


@dataclass(frozen=True)
class Denominators:
    """What the losses of a minibatch are divided by: its unmasked tokens, and its sequences that have any."""

    tokens: float
    sequences: float

    @classmethod
    def of(cls, mask: Tensor) -> Denominators:
        """Counts of a mask [B, R]. Sum `to_tensor` over ranks for those of the whole minibatch."""
        return cls(tokens=float(mask.bool().sum()), sequences=float(mask.bool().any(dim=-1).sum()))

    def to_tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return float64 [2], to be summed over ranks (all-reduce)."""
        return torch.tensor([self.tokens, self.sequences], dtype=torch.float64, device=device)

    @classmethod
    def from_tensor(cls, summed: Tensor) -> Denominators:
        """Undo `to_tensor`."""
        tokens, sequences = summed.tolist()
        return cls(tokens, sequences)


Loss = tuple[Tensor, dict[str, Tensor]]


def _token_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    return masked_sum(loss, mask) / max(denominators.tokens, 1.0)


def _seq_mean_token_sum(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    return masked_sum(loss, mask) / max(denominators.sequences, 1.0)


def _seq_mean_token_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    return masked_mean(loss, mask, dim=-1).sum() / max(denominators.sequences, 1.0)


def _seq_mean_token_sum_norm(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    return _seq_mean_token_sum(loss, mask, denominators) / loss.shape[-1]


AGGREGATIONS: Final[dict[str, Callable[[Tensor, Tensor, Denominators], Tensor]]] = {
    "TokenMean": _token_mean,
    "SeqMeanTokenSum": _seq_mean_token_sum,
    "SeqMeanTokenSumNorm": _seq_mean_token_sum_norm,
    "SeqMeanTokenMean": _seq_mean_token_mean,
}


def aggregate(loss: Tensor, mask: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the minibatch's loss, a scalar.

    token-mean: all tokens weigh the same (DAPO, Yu et al. 2025, arXiv 2503.14476, equation 12). seq-mean-token-sum:
    the sum over a sequence's tokens, then the mean over sequences. seq-mean-token-sum-norm: that, divided by R, which
    all sequences have in common (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783, section 3.2). seq-mean-token-mean: the
    mean over a sequence's tokens, then over sequences (DeepSeekMath, equation 3).

    Args:
        loss: float [B, R]; R is data.maxResponseLength.
        mask: [B, R].
        denominators: of the whole minibatch over all ranks.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {mode!r}: choose one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[mode](loss, mask, denominators)


def balance_loss(fractions_E: Tensor, probabilities_E: Tensor) -> Tensor:
    """The load-balancing loss of a mixture of experts, a scalar: E * sum_e fractions_e * probabilities_e.

    Fedus et al. 2021 (Switch Transformer, arXiv 2101.03961), equations 4 to 6, after Shazeer et al. 2017 (arXiv
    1701.06538). As in transformers, a token with K experts counts K times, so the loss is K if all experts are used
    equally.

    Args:
        fractions_E: float [E], tokens of an expert, divided by the tokens; without a gradient.
        probabilities_E: float [E], the mean over the tokens of the router's probability.
    """
    return len(fractions_E) * (fractions_E * probabilities_E).sum()


def policy_loss(
    inputs: PolicyLossInputs,
    denominators: Denominators,
    compute: PolicyLoss = ppo,
    aggregation: str = "TokenMean",
) -> Loss:
    """The share of a policy loss: `compute` gives the loss of each token, which is aggregated here.

    Args:
        inputs: of some responses of the minibatch.
        compute: see `policy_losses`.

    Returns:
        The share of the loss, and shares of the metrics `pg_loss`, `ppo_kl` (the token mean of -log_ratio), and of
        the token means of the metrics of `compute`.
    """
    losses, of_tokens = compute(inputs)
    loss = aggregate(losses, inputs.mask, aggregation, denominators)
    with torch.no_grad():
        metrics = {
            "pg_loss": loss.detach(),
            "ppo_kl": _token_mean(-inputs.log_ratio, inputs.mask, denominators),
            **{name: _token_mean(values.float(), inputs.mask, denominators) for name, values in of_tokens.items()},
        }
    return loss, metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    denominators: Denominators,
    clip_range: float = 0.5,
    aggregation: str = "TokenMean",
) -> Loss:
    """Half the squared error, pessimistically clipped around the old values.

    loss = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2: Schulman et al. 2017, equation 9, with the
    clipping of OpenAI's baselines, as in verl.

    Args:
        values: float32 [B, R] with gradient; old_values, returns: float32 [B, R]; mask: [B, R].

    Returns:
        The share of the loss, and shares of the metrics `vf_loss`, `vf_clipfrac`, `vpred_mean` (token means).
    """
    near = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    plain = (values - returns).square()
    clipped = (near - returns).square()
    loss = aggregate(0.5 * torch.maximum(plain, clipped), mask, aggregation, denominators)
    with torch.no_grad():
        metrics = {
            "vf_loss": loss.detach(),
            "vf_clipfrac": _token_mean((clipped > plain).float(), mask, denominators),
            "vpred_mean": _token_mean(values.detach(), mask, denominators),
        }
    return loss, metrics


def entropy_bonus(
    entropy: Tensor, mask: Tensor, denominators: Denominators, coefficient: float, aggregation: str = "TokenMean"
) -> Loss:
    """Minus coefficient times the mean entropy (Schulman et al. 2017, equation 9), to be added to the policy loss.

    Args:
        entropy: float32 [B, R], with gradient if the coefficient is not 0.

    Returns:
        The share of the loss, and of the metric `entropy`.
    """
    mean = aggregate(entropy, mask, aggregation, denominators)
    return -coefficient * mean, {"entropy": mean.detach()}


def kl_loss(
    kl: Tensor, mask: Tensor, denominators: Denominators, coefficient: float, aggregation: str = "TokenMean"
) -> Loss:
    """Coefficient times the mean of the KL estimates, to be added to the policy loss (DeepSeekMath, equation 3).

    Args:
        kl: float32 [B, R] of `kl.kl_estimate` with gradient.

    Returns:
        The share of the loss, and of the metric `kl_loss` (without the coefficient, as in verl).
    """
    mean = aggregate(kl, mask, aggregation, denominators)
    return coefficient * mean, {"kl_loss": mean.detach()}
