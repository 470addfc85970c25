"""Log-probs of given tokens and entropies straight from hidden states, never holding [T, V] in float32.

The output layer of a language model is its widest: 16 k tokens x 152 k words are 10 GB in float32, several times over
with the softmax and its gradient. Here both directions go through the tokens in chunks, and backward computes each
chunk's logits again. Called by the policy engine in place of the model's own output layer.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one chunk in float32: 2**26 numbers are 256 MiB, and about three of that size live at a time.
CHUNK_NUMBERS: Final = 2**26


def chunk_tokens(vocabulary_size: int) -> int:
    """Tokens of one chunk, so that its float32 logits hold about `CHUNK_NUMBERS` numbers."""
    return max(1, CHUNK_NUMBERS // vocabulary_size)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `labels` and entropies under softmax(hidden @ weight.T / temperature).

    With z = logits / temperature, p = softmax(z), H = -sum p log p: log-prob = z_label - logsumexp(z). Gradients:
    d log-prob / dz = onehot - p;  dH / dz_v = -p_v (log p_v + H).

    Args:
        hidden: [T, D], float32, bfloat16 or float64; the product is taken in this dtype, the softmax in float32
            (float64 for float64), which is also what vLLM does.
        weight: [V, D], same dtype.
        labels: int64 [T], in [0, V).
        temperature: of sampling, > 0.
        chunk_size: tokens of a chunk; default `chunk_tokens(V)`.

    Returns:
        log_probs [T], entropy [T], both float32 (float64 for float64) and differentiable in hidden and weight.

    Raises:
        ValueError: shapes that do not fit, or temperature <= 0.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [T, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels must be [{hidden.shape[0]}], one for each row of hidden, got {list(labels.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    size = chunk_size or chunk_tokens(weight.shape[0])
    outputs = _LinearLogProbs.apply(hidden, weight, labels, float(temperature), size)  # type: ignore[no-untyped-call]
    log_probs, entropy = outputs
    return log_probs, entropy


def plain_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The definition, on logits [T, V] that stand in memory: what `linear_log_probs` must equal. Small models only."""
    log_p = torch.log_softmax(logits.to(_softmax_dtype(logits)) / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def _softmax_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _log_softmax(hidden_CD: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits_CV = torch.mm(hidden_CD, weight.t()).to(_softmax_dtype(hidden_CD))
    return torch.log_softmax(logits_CV.div_(temperature), dim=-1)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(hidden.shape[0], dtype=_softmax_dtype(hidden), device=hidden.device)
        entropy = torch.empty_like(log_probs)
        # Autocast would silently change the dtype of the product.
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], size):
                rows = slice(start, start + size)
                log_p = _log_softmax(hidden[rows], weight, temperature)
                log_probs[rows] = log_p.gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1)
                entropy[rows] = -(log_p.exp().mul_(log_p)).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, labels, entropy)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Summed over chunks in the softmax's dtype: many small bfloat16 additions would lose the gradient.
        grad_weight = torch.zeros_like(weight, dtype=_softmax_dtype(weight)) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], ctx.size):
                rows = slice(start, start + ctx.size)
                log_p = _log_softmax(hidden[rows], weight, ctx.temperature)
                grad_z = _grad_logits(
                    log_p,
                    labels[rows],
                    entropy[rows],
                    None if grad_log_probs is None else grad_log_probs[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                )
                grad_logits = grad_z.div_(ctx.temperature).to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = torch.mm(grad_logits, weight)
                if grad_weight is not None:
                    grad_weight += torch.mm(grad_logits.t(), hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _grad_logits(
    log_p: Tensor, labels: Tensor, entropy: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient [C, V] of both outputs by the scaled logits; either outer gradient may be absent. Overwrites log_p."""
    p = log_p.exp()
    grad = torch.zeros_like(p) if grad_entropy is None else None
    if grad_entropy is not None:
        grad = log_p.add_(entropy.unsqueeze(-1)).mul_(p).mul_(-grad_entropy.unsqueeze(-1))
    assert grad is not None
    if grad_log_probs is not None:
        grad.sub_(p.mul_(grad_log_probs.unsqueeze(-1)))
        grad.scatter_add_(-1, labels.unsqueeze(-1), grad_log_probs.unsqueeze(-1))
    return grad
