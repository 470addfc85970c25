"""DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2): a batch of prompts whose scores differ.

    round 1    64 prompts ── generate ── score ── 40 of them have different scores
    round 2    24 / 0.625 = 39 prompts ── generate ── score ── 25 of them: the first 24 fill the batch

If all responses to a prompt have the same score, their advantages are 0, and the prompt is replaced by the next ones of
the data. A round requests as many prompts as are expected to fill the batch, by the share that was kept lately. This
share is in the checkpoint, so a resumed run requests the same prompts. Called by `ppo`, which generates and scores a
round; it refuses to fill a batch from the surplus of an earlier step, whose responses are of older weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.errors import BatchNotFilledError
from ppojob_trainer.controller.forward import join_parts
from ppojob_trainer.controller.ports import B, Metrics

__all__ = ["DynamicSampler", "Filled", "Round", "SamplingSettings", "mixed_groups", "sampling_of"]

_MEMORY = 0.5
"""Weight of all earlier rounds in the share of kept prompts, against 1 for the latest."""
_LEAST_SHARE = 0.25
"""A round requests at most 4 times the prompts that are missing."""
_LEAST_PROMPTS = 8
"""A round of fewer prompts takes about as long, and leaves engines without any."""


@dataclass(frozen=True)
class SamplingSettings:
    """num_prompts: of a batch. num_samples: responses to a prompt, in consecutive rows. max_rounds: of a step."""

    num_prompts: int
    num_samples: int
    max_rounds: int


def sampling_of(spec: PPOJobSpec) -> SamplingSettings | None:
    """Return the settings of dynamic sampling, if the job has it."""
    given = spec.algorithm.dynamic_sampling
    if given is None:
        return None
    return SamplingSettings(spec.data.train_batch_size, spec.rollout.samples_per_prompt, given.max_generation_batches)


@dataclass(frozen=True)
class Round(Generic[B]):
    """Some prompts with responses and scores.

    batch: all columns, rollout: those of the responses. scores: the tables of the sources of scores, by phase.
    metrics: means over the rows.
    """

    batch: B
    rollout: B
    scores: Mapping[str, B]
    metrics: Metrics
    epoch: int


@dataclass(frozen=True)
class Filled(Generic[B]):
    """A batch of prompts whose scores differ. scores: of all responses that were generated for it."""

    batch: B
    rollout: B
    scores: Mapping[str, B]
    metrics: Metrics
    epoch: int


class DynamicSampler(Generic[B]):
    """Fills batches. Its state is the share of prompts that were kept lately."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        self._kept = self._generated = 0.0

    async def fill(
        self,
        step: int,
        generate: Callable[[int, int], Coroutine[Any, Any, Round[B]]],
        row_scores: Callable[[B], Sequence[float | None]],
    ) -> Filled[B]:
        """Generate rounds until the batch is full.

        Args:
            generate: receives the number of prompts and the number of the round, from 1; it may use fewer prompts.
            row_scores: see `RewardPort`.

        Raises:
            BatchNotFilledError: the batch was not full after the last round.
        """
        settings, rounds, groups = self._settings, list[Round[B]](), list[int]()
        num_generated = 0
        while (missing := settings.num_prompts - len(groups)) > 0:
            if len(rounds) == settings.max_rounds:
                raise BatchNotFilledError(step, len(rounds), len(groups), settings.num_prompts, num_generated)
            found = await generate(self.request(missing), len(rounds) + 1)
            mixed = mixed_groups(row_scores(found.batch), settings.num_samples)
            groups += [num_generated + group for group in mixed]
            num_in_round = len(found.batch) // settings.num_samples
            self.observe(len(mixed), num_in_round)
            num_generated += num_in_round
            rounds.append(found)
        rows = _rows_of(groups[: settings.num_prompts], settings.num_samples)
        return Filled(
            batch=_joined([each.batch for each in rounds]).take(rows),
            rollout=_joined([each.rollout for each in rounds]).take(rows),
            scores={name: _joined([each.scores[name] for each in rounds]) for name in rounds[0].scores},
            metrics={
                **_means(rounds),
                "sampling/rounds": float(len(rounds)),
                "sampling/prompts": float(num_generated),
                "sampling/kept_share": len(groups) / num_generated,
            },
            epoch=rounds[-1].epoch,
        )

    def request(self, missing: int) -> int:
        """Return how many prompts are expected to give `missing` ones whose scores differ.

        It does not depend on the layout, so that another one gives the same numbers.
        """
        share = self._kept / self._generated if self._generated else 1.0
        least = min(_LEAST_PROMPTS, self._settings.num_prompts)
        return max(least, math.ceil(missing / max(share, _LEAST_SHARE)))

    def observe(self, kept: int, generated: int) -> None:
        """Take a round into account."""
        self._kept = _MEMORY * self._kept + kept
        self._generated = _MEMORY * self._generated + generated

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"kept": self._kept, "generated": self._generated}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore it."""
        self._kept, self._generated = float(state["kept"]), float(state["generated"])


def mixed_groups(scores: Sequence[float | None], num_samples: int) -> list[int]:
    """Return the numbers of the groups of consecutive rows that have different scores; None has no score."""
    groups = (scores[start : start + num_samples] for start in range(0, len(scores), num_samples))
    return [number for number, group in enumerate(groups) if len(set(group) - {None}) > 1]


def _rows_of(groups: Sequence[int], num_samples: int) -> list[int]:
    return [group * num_samples + sample for group in groups for sample in range(num_samples)]


def _joined(parts: Sequence[B]) -> B:
    starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return join_parts((range(start, start + len(part)), part) for start, part in zip(starts, parts, strict=True))


def _means(rounds: Sequence[Round[B]]) -> dict[str, float]:
    """Return the metrics of the rounds, weighted with their rows."""
    names = dict.fromkeys(name for each in rounds for name in each.metrics)
    found: dict[str, float] = {}
    for name in names:
        those = [each for each in rounds if name in each.metrics]
        rows = sum(len(each.batch) for each in those)
        found[name] = sum(each.metrics[name] * len(each.batch) for each in those) / rows
    return found
