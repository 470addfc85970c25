"""Log-probs at a real vocabulary never hold the logits of all tokens at once, forward or backward.

The instrument sees every tensor that PyTorch's operators make: the largest of them, and the bytes alive at the same
time. It is shown to see what it shall see, on the formula that does hold the logits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ppojob_trainer.maths.log_probs import CHUNK_NUMBERS, chunk_tokens, linear_log_probs, plain_log_probs

QWEN_VOCABULARY = 151_936
FLOAT32_BYTES = 4
LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class MadeTensors(TorchDispatchMode):
    """Watches the storages that operators make, until they are freed; those of `known` tensors do not count."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.alive_bytes = self.peak_bytes = self.largest_bytes = 0
        self._seen = WeakIdKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        size = storage.nbytes()
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        self.largest_bytes = max(self.largest_bytes, size)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.alive_bytes -= size


@dataclass(frozen=True)
class Case:
    """So many tokens, of width 4, with that vocabulary; logits of at most `chunk` numbers are made at a time."""

    tokens: int
    vocabulary: int
    chunk: int


def measured(compute: LogProbs, case: Case, dtype: torch.dtype = torch.float32) -> MadeTensors:
    """Run forward and backward of log-probs and entropies."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.tokens, 4, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(case.vocabulary, 4, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    with MadeTensors(hidden, weight, labels) as made:
        log_probs, entropies = compute(hidden, weight, labels)
        (log_probs.sum() + 0.1 * entropies.sum()).backward()
    assert hidden.grad is not None
    return made


def assert_only_chunks(made: MadeTensors, case: Case) -> None:
    """A chunk's logits, three more of their size for softmax and gradient, and what the weights' gradient needs."""
    assert made.largest_bytes <= max(case.chunk, 4 * case.vocabulary) * FLOAT32_BYTES
    assert made.peak_bytes < 4 * case.chunk * FLOAT32_BYTES + 16 * case.vocabulary * FLOAT32_BYTES
    assert made.peak_bytes < case.tokens * case.vocabulary * FLOAT32_BYTES


SMALL = Case(tokens=512, vocabulary=1000, chunk=32 * 1000)


def in_small_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return linear_log_probs(hidden, weight, labels, chunk_size=32)


def at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return plain_log_probs(hidden @ weight.t(), labels)


def test_the_instrument_sees_logits_that_are_held() -> None:
    made = measured(at_once, SMALL)

    assert made.largest_bytes == SMALL.tokens * SMALL.vocabulary * FLOAT32_BYTES
    assert made.peak_bytes > 3 * made.largest_bytes
    with pytest.raises(AssertionError):
        assert_only_chunks(made, SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_chunk_of_logits_is_held(dtype: torch.dtype) -> None:
    assert_only_chunks(measured(in_small_chunks, SMALL, dtype), SMALL)


def test_more_tokens_take_no_more_memory_but_their_own() -> None:
    more = Case(tokens=4 * SMALL.tokens, vocabulary=SMALL.vocabulary, chunk=SMALL.chunk)

    # Log-probs, entropies, logsumexp and their gradients: 16 numbers of a token are far less than its 1000 logits.
    grown = measured(in_small_chunks, more).peak_bytes - measured(in_small_chunks, SMALL).peak_bytes
    assert 0 <= grown < 16 * FLOAT32_BYTES * (more.tokens - SMALL.tokens)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_vocabulary() -> None:
    tokens = 2048
    case = Case(tokens, QWEN_VOCABULARY, chunk_tokens(QWEN_VOCABULARY) * QWEN_VOCABULARY)
    assert case.chunk <= CHUNK_NUMBERS

    made = measured(linear_log_probs, case, torch.bfloat16)

    assert_only_chunks(made, case)
    print(f"{tokens} tokens: peak {made.peak_bytes / 2**20:.0f} MiB, largest {made.largest_bytes / 2**20:.0f} MiB")
