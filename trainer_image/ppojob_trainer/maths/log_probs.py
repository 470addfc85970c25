"""Log-probs of given tokens and entropies straight from hidden states, never holding [T, V] in float32.

The output layer of a language model is its widest: 16 k tokens x 152 k words are 10 GB in float32, several times over
with the softmax and its gradient. Here both directions go through the tokens in chunks, and backward computes each
chunk's logits again. On CUDA the product of a chunk is kept in float32, and `softmax_cuda` goes over it once in each
direction. Called by the FSDP engine in place of the model's own output layer.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one chunk in float32: 2**26 numbers are 256 MiB, and about three of that size live at a time.
CHUNK_NUMBERS: Final = 2**26
# A GPU needs more rows to be busy, and adds to the weight's gradient once for each chunk: 1 GiB, and half of it again.
CHUNK_NUMBERS_CUDA: Final = 2**28


def chunk_tokens(vocabulary_size: int, *, is_cuda: bool = False) -> int:
    """Tokens of one chunk, so that its float32 logits hold about `CHUNK_NUMBERS` numbers."""
    tokens = max(1, (CHUNK_NUMBERS_CUDA if is_cuda else CHUNK_NUMBERS) // vocabulary_size)
    # Whole tiles of the matrix product.
    return tokens // 128 * 128 if tokens > 128 else tokens


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
        hidden: [T, D], float32, bfloat16 or float64; the product is taken in this dtype (its sums stay in float32 on
            CUDA), the softmax in float32 (float64 for float64).
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
    size = chunk_size or chunk_tokens(weight.shape[0], is_cuda=hidden.is_cuda)
    outputs = _LinearLogProbs.apply(hidden, weight, labels, float(temperature), size)  # type: ignore[no-untyped-call]
    log_probs, entropy = outputs
    return log_probs, entropy


def plain_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The definition, on logits [T, V] in memory: what `linear_log_probs` must equal. Small models only."""
    log_p = torch.log_softmax(logits.to(_softmax_dtype(logits)) / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def _softmax_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _kernels(tensor: Tensor) -> ModuleType | None:
    """The module with the GPU's kernels, or None where plain PyTorch computes."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    from ppojob_trainer.maths import softmax_cuda

    return softmax_cuda


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product in the softmax's dtype; on CUDA the sums are never rounded to bfloat16."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).to(_softmax_dtype(left))


def _statistics(logits_CV: Tensor, labels_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the labels, entropies and logsumexp of logits / temperature, each [C]. Overwrites the logits."""
    if (kernels := _kernels(logits_CV)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.statistics(logits_CV, labels_C, temperature)
        return found
    z_CV = logits_CV.div_(temperature)
    log_sum_C = torch.logsumexp(z_CV, dim=-1)
    log_probs_C = z_CV.gather(-1, labels_C.unsqueeze(-1)).squeeze(-1) - log_sum_C
    log_p_CV = z_CV.sub_(log_sum_C.unsqueeze(-1))
    return log_probs_C, -(log_p_CV.exp().mul_(log_p_CV)).sum(dim=-1), log_sum_C


def _gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    statistics: tuple[Tensor, Tensor],
    outer: tuple[Tensor, Tensor | None],
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [C, V] of log-probs and entropies by the logits. Overwrites the logits.

    statistics: logsumexp and entropies. outer: the gradients by the log-probs and, unless None, by the entropies.
    """
    log_sum_C, entropy_C = statistics
    grad_log_probs_C, grad_entropy_C = outer
    if (kernels := _kernels(logits_CV)) is not None:
        found: Tensor = kernels.gradient(logits_CV, labels_C, statistics, outer, temperature, dtype)
        return found
    log_p_CV = logits_CV.div_(temperature).sub_(log_sum_C.unsqueeze(-1))
    p_CV = log_p_CV.exp()
    if grad_entropy_C is None:
        grad_CV = torch.zeros_like(p_CV)
    else:
        grad_CV = log_p_CV.add_(entropy_C.unsqueeze(-1)).mul_(p_CV).mul_(-grad_entropy_C.unsqueeze(-1))
    grad_CV.sub_(p_CV.mul_(grad_log_probs_C.unsqueeze(-1)))
    grad_CV.scatter_add_(-1, labels_C.unsqueeze(-1), grad_log_probs_C.unsqueeze(-1))
    return grad_CV.div_(temperature).to(dtype)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy, log_sum = (
            torch.empty(hidden.shape[0], dtype=_softmax_dtype(hidden), device=hidden.device) for _ in range(3)
        )
        # Autocast would silently change the dtype of the product.
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], size):
                rows = slice(start, start + size)
                logits_CV = _product(hidden[rows], weight.t())
                log_probs[rows], entropy[rows], log_sum[rows] = _statistics(logits_CV, labels[rows], temperature)
        ctx.save_for_backward(hidden, weight, labels, entropy, log_sum)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, entropy, log_sum = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Summed over chunks in the softmax's dtype: many small bfloat16 additions would lose the gradient.
        grad_weight = torch.zeros_like(weight, dtype=_softmax_dtype(weight)) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], ctx.size):
                rows = slice(start, start + ctx.size)
                grad_logits = _gradient(
                    _product(hidden[rows], weight.t()),
                    labels[rows],
                    (log_sum[rows], entropy[rows]),
                    (grad_log_probs[rows], None if grad_entropy is None else grad_entropy[rows]),
                    ctx.temperature,
                    hidden.dtype,
                )
                if grad_hidden is not None:
                    grad_hidden[rows] = torch.mm(grad_logits, weight)
                if grad_weight is not None:
                    grad_weight += _product(grad_logits.t(), hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
