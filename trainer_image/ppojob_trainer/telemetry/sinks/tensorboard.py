"""TensorBoard's event files, written with TensorBoard's own writer, which needs neither torch nor tensorflow."""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

from ppojob_trainer.telemetry.sinks.sink import Metrics


class TensorBoardSink:
    """One event file per attempt; TensorBoard shows them as one run."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        self._writer = EventFileWriter(str(folder))
        if resume_step:
            # TensorBoard drops what an earlier attempt wrote at this step or later.
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=resume_step + 1, session_log=restart))

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Add one scalar for each metric."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Write the remaining values and close the file."""
        self._writer.close()
