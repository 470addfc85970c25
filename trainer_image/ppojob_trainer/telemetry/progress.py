"""The state of the run as one `ProgressReport`. The trainer's loop updates it; `reporter.py` sends the reports.

No I/O: it reads no files, and only the clock that it is given.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from ppojob_api.v1alpha1.constants import STATUS_METRICS
from ppojob_api.v1alpha1.progress import Activity, PoolReport, ProgressReport
from ppojob_api.v1alpha1.reported import CheckpointStatus, LayoutAdvice, StepChecks, UploadFailure
from ppojob_api.v1alpha1.versions import own_version
from ppojob_trainer.telemetry.eta import Eta
from ppojob_trainer.telemetry.records import Record

REWARD = "critic/score/mean"
VALIDATION_REWARD = "val-core/score/mean"
_OLDEST_WEIGHTS = "staleness/oldest_version"
_PROBS_DIFF = "training/rollout_probs_diff_mean"
_IDLE = "overlap/idle_fraction"
_COMPARED = "training/compared_weights_version"
_BUSY = re.compile(r"pool/(?P<pool>[^/]+)/busy_fraction")


class RunProgress:
    """Collects the content of reports; each report is complete, so that a lost one does no harm."""

    def __init__(self, *, uid: str, attempt: int, total_steps: int, clock: Callable[[], float] = time.time) -> None:
        self._uid = uid
        self._attempt = attempt
        self._clock = clock
        self._eta = Eta(total_steps)
        self._activity = Activity.LOADING
        self._step = 0
        self._phases = 0
        self._metrics: dict[str, float] = {}
        self._first_validation: float | None = None
        self._validation: float | None = None
        self._first_step_time: str | None = None
        self._checkpoint: CheckpointStatus | None = None
        self._model_path: str | None = None
        self._model_address: str | None = None
        self._upload_failure: UploadFailure | None = None
        self._compared_weights_step: int | None = None
        self._recommendation: str | None = None
        self._layout_advice: list[LayoutAdvice] | None = None

    @property
    def total_steps(self) -> int:
        """Steps of the run; may be set while it runs."""
        return self._eta.total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        self._eta.total_steps = steps

    def restore(self, records: Sequence[Record], *, step: int) -> None:
        """Take over what earlier attempts did up to `step`, from the records of metrics.jsonl."""
        for record in records:
            number, at = record.get("step"), record.get("time")
            if number is None or at is None or number > step:
                continue
            values = {name: value for name, value in record.items() if value is not None}
            self._record(int(number), {name: v for name, v in values.items() if name not in ("step", "time")}, at)
        # The pace of the previous attempt, and the pause between the attempts, do not predict this attempt's pace.
        self._eta = Eta(self.total_steps)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record that `step` is done (0: the validation before training); non-finite metrics are dropped."""
        now = self._clock()
        self._eta.tick(step, now)
        self._record(step, metrics, now)

    def set_activity(self, activity: Activity) -> None:
        """Set the trainer's current activity."""
        self._activity = activity

    def set_checkpoint(self, step: int, path: str, *, request: str | None = None) -> None:
        """Set the newest complete checkpoint, and the last request that it or an earlier one has answered."""
        self._checkpoint = CheckpointStatus(step=step, path=path, time=_rfc3339(self._clock()), request=request)

    def set_model(self, path: str) -> None:
        """Set the path of the exported policy."""
        self._model_path = path

    def set_upload(self, address: str | None, failure: UploadFailure | None) -> None:
        """Set how the last upload ended; a failed one leaves the address of the upload before."""
        self._model_address = address or self._model_address
        self._upload_failure = failure

    def set_recommendation(self, text: str, layouts: Sequence[LayoutAdvice] = ()) -> None:
        """Set the recommendation for the layout, and the layouts that its text names."""
        self._recommendation, self._layout_advice = text, list(layouts)

    def phase_is_done(self) -> None:
        """Count one more finished phase."""
        self._phases += 1

    def report(self) -> ProgressReport:
        """Return the complete report."""
        return ProgressReport(
            uid=self._uid,
            attempt=self._attempt,
            activity=self._activity,
            step=self._step,
            total_steps=self.total_steps,
            phases=self._phases,
            eta_seconds=self._eta.seconds,
            reward=self._metrics.get(REWARD),
            first_validation_reward=self._first_validation,
            validation_reward=self._validation,
            first_step_time=self._first_step_time,
            metrics={name: self._metrics[name] for name in STATUS_METRICS if name in self._metrics},
            pools=self._pools(),
            checks=self._checks(),
            checkpoint=self._checkpoint,
            model_path=self._model_path,
            model_address=self._model_address,
            upload_failure=self._upload_failure,
            recommendation=self._recommendation,
            layout_advice=self._layout_advice,
            trainer_version=own_version(),
        )

    def _record(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        validation = finite.get(VALIDATION_REWARD)
        if validation is not None:
            self._validation = validation
            self._first_validation = validation if self._first_validation is None else self._first_validation
        if _COMPARED in finite:
            self._compared_weights_step = max(int(finite[_COMPARED]), self._compared_weights_step or 0)
        # A step without a validation keeps the last one's score in the status.
        kept = {VALIDATION_REWARD: self._validation} if self._validation is not None else {}
        self._step, self._metrics = step, kept | finite
        if step > 0 and self._first_step_time is None:
            self._first_step_time = _rfc3339(now)

    def _pools(self) -> list[PoolReport]:
        found = ((_BUSY.fullmatch(name), value) for name, value in self._metrics.items())
        return [
            PoolReport(
                name=match["pool"],
                busy_fraction=min(max(value, 0.0), 1.0),
                engines=None
                if (engines := self._metrics.get(f"pool/{match['pool']}/engines")) is None
                else int(engines),
            )
            for match, value in found
            if match
        ]

    def _checks(self) -> StepChecks | None:
        """Return them after a step; a validation has none, and no step that a trainer without them recorded."""
        found = self._metrics
        if not {_OLDEST_WEIGHTS, _IDLE} <= found.keys():
            return None
        difference = found.get(_PROBS_DIFF)
        return StepChecks(
            step=self._step,
            oldest_weights_step=int(found[_OLDEST_WEIGHTS]),
            max_staleness=int(found["staleness/max"]),
            compared_weights_step=self._compared_weights_step,
            rollout_probs_diff_mean=None if difference is None else f"{difference:.4g}",
            idle_fraction=f"{found[_IDLE]:.4g}",
        )


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
