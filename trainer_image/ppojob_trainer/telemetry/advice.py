"""The recommendation for the layout, as a file of the run: for `ppojob plot --timing`, and for programs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ppojob_api.v1alpha1.reported import LayoutAdvice


def write_advice(path: Path, text: str, layouts: Sequence[LayoutAdvice]) -> None:
    """Replace the file atomically.

    Raises:
        OSError: it cannot be written; the earlier file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"recommendation": text, "layoutAdvice": [layout.to_wire() for layout in layouts]}
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def read_advice(path: Path) -> str:
    """Return the sentences; empty if there is no such file or no recommendation."""
    if not path.exists():
        return ""
    return str(json.loads(path.read_text(encoding="utf-8"))["recommendation"])
