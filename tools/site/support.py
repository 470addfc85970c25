"""The table of model families in docs/support-matrix.md, from the trainer's table. The page around it is by hand."""

from __future__ import annotations

from ppojob_trainer.models.support import table

_BEGIN, _END = "<!-- families: generated from ppojob_trainer.models.support -->", "<!-- end of families -->"


def page(old: str) -> str:
    """Return the page with the table in its place.

    Raises:
        ValueError: the page has no place for it.
    """
    before, begin, rest = old.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"docs/support-matrix.md has no place for the families: it needs {_BEGIN!r} and {_END!r}")
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{after}"
