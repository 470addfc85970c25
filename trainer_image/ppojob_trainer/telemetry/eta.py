"""The remaining time of the run, from the pace of its last steps. Used by the console and by the progress reports."""

from collections import deque

WINDOW = 50
"""Number of steps for the pace: enough to average over checkpoints and validations, few enough to follow a change."""


class Eta:
    """Estimates the time to the end; needs at least two steps."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._seen: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def tick(self, step: int, time: float) -> None:
        """Record that `step` was done at `time` (seconds)."""
        if not self._seen or step > self._seen[-1][0]:
            self._seen.append((step, time))

    @property
    def seconds(self) -> float | None:
        """Return the seconds to the end at the pace of the last steps; None before two steps were done."""
        if len(self._seen) < 2:
            return None
        (first, start), (last, end) = self._seen[0], self._seen[-1]
        return max(self.total_steps - last, 0) * max(end - start, 0.0) / (last - first)


def in_words(seconds: float | None) -> str:
    """Return a duration for people: `42 s`, `7 min`, `3 h 05 min`; `-` if unknown."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
