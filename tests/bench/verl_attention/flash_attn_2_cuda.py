"""The compiled module of flash-attn 2.8, with torch's build of the same kernels, for verl.

verl needs flash-attn. Its package is Python code over a compiled module of this name, and has no build for each torch.
torch has the kernels too (`aten::_flash_attention_forward`). So this folder and flash-attn's Python code on an
interpreter's path are enough for packed sequences. Everything else is refused. Nothing of this project imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, starts_q: Tensor, starts_k: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over packed sequences, as flash-attn's Python code calls it.

    Args:
        q, k, v: [tokens, heads, size of a head], in bfloat16 or float16.
        starts_q, starts_k: where the sequences begin, and the end of the last one, int32, [sequences + 1].
        rest: seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            zero_tensors, causal, window_size_left, window_size_right, softcap, return_softmax, generator.

    Returns:
        The outputs, as `q`; the logarithms of the softmax's sums, float32, [heads, tokens]; no probabilities; the state
        of the random generator, which dropout would have used.

    Raises:
        NotImplementedError: an argument asks for what torch's call does not have.
    """
    used, left, table, slopes, longest_q, longest_k, dropout, scale, _, causal, *window, cap, probabilities, _ = rest
    _refuse(out=out, seqused_k=used, leftpad_k=left, block_table=table, alibi_slopes=slopes)
    _refuse(softcap=cap or None, return_softmax=probabilities or None, dropout_p=dropout or None)
    output, log_sums, random, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False, scale=scale, **_window(*window)
    )
    return output, log_sums, q.new_empty(0), random


def varlen_bwd(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `varlen_fwd`, written into the given tensors.

    Args:
        d_out: gradient of the outputs.
        rest: dq, dk, dv, starts_q, starts_k, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            zero_tensors, causal, window_size_left, window_size_right, softcap, deterministic, generator, rng_state.
    """
    dq, dk, dv, starts_q, starts_k, slopes, longest_q, longest_k, dropout, *others = rest
    scale, _, causal, *window, cap, _, _, random = others
    _refuse(alibi_slopes=slopes, softcap=cap or None, dropout_p=dropout or None)
    found = torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, log_sums, starts_q, starts_k, longest_q, longest_k, 0.0, causal, random, q.new_empty(0),
        scale=scale, **_window(*window),
    )  # fmt: skip
    for given, gradient in zip((dq, dk, dv), found, strict=True):
        given.copy_(gradient)
    return dq, dk, dv, log_sums.new_empty(0)


def __getattr__(name: str) -> Any:
    if name in {"fwd", "bwd", "fwd_kvcache"}:
        raise NotImplementedError(f"flash_attn_2_cuda.{name}: only packed sequences are supported here")
    raise AttributeError(name)


def _window(left: int, right: int) -> dict[str, int | None]:
    return {"window_size_left": None if left < 0 else left, "window_size_right": None if right < 0 else right}


def _refuse(**arguments: object) -> None:
    if given := [name for name, value in arguments.items() if value is not None]:
        raise NotImplementedError(f"flash_attn_2_cuda: {given[0]} is not supported here")
