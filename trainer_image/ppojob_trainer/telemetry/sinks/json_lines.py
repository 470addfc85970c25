"""metrics.jsonl: one JSON object per step, on the disk before the next step begins."""

import json
import math
from pathlib import Path

from ppojob_trainer.telemetry.appended_file import AppendedFile
from ppojob_trainer.telemetry.records import cut_after
from ppojob_trainer.telemetry.sinks.sink import Metrics


class JsonLinesSink:
    """Appends to the file; on opening, cuts what later steps of an earlier attempt wrote."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_after(path, resume_step)
        self._file = AppendedFile(path)

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Append the record and wait until the disk has it. JSON has no NaN: what is not finite becomes null.

        Raises:
            OSError: the record was not written. Records of later steps can be.
        """
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "time": round(time, 3), **numbers}
        self._file.append(json.dumps(record, allow_nan=False) + "\n", is_synced=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
