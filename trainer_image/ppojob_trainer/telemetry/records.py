"""metrics.jsonl: reading it, and cutting it back to the step that a run resumes from.

`sinks/json_lines.py` writes it; the plot, the progress and users read it. A record is `{"step": 3, "time": 1.7e9, ...}`
with one number per metric; a metric that was not finite is null. Several records of one step are merged, the last wins.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, float | None]
"""`step`, `time` (seconds since 1970, UTC) and the metrics by name."""


class MetricsUnreadableError(ValueError):
    """A file of metrics holds something else than one JSON object per line."""


def read_metrics(path: Path) -> list[Record]:
    """Return the records in the order of their steps; none where the file does not exist.

    A last line without its line end is what a kill leaves, and is passed over.

    Raises:
        MetricsUnreadableError: a whole line is not a record; the message has the path and the line's number.
    """
    merged: dict[float, Record] = {}
    for record in _records(path):
        step = record["step"]
        merged[step] = merged.get(step, {}) | record
    return [merged[step] for step in sorted(merged)]


def cut_after(path: Path, step: int) -> None:
    """Take out the records of steps later than `step`, and a torn last line; the file is replaced atomically.

    Step 0 is the beginning: all records go, that of the validation before training too, since it will be done again.

    Raises:
        MetricsUnreadableError: as `read_metrics`.
    """
    if not path.exists():
        return
    kept = [json.dumps(record) for record in _records(path) if 0 < step >= record["step"]]
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("w") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    *lines, _torn = path.read_text().split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise _unreadable(path, number) from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise _unreadable(path, number)
        yield record


def _unreadable(path: Path, number: int) -> MetricsUnreadableError:
    return MetricsUnreadableError(
        f"{path}, line {number}, is not a metrics record (a JSON object with `step`): remove the line, or the file"
    )
