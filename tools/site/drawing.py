"""A few shapes of SVG: boxes, arrows, text and bars. Called by `diagrams`; callers leave room for the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, GREY, PAPER = "#1f2933", "#52606d", "#ffffff"
BLUE, GREEN, AMBER, VIOLET, RED, PALE = "#dbeafe", "#d9f2e0", "#fdecc8", "#e8e0fb", "#fbdcdc", "#f1f4f8"
_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_LINE_HEIGHT = 17

Point = tuple[float, float]


@dataclass
class Drawing:
    """A picture of `width` x `height` pixels; `title` is its text for screen readers."""

    width: int
    height: int
    title: str
    _parts: list[str] = field(default_factory=list)

    def box(self, at: Point, size: Point, title: str, lines: Sequence[str] = (), fill: str = PALE) -> None:
        """Draw a box with a bold title and further lines below it, from its upper left corner."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{GREY}"/>'
        )
        self.text((x + 12, y + 22), title, is_bold=True)
        for number, line in enumerate(lines, 1):
            self.text((x + 12, y + 22 + number * _LINE_HEIGHT), line, size=13, ink=GREY)

    def bar(self, at: Point, size: Point, label: str, fill: str) -> None:
        """Draw a bar with its label in the middle."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{PAPER}"/>'
        )
        self.text((x + width / 2, y + height / 2 + 4), label, size=12, anchor="middle")

    def arrow(self, *points: Point, is_dashed: bool = False, has_two_heads: bool = False) -> None:
        """Draw a line through the points with a head at the last one, or at both ends."""
        path = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        start = ' marker-start="url(#head)"' if has_two_heads else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"{start}{dashes}/>'
        )

    def text(
        self, at: Point, words: str, *, size: int = 14, ink: str = INK, anchor: str = "start", is_bold: bool = False
    ) -> None:
        """Write a line; `at` is its base line, at its start, middle or end as `anchor` says."""
        weight = ' font-weight="600"' if is_bold else ""
        self._parts.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def svg(self) -> str:
        """Return the picture. It has a background, so that it can be read in the dark scheme too."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'width="{self.width}" height="{self.height}" font-family="{escape(_FONT)}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", marker, paper, *self._parts, "</svg>", ""])
