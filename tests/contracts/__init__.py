"""What operator and trainer of other versions send and read, recorded by `tools/release/contract.py` with their code.

| folder | of |
|---|---|
| `0.2.0` | the release. Its job.json is refused: it has defaults, and values in other spellings |
| `0.3.0-dev.5b67f370` | the commit of that name, the first whose job.json lists the reward's pools |
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
VERSIONS = sorted(path.name for path in FOLDER.iterdir() if (path / "jobs").is_dir())
INCOMPATIBLE = {"0.2.0"}
"""Versions whose job.json today's trainer refuses: CHANGELOG.md says what has changed."""
COMPATIBLE = [version for version in VERSIONS if version not in INCOMPATIBLE]


def messages(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the recorded messages of a kind, each with its place."""
    paths = sorted(FOLDER.glob(f"*/{kind}-*.json"))
    return [(f"{path.parent.name}/{path.name}", json.loads(path.read_text())) for path in paths]


def with_unknown_fields(message: Any) -> Any:
    """Return a message of a newer version: every object in it has a field that this version does not know."""
    if isinstance(message, list):
        return [with_unknown_fields(item) for item in message]
    if not isinstance(message, dict) or not all(isinstance(name, str) for name in message):
        return message
    return {**{name: with_unknown_fields(item) for name, item in message.items()}, "ofANewerVersion": {"any": 1}}
