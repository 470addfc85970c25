"""Whether drafts pay off: a measured choice for each size of the batch. Called by the scheduler in vLLM's process.

    8 to 15 sequences:   16 steps with drafts │ 16 without │ 128 the faster way │ 16 the other │ 256 the faster way ...

A step that checks drafts takes longer, and how much longer depends on the model, the GPU and the number of sequences.
How many drafts are right depends on the text. So both ways are timed, in tokens per second and sequence, and the
faster one continues. The choice depends on times and changes no response, because the model samples the same tokens
either way (`seeded_verification`). This module decides; it schedules nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

TRIAL_STEPS: Final = 16
FIRST_STRETCH, LONGEST_STRETCH = 128, 2048
"""Steps of the faster way between two trials of the other. They double while the faster way stays the same."""
UNSETTLED_STEPS: Final = 2
"""Steps after a change that are not counted: they were under way, or have no drafts yet."""

_Way: TypeAlias = bool
"""Whether steps have drafts."""


@dataclass
class _Size:
    """Batches of similar size. way: of the present steps, `left` of which remain until the next choice.

    rates: tokens per second and sequence of each way when it was measured last.
    """

    way: _Way = True
    left: int = TRIAL_STEPS
    unsettled: int = UNSETTLED_STEPS
    stretch: int = FIRST_STRETCH
    faster: _Way | None = None
    rates: dict[_Way, float] = field(default_factory=dict)
    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Count a step: its tokens for each sequence."""
        if self.unsettled:
            self.unsettled -= 1
            return
        self.tokens += tokens
        self.seconds += seconds
        self.left -= 1
        if self.left == 0:
            self.rates[self.way] = self.tokens / max(self.seconds, 1e-9)
            self.tokens = self.seconds = 0.0
            self._choose()

    def _choose(self) -> None:
        if len(self.rates) == 1 or self.way is self.faster:
            self._continue(not self.way, TRIAL_STEPS)
            return
        faster = self.rates[True] > self.rates[False]
        self.stretch = min(2 * self.stretch, LONGEST_STRETCH) if faster is self.faster else FIRST_STRETCH
        self.faster = faster
        self._continue(faster, self.stretch)

    def _continue(self, way: _Way, steps: int) -> None:
        self.unsettled = UNSETTLED_STEPS if way is not self.way else 0
        self.way, self.left = way, steps


class DraftingChoice:
    """See the module's docstring."""

    def __init__(self, max_num_seqs: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`max_num_seqs`: with more sequences there are no drafts, and nothing is measured."""
        self._max_num_seqs, self._clock = max_num_seqs, clock
        self._sizes: dict[int, _Size] = {}
        self._before: tuple[int, _Way] | None = None
        self._time = 0.0

    def wants_drafts(self, num_sequences: int) -> bool:
        """Whether the next steps of so many sequences should have drafts."""
        return num_sequences <= self._max_num_seqs and self._size(num_sequences).way

    def observe(self, num_sequences: int, num_tokens: int, *, has_drafts: bool) -> None:
        """Record that a step of decoding alone has ended. Its time is that since the end of the step before."""
        if num_sequences > self._max_num_seqs:
            self.interrupt()
            return
        before, since, self._time = self._before, self._time, self._clock()
        self._before = _bucket(num_sequences), has_drafts
        size = self._size(num_sequences)
        if before == self._before and has_drafts is size.way:
            size.observe(num_tokens / num_sequences, self._time - since)

    def interrupt(self) -> None:
        """Record that a step of another kind has ended: its time says nothing about drafts."""
        self._before = None

    def _size(self, num_sequences: int) -> _Size:
        return self._sizes.setdefault(_bucket(num_sequences), _Size())


def _bucket(num_sequences: int) -> int:
    """Return the number of batches of similar size: 1, 2 to 3, 4 to 7, ..."""
    return num_sequences.bit_length()
