"""DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2): a batch of prompts whose scores differ.

If all responses to a prompt have the same score, their advantages are 0, and the prompt is replaced by others. The
batch consists of the *first* prompts of the data whose scores differ, whatever finishes first:

    data        p1  p2  p3  p4  p5  p6  p7  p8  p9 ...        a batch of 4 prompts, 2 responses to each
    known       ≠   =   ≠   ?   ≠   =   ≠   ≠                 ≠: different scores, =: equal ones, ?: not known yet
    batch       p1      p3  ?   p5      p7                    if p4 has different scores, p7 is not in it, and the next
                                                              step begins with p6; otherwise it begins with p8

So the batch and the position in the data depend neither on the time nor on the number of prompts that are generated at
the same time. To take what finishes first would prefer prompts with short responses. How many prompts are requested
depends on what is known: so many that the batch will probably be full. Pure; called by `batch_filler`. It refuses to
fill a batch from responses of older weights: prompts that a step does not use are generated again by the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ppojob_api.v1alpha1.spec import PPOJobSpec

__all__ = ["Candidates", "DynamicSampler", "SamplingSettings", "is_mixed", "sampling_of"]

_MEMORY = 0.5
"""Weight of all earlier steps in the share of kept prompts, against 1 for the latest."""
_LEAST_SHARE = 0.25
"""At most 4 times the prompts that are missing are requested."""
_LEAST_PROMPTS = 8
"""Fewer are not requested: engines that are nearly idle generate them in about the same time."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SamplingSettings:
    """num_prompts: of a batch. num_samples: responses to a prompt, in consecutive rows. max_batches: a step uses at
    most so many times the prompts of a batch."""

    num_prompts: int
    num_samples: int
    max_batches: int

    @property
    def max_prompts(self) -> int:
        """The most prompts that a step uses."""
        return self.max_batches * self.num_prompts


def sampling_of(spec: PPOJobSpec) -> SamplingSettings | None:
    """Return the settings of dynamic sampling, if the job has it."""
    given = spec.algorithm.dynamic_sampling
    if given is None:
        return None
    return SamplingSettings(spec.data.train_batch_size, spec.rollout.samples_per_prompt, given.max_generation_batches)


class DynamicSampler:
    """The settings, and the share of prompts that were kept lately, which is the state."""

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        # As if some prompts had been kept, so that the first ones of the first step are not taken for all.
        self._kept = self._generated = float(_LEAST_PROMPTS)

    def share(self, kept: int, known: int) -> float:
        """Return the share of prompts that will be kept.

        Args:
            kept: prompts of this step that are known to be kept, of those whose scores are known.
        """
        return max(_LEAST_SHARE, (_MEMORY * self._kept + kept) / (_MEMORY * self._generated + known))

    def observe(self, kept: int, generated: int) -> None:
        """Take a step into account."""
        self._kept = _MEMORY * self._kept + kept
        self._generated = _MEMORY * self._generated + generated

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint. It depends on no time: a step counts the prompts up to its last."""
        return {"kept": self._kept, "generated": self._generated}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore it."""
        self._kept, self._generated = float(state["kept"]), float(state["generated"])


class Candidates:
    """The prompts that a step has requested, in the order of the data, and what is known of their scores."""

    def __init__(self, sampler: DynamicSampler) -> None:
        self._sampler, self._settings = sampler, sampler.settings
        self._scores: list[dict[int, float | None]] = []
        self._is_mixed: dict[int, bool] = {}

    @property
    def num_requested(self) -> int:
        """Number of prompts."""
        return len(self._scores)

    @property
    def is_full(self) -> bool:
        """Whether the batch is known."""
        return len(self.chosen()) == self._settings.num_prompts

    @property
    def is_exhausted(self) -> bool:
        """Whether the batch cannot be filled: the scores of as many prompts as a step may use are known."""
        return len(self._is_mixed) >= self._settings.max_prompts and not self.is_full

    @property
    def num_mixed(self) -> int:
        """Number of prompts that are known to have different scores, also of those that are too late for the batch."""
        return sum(self._is_mixed.values())

    def add(self, count: int) -> None:
        """Add the next prompts of the data."""
        self._scores += [{} for _ in range(count)]

    def learn(self, rows: Iterable[int], scores: Iterable[float | None]) -> None:
        """Record the scores of rows; None: the response has none."""
        num_samples = self._settings.num_samples
        for row, score in zip(rows, scores, strict=True):
            known = self._scores[row // num_samples]
            known[row] = score
            if len(known) == num_samples:
                self._is_mixed[row // num_samples] = is_mixed(list(known.values()))

    def forget(self, rows: Iterable[int]) -> None:
        """Forget the scores of rows whose responses were lost: they are generated again."""
        for row in rows:
            group = row // self._settings.num_samples
            self._scores[group].pop(row, None)
            self._is_mixed.pop(group, None)

    def chosen(self) -> list[int]:
        """Return the prompts of the batch, as far as they are certain: those before the first unknown one."""
        found: list[int] = []
        for group in range(len(self._scores)):
            if len(found) == self._settings.num_prompts or group not in self._is_mixed:
                break
            if self._is_mixed[group]:
                found.append(group)
        return found

    def missing(self) -> int:
        """Return how many more prompts to request now, so that the batch will probably be full."""
        settings, kept, known = self._settings, self.num_mixed, len(self._is_mixed)
        share = self._sampler.share(kept, known)
        expected = kept + share * (self.num_requested - known)
        if expected > settings.num_prompts - _ROUNDING:
            return 0
        least = min(_LEAST_PROMPTS, settings.num_prompts)
        count = max(least, math.ceil((settings.num_prompts - expected) / share - _ROUNDING))
        return min(count, settings.max_prompts - self.num_requested)


def is_mixed(scores: Sequence[float | None]) -> bool:
    """Whether the responses to a prompt have different scores; None has no score."""
    return len(set(scores) - {None}) > 1
