"""Errors that the controller itself raises. Errors of the ports pass through it unchanged."""

from __future__ import annotations

from collections.abc import Sequence


class PhaseTimeoutError(RuntimeError):
    """A phase took longer than its limit."""

    def __init__(self, phase: str, role: str, seconds: float, unanswered: Sequence[str] = ()) -> None:
        """
        Args:
            unanswered: the calls that the phase still waited for, such as `rollout.generate on rank 0`.
        """
        waits = f", still waiting for {'; '.join(unanswered)}" if unanswered else ""
        super().__init__(
            f"phase {phase} of role {role} did not finish within {seconds:g} s{waits}: the log of each such process "
            "ends with the stacks of its threads; if the phase needs longer, raise trainer.phaseTimeoutSeconds"
        )
        self.phase = phase
        self.role = role


class BatchNotFilledError(RuntimeError):
    """Dynamic sampling reached its limit before the batch was full."""

    def __init__(self, step: int, batches: int, kept: int, wanted: int, generated: int) -> None:
        super().__init__(
            f"step {step}: after {batches} batches of prompts (algorithm.dynamicSampling.maxGenerationBatches), the "
            f"batch has {kept} of {wanted} prompts (data.trainBatchSize). The responses to a prompt have different "
            f"scores for only {kept} of {generated} prompts, so the data are too easy or too hard for the policy, or "
            "the reward is constant. Use other data, more responses (rollout.samplesPerPrompt), a smaller "
            "data.trainBatchSize, or raise the limit"
        )
        self.step = step


class StoppedError(Exception):
    """The run was asked to stop, and what it was doing was dropped."""
