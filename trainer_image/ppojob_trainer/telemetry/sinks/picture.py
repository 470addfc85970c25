"""plot.png, redrawn after each validation and at the end, in a separate thread so that no step waits for it."""

from concurrent.futures import Future, ThreadPoolExecutor

from ppojob_trainer.telemetry.run_files import RunFiles
from ppojob_trainer.telemetry.sinks.sink import Metrics

_VALIDATION = "val-"
_TIMEOUT_S = 120


class PictureSink:
    """Draws from metrics.jsonl, so it must come after the sink that writes that file."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plot")
        self._running: Future[None] | None = None

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Begin to draw if the step had a validation and no picture is being drawn.

        Raises:
            Exception: what the picture before this one failed with.
        """
        if not any(name.startswith(_VALIDATION) for name in metrics):
            return
        if self._running is None or self._running.done():
            before, self._running = self._running, self._executor.submit(self._draw)
            if before is not None:
                before.result()

    def close(self) -> None:
        """Draw the last picture; waits at most two minutes for it."""
        try:
            self._executor.submit(self._draw).result(timeout=_TIMEOUT_S)
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _draw(self) -> None:
        # matplotlib takes a second to load, and a run that is never validated needs it only at its end.
        from ppojob_trainer.telemetry.plot import plot

        if self._files.metrics.exists() and self._files.metrics.stat().st_size:
            plot([self._files.metrics], self._files.plot)
