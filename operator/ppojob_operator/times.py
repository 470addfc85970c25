"""Times of the Kubernetes API."""

from datetime import UTC, datetime

_EPOCH = datetime.fromtimestamp(0, UTC)


def parse_time(text: str | None) -> datetime:
    """Return the time of an RFC 3339 text; the epoch if there is none."""
    return datetime.fromisoformat(text) if text else _EPOCH
