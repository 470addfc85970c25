"""Fills the batch of a step with prompts whose scores differ, while the engines generate. Which: `dynamic_sampling`.

    engines      p1 ─ p2 ─ p3 ─ p4 ─ p5 ─┬ p6 ─┬ p7 ──── p8 ─┬ p9 ─▶ aborted
    reward       └─ p1 ─┴─ p2 p3 ─┴─ p4 ─┴ p5 ─┴─────── p6 p7┴ full: the first ones with different scores are known
    requests     5 prompts ······· 3 more ──── 2 more ▲

Finished responses are scored while others are generated. As soon as the prompts that are known to be kept, and the
expected share of the others, would not fill the batch, further prompts are requested, and engines with room begin them
at once: no engine waits until all others are done and the scores are there. When the batch is known, what is unfinished
is aborted, and the data go back behind the last prompt that was needed.

If responses cannot be scored while others are generated (no overlap Streaming; a user's hook that sees all responses;
engines in every pool of the reward model), the same runs in stretches: the requested prompts are generated, then
scored, then further ones are requested. Both give the same batch. Called by `ppo`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from ppojob_trainer.controller.dynamic_sampling import Candidates, DynamicSampler
from ppojob_trainer.controller.errors import BatchNotFilledError
from ppojob_trainer.controller.forward import gather_or_cancel
from ppojob_trainer.controller.generation import Generation, Listener, Writing
from ppojob_trainer.controller.parts import Chain, Part, join_parts
from ppojob_trainer.controller.ports import B, Metrics, Prompts

__all__ = ["BatchFiller", "Filled", "FillerCalls", "Scored"]

_BATCH = "batch"


@dataclass(frozen=True)
class Scored(Generic[B]):
    """Some responses with their scores.

    batch: all columns. scores: the tables of the sources of scores, by phase. values: the score of each row, see
    `RewardPort.row_scores`. metrics: means over the rows.
    """

    batch: B
    scores: Mapping[str, B]
    values: Sequence[float | None]
    metrics: Metrics


@dataclass(frozen=True)
class FillerCalls(Generic[B]):
    """What a step calls.

    prompts: the next ones, at most so many. give_back: all but the first so many. reload: send the engines their
    weights again, if they released them. score: call the users' hooks and score responses. sources: names of
    `Scored.scores`.
    """

    prompts: Callable[[int], Awaitable[Prompts[B]]]
    give_back: Callable[[int], Awaitable[object]]
    reload: Callable[[], Awaitable[object]]
    score: Callable[[B], Awaitable[Scored[B]]]
    sources: Sequence[str]


@dataclass(frozen=True)
class Filled(Generic[B]):
    """A batch of prompts whose scores differ.

    rollout: the columns of the responses. scores: of all responses that were scored for it, also those that it does not
    use. epoch: of its last prompt.
    """

    batch: B
    rollout: B
    scores: Mapping[str, B]
    metrics: Metrics
    epoch: int


class BatchFiller(Generic[B]):
    """Fills the batch of one step."""

    def __init__(
        self,
        sampler: DynamicSampler,
        generation: Generation[B],
        calls: FillerCalls[B],
        step: int,
        *,
        is_streamed: bool,
    ) -> None:
        """
        Args:
            is_streamed: responses can be scored while others are generated.
        """
        self._sampler, self._generation, self._calls = sampler, generation, calls
        self._step, self._is_streamed = step, is_streamed
        self._candidates = Candidates(sampler)
        self._parts = Chain[B]([_BATCH])
        self._scores: dict[str, list[B]] = {source: [] for source in calls.sources}
        self._metrics: list[tuple[int, Metrics]] = []
        self._epochs: list[int] = []
        self._responses: list[Part[B]] = []

    async def fill(self) -> Filled[B]:
        """Generate until the batch is full.

        Raises:
            BatchNotFilledError: it is not, after as many prompts as a step may use.
        """
        while not self._candidates.is_full:
            if self._candidates.is_exhausted:
                settings, found = self._sampler.settings, self._candidates
                raise BatchNotFilledError(
                    self._step, settings.max_batches, found.num_mixed, settings.num_prompts, found.num_requested
                )
            await self._stretch()
        filled = self._filled()
        await self._calls.give_back(self._num_used)
        self._sampler.observe(self._sampler.settings.num_prompts, self._num_used)
        return filled

    @property
    def _num_used(self) -> int:
        """Prompts up to the last of the batch."""
        return self._candidates.chosen()[-1] + 1

    async def _stretch(self) -> None:
        """Generate and score the prompts that are missing; if possible, further ones too while it is done."""
        first_row = self._candidates.num_requested * self._sampler.settings.num_samples
        if first_row:
            await self._calls.reload()
        work: Writing[B] | None = None
        while count := self._candidates.missing():
            prompts = await self._next(count)
            if work is None:
                work = self._begin(prompts, first_row)
            else:
                work.add(prompts)
        assert work is not None, "prompts are missing as long as the batch is not full"
        if self._is_streamed:
            await gather_or_cancel([self._run(work), self._follow(work)])
        else:
            work.end()
            await self._run(work)
        rows, responses = work.finished()
        part = Part([first_row + row for row in rows], responses)
        self._responses.append(part)
        # Its functions refer to `work`: without them, the stored responses are freed with it.
        work.listener = None
        if not self._is_streamed:
            await self._score(Part(part.rows, work.prompts.take(rows).union(responses)))

    async def _next(self, count: int) -> Prompts[B]:
        prompts = await self._calls.prompts(count)
        num_prompts = len(prompts.samples) // self._sampler.settings.num_samples
        self._candidates.add(num_prompts)
        self._epochs += [prompts.epoch] * num_prompts
        return prompts

    def _begin(self, prompts: Prompts[B], first_row: int) -> Writing[B]:
        """Open a generation. Its rows are those of the step from `first_row` on."""

        def take(rows: Sequence[int], responses: B) -> None:
            self._parts.add(Part([first_row + row for row in rows], work.prompts.take(rows).union(responses)))

        def drop(rows: Sequence[int]) -> None:
            lost = [first_row + row for row in rows]
            self._parts.drop(lost)
            self._candidates.forget(lost)

        listener = Listener(take, drop, lambda _: None) if self._is_streamed else None
        work = self._generation.open(prompts, self._step, listener)
        return work

    async def _run(self, work: Writing[B]) -> None:
        await self._generation.run(work)

    async def _follow(self, work: Writing[B]) -> None:
        """Score finished responses and request more prompts, until the batch is full or cannot be filled."""
        while not (self._candidates.is_full or self._candidates.is_exhausted):
            part = await self._parts.take_all()
            assert part is not None, "the parts have no end"
            await self._score(part)
            while count := self._candidates.missing():
                work.add(await self._next(count))
        work.close()

    async def _score(self, part: Part[B]) -> None:
        order = sorted(range(len(part.rows)), key=lambda position: part.rows[position])
        rows = [part.rows[position] for position in order]
        scored = await self._calls.score(part.batch.take(order))
        # Some responses may have been lost meanwhile.
        kept = set(self._parts.keep(_BATCH, Part(rows, scored.batch)))
        for source, scores in scored.scores.items():
            self._scores[source].append(scores)
        self._metrics.append((len(rows), scored.metrics))
        known = {row: value for row, value in zip(rows, scored.values, strict=True) if row in kept}
        self._candidates.learn(known.keys(), known.values())

    def _filled(self) -> Filled[B]:
        settings, used, requested = self._sampler.settings, self._num_used, self._candidates.num_requested
        surplus = frozenset(range(used * settings.num_samples, requested * settings.num_samples))
        self._parts.drop(sorted(surplus))
        batch = self._parts.found()[_BATCH]
        responses = [part for each in self._responses if (part := each.without(surplus)) is not None]
        rows = [
            group * settings.num_samples + sample
            for group in self._candidates.chosen()
            for sample in range(settings.num_samples)
        ]
        return Filled(
            batch=batch.take(rows),
            rollout=join_parts((part.rows, part.batch) for part in responses).take(rows),
            scores={source: _joined(tables) for source, tables in self._scores.items()},
            metrics={
                **_means(self._metrics),
                "sampling/prompts": float(used),
                "sampling/kept_share": settings.num_prompts / used,
                "sampling/surplus_prompts": float(requested - used),
                "sampling/surplus_samples": float(self._num_finished - used * settings.num_samples),
            },
            epoch=self._epochs[used - 1],
        )

    @property
    def _num_finished(self) -> int:
        return sum(len(part.rows) for part in self._responses)


def _joined(parts: Sequence[B]) -> B:
    starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return join_parts((range(start, start + len(part)), part) for start, part in zip(starts, parts, strict=True))


def _means(found: Sequence[tuple[int, Metrics]]) -> dict[str, float]:
    """Return the means of metrics, weighted with the rows of each."""
    names = dict.fromkeys(name for _, metrics in found for name in metrics)
    means: dict[str, float] = {}
    for name in names:
        those = [(rows, metrics[name]) for rows, metrics in found if name in metrics]
        means[name] = sum(rows * value for rows, value in those) / sum(rows for rows, _ in those)
    return means
