"""What a run reports: metrics, progress, logs, trace, plot. Imports neither torch nor Ray."""

from ppojob_trainer.telemetry.advice import write_advice
from ppojob_trainer.telemetry.current_phase import CurrentPhase, current_phase, within_phase
from ppojob_trainer.telemetry.logs import OutputTee, configure_logging, tee_output
from ppojob_trainer.telemetry.metrics import MetricLogger
from ppojob_trainer.telemetry.progress import RunProgress
from ppojob_trainer.telemetry.records import MetricsUnreadableError, read_metrics
from ppojob_trainer.telemetry.redaction import redacted
from ppojob_trainer.telemetry.reporter import ProgressReporter
from ppojob_trainer.telemetry.run_files import RunFiles
from ppojob_trainer.telemetry.trace import TraceWriter
from ppojob_trainer.telemetry.trackers import TrackedRun, TrackerMissingError, check_installed, open_trackers

__all__ = [
    "CurrentPhase",
    "MetricLogger",
    "MetricsUnreadableError",
    "OutputTee",
    "ProgressReporter",
    "RunFiles",
    "RunProgress",
    "TraceWriter",
    "TrackedRun",
    "TrackerMissingError",
    "check_installed",
    "configure_logging",
    "current_phase",
    "open_trackers",
    "read_metrics",
    "redacted",
    "tee_output",
    "within_phase",
    "write_advice",
]
