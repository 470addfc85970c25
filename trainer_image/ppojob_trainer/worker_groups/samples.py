"""Writes samples of responses to a file: in the data's process, which gets some rows of every scored batch.

The step is that of the call's phase; a call outside of any phase writes nothing.
"""

from __future__ import annotations

from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.protocol import SEQUENCES, DataProto, Keys
from ppojob_trainer.rewards.batch import Decoder
from ppojob_trainer.rewards.samples import SampleLog, samples_of
from ppojob_trainer.telemetry import RunFiles, current_phase
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["READ_BY_SAMPLES", "SampleKeeper"]

READ_BY_SAMPLES = (
    *SEQUENCES,
    Keys.SOURCE,
    Keys.DATA_SOURCE,
    Keys.INDEX,
    Keys.SAMPLE_INDEX,
    Keys.GROUND_TRUTH,
    Keys.TOKEN_LEVEL_SCORES,
    Keys.REWARD_ERROR,
    Keys.REWARD_EXTRAS,
)
"""The columns of the batch that a `SampleKeeper` reads; the last two are there if a function scores."""


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

    def keep(self, batch: DataProto, decoder: Decoder) -> None:
        """Write these rows of a scored batch, or as many as the step may still have."""
        phase = current_phase()
        if self._log is None or phase is None:
            return
        which = (phase.phase, phase.step)
        num_kept = self._kept.get(which, 0)
        scores = batch.ragged(Keys.TOKEN_LEVEL_SCORES)
        samples = samples_of(batch, scores, decoder, self._number - num_kept, _extras(batch))
        if samples:
            self._log.write(samples, phase=phase.phase, step=phase.step)
        self._kept[which] = num_kept + len(samples)
        # Later than that, no part of a step arrives.
        self._kept = {each: number for each, number in self._kept.items() if each[1] > phase.step - _STEPS}


def _extras(batch: DataProto) -> list[dict[str, Any]]:
    """Return what the reward function returned for each row beside the score, with its failure; empty without one."""
    if Keys.REWARD_EXTRAS not in batch:
        return []
    pairs = zip(batch.array(Keys.REWARD_EXTRAS), batch.array(Keys.REWARD_ERROR), strict=True)
    return [{**extras, "error": error} if error else dict(extras) for extras, error in pairs]
