"""Writes samples of responses to a file: only on the first rank of a role.

The reward's workers call it with every batch that they have scored; if only a model scores, the data's process calls it
with some rows of every batch. The step is that of the call's phase; a call outside of any phase writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.protocol import SEQUENCES, DataProto, Keys, Ragged
from ppojob_trainer.rewards.batch import Decoder
from ppojob_trainer.rewards.samples import SampleLog, samples_of
from ppojob_trainer.telemetry import RunFiles, current_phase
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["READ_BY_SAMPLES", "SampleKeeper"]

READ_BY_SAMPLES = (*SEQUENCES, Keys.SOURCE, Keys.DATA_SOURCE, Keys.INDEX, Keys.SAMPLE_INDEX, Keys.GROUND_TRUTH)
"""The columns of the batch that a `SampleKeeper` reads."""


_STEPS = 16
"""More than the steps that are scored at the same time (`schedule.maxStaleness`)."""


class SampleKeeper:
    """Writes `spec.telemetry.samplesPerStep` rows per step; on other ranks it writes nothing."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        self._number = spec.telemetry.samples_per_step
        is_asked = context.rank == 0 and context.run_folder is not None and self._number > 0
        self._log = SampleLog(RunFiles(context.run_folder).samples) if is_asked and context.run_folder else None
        # A step's rows may arrive in parts, between those of other steps.
        self._kept: dict[tuple[str, int], int] = {}

    def renew(self) -> None:
        """Write the samples of a step that is repeated, in another attempt."""
        self._kept = {}

    def keep(
        self, batch: DataProto, scores: Ragged, decoder: Decoder, extras: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Write some rows of a scored batch: scores, and the reward function's further values for each row."""
        phase = current_phase()
        if self._log is None or phase is None:
            return
        which = (phase.phase, phase.step)
        num_kept = self._kept.get(which, 0)
        samples = samples_of(batch, scores, decoder, self._number - num_kept, extras)
        if samples:
            self._log.write(samples, phase=phase.phase, step=phase.step)
        self._kept[which] = num_kept + len(samples)
        # Later than that, no part of a step arrives.
        self._kept = {each: number for each, number in self._kept.items() if each[1] > phase.step - _STEPS}
