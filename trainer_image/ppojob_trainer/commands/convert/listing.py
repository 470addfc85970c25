"""The list of a conversion for a reader: what to fill in, what was not converted and why, what is not needed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ppojob_trainer.commands.convert.conversion import Conversion, Entry, Target

_TITLES = {
    Target.REFUSED: "refused: the PPOJob does not pass its checks until these are fixed",
    Target.TO_FILL: "to fill in or check",
    Target.UNCONVERTED: "not converted",
    Target.NEEDLESS: "not needed",
}


def listing(conversion: Conversion, notes: Sequence[str] = ()) -> RenderableType:
    """Return how the script was read, and the tables, one for each kind of entry that there is."""
    groups = {kind: [entry for entry in conversion.entries if entry.kind is kind] for kind in _TITLES}
    tables = [_table(kind, entries) for kind, entries in groups.items() if entries]
    found: list[RenderableType] = [*tables] or [Text("everything was converted")]
    return Group(*map(Text, notes), *found)


def _table(kind: Target, entries: list[Entry]) -> Table:
    table = Table(title=f"{_TITLES[kind]} ({len(entries)})", title_justify="left", show_header=False, expand=False)
    table.add_column(overflow="fold", max_width=50)
    table.add_column(overflow="fold", max_width=28)
    table.add_column(overflow="fold")
    for entry in entries:
        # Text, because brackets of a value would be taken for markup.
        table.add_row(Text(entry.name), Text("" if entry.value is None else f"{entry.value}"), Text(entry.why))
    return table
