"""Attention over packed sequences, registered with transformers: no token attends to another sequence, no padding.

On CUDA it is one call of `torch.nn.attention.varlen` for all sequences. The CPU has no such kernel, so there it is
causal SDPA for each sequence in turn, which avoids the masked part of a block-diagonal mask. If the tokens are divided
over ranks (`train.sequence`), slices are exchanged for heads before it, and back after it. With context parallelism a
rank has the queries of a part of the tokens: they are the last ones of the tokens of their keys, so the causal mask is
aligned at its bottom right corner. Families with attention sinks (`sinks`) give them along. Called by transformers'
decoder layers under the name `IMPLEMENTATION`. It refuses dropout, which would make log-probs unrepeatable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from ppojob_trainer.engines.train.batch import Segments
from ppojob_trainer.engines.train.fsdp.sinks import Packing, attend_with_sinks

IMPLEMENTATION: Final = "ppojob_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence.

    Args:
        query: [1, H, T, D]; key, value: [1, K, T, D], where H is a multiple of K. With sequence parallelism T is this
            rank's slice. Values may be shorter than keys, as those of latent attention.
        attention_mask: None; the segments define the mask.
        options: `segments` (see `batch.Segments`), `scaling`, `sliding_window` (a token attends to this many tokens,
            itself included; None: all), `s_aux` (sinks [H]; None: there are none), as the decoder layers pass them on.

    Returns:
        [1, T, H, size of a value], and None in place of the weights.
    """
    if options.get("dropout"):
        raise ValueError(f"attention dropout {options['dropout']} is not supported: set attention_dropout to 0")
    segments: Segments = options["segments"]
    window: int | None = options.get("sliding_window")
    # The rounded number: compiled code that reads the lengths is compiled for each number of sequences.
    if window is not None and window >= (segments.keys or segments).bound:
        window = None
    scores = _Scores(options.get("scaling"), window, options.get("s_aux"))
    attend = _varlen if query.is_cuda else _one_by_one
    if segments.peers is None:
        return attend(query, key, value, segments, scores), None
    size = value.shape[-1]
    # The ranks exchange queries, keys and values in one message.
    value = _widened(value, key)
    query, key, value = segments.peers.to_heads(query, key, value, segments.num_tokens)
    key, value = segments.peers.gather(key, value, segments.places)
    if scores.sinks is not None:
        scores = replace(scores, sinks=segments.peers.of_heads(scores.sinks))
    output = attend(query, key, value, segments, scores)
    return segments.peers.to_slices(_narrowed(output, size)), None


@dataclass(frozen=True)
class _Scores:
    """How scores are computed and summed. sinks: of the query heads [H]; None: there are none."""

    scaling: float | None
    window: int | None
    sinks: Tensor | None = None


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: _Scores) -> Tensor:
    size = value.shape[-1]
    # The kernel has one size for all three.
    value = _widened(value, key)
    query_THD, key_SKD, value_SKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    keys = segments.keys or segments
    window = (-1 if scores.window is None else scores.window - 1, 0)
    if scores.sinks is not None:
        packing = Packing(segments.cu_seqlens, keys.cu_seqlens, segments.bound, keys.bound, scores.scaling, window)
        return _narrowed(attend_with_sinks(query_THD, key_SKD, value_SKD, scores.sinks, packing), size).unsqueeze(0)
    output: Any = varlen_attn(
        query_THD,
        key_SKD,
        value_SKD,
        segments.cu_seqlens,
        keys.cu_seqlens,
        segments.bound,
        keys.bound,
        scale=scores.scaling,
        window_size=window,
        enable_gqa=True,
    )
    return _narrowed(output, size).unsqueeze(0)


def _widened(value: Tensor, key: Tensor) -> Tensor:
    """Return values as long as the keys, with zeros at their ends."""
    missing = key.shape[-1] - value.shape[-1]
    # A copy for nothing would take memory.
    return functional.pad(value, (0, missing)) if missing else value


def _narrowed(output: Any, size: int) -> Tensor:
    """Return the sums of the values without those of the zeros."""
    narrowed: Tensor = output if output.shape[-1] == size else output[..., :size]
    return narrowed


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: _Scores) -> Tensor:
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    lengths, of_keys = list(segments.lengths), list((segments.keys or segments).lengths)
    # Not for each part by its lengths, because a compiled layer would be compiled again for each part that differs.
    is_causal = segments.keys is None and scores.window is None and scores.sinks is None
    parts = zip(
        *(torch.split(tensor, each, dim=2) for tensor, each in ((query, lengths), (key, of_keys), (value, of_keys))),
        strict=True,
    )
    outputs = [
        functional.scaled_dot_product_attention(
            part_query,
            part_key,
            part_value,
            attn_mask=None if is_causal else _mask(part_query.shape[2], part_key.shape[2], scores.window),
            is_causal=is_causal,
            scale=scores.scaling,
        )
        if scores.sinks is None
        else _with_sinks(part_query, part_key, part_value, scores, scores.sinks)
        for part_query, part_key, part_value in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, scores: _Scores, sinks: Tensor) -> Tensor:
    """Return the attention of one sequence, to one more key of zeros with the sinks as its scores."""
    mask = torch.where(_mask(query.shape[2], key.shape[2], scores.window), 0.0, -torch.inf).to(query.dtype)
    num_heads, num_queries = query.shape[1:3]
    columns = sinks.to(query.dtype).view(1, num_heads, 1, 1).expand(1, num_heads, num_queries, 1)
    with_sinks = torch.cat([mask.expand(1, num_heads, *mask.shape), columns], dim=3)
    key, value = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=with_sinks, scale=scores.scaling)


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _mask(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Return the mask of queries that are the last ones of the keys' tokens."""
    place = torch.arange(num_keys)
    distance = place[num_keys - num_queries :].unsqueeze(1) - place.unsqueeze(0)
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
