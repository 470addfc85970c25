"""A reward that random weights can earn: the share of a response's characters that are small letters."""

import time
from pathlib import Path
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    seconds: float = 0.0,
    root: str = "",
    num_records: int = 0,
) -> float:
    """Return the share, after some seconds.

    Args:
        root: of a run that stays unfinished: with so many records in its metrics, its responses get no scores until
            the file `is-killed` exists there; empty for another run.
    """
    time.sleep(seconds)
    while root and has_records(Path(root), num_records) and not Path(root, "is-killed").exists():
        time.sleep(0.1)
    return sum(character.islower() for character in solution_str) / max(1, len(solution_str))


def has_records(root: Path, number: int) -> bool:
    metrics = root / "metrics.jsonl"
    return metrics.is_file() and metrics.read_bytes().count(b"\n") >= number
