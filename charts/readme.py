"""Write the table of values in the chart's README from values.yaml and its comments.

`python charts/readme.py` writes, `--check` fails if the table is stale; `make generate` and `make generate-check` call
it. A comment that begins with `# --` is about the key below it and ends there. Everything else of the README is written
by hand.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).resolve().parent / "ppojob"
BEGIN, END = "<!-- values: made by charts/readme.py from values.yaml -->", "<!-- end of values -->"
_KEY = re.compile(r"^( *)([A-Za-z]\w*):")
_COMMENT = re.compile(r"^ *# ?(-- )?(.*)$")


class Value(NamedTuple):
    """One key of values.yaml."""

    path: str
    default: Any
    words: str


def values(text: str) -> Iterator[Value]:
    """Yield the keys in their order: those with a default, and sections that have a description."""
    defaults, path, words = yaml.safe_load(text), list[str](), list[str]()
    for line in text.splitlines():
        if key := _KEY.match(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            default = _at(defaults, path)
            is_section = isinstance(default, dict) and bool(default) and line.rstrip().endswith(":")
            if words or not is_section:
                yield Value(".".join(path), None if is_section else default, " ".join(words))
            words = []
        elif comment := _COMMENT.match(line):
            words = [comment[2]] if comment[1] else [*words, comment[2]] if words else []
        else:
            words = []


def table(text: str) -> str:
    """Return the table in Markdown."""
    rows = [f"| `{value.path}` | {_default(value)} | {_cell(value.words)} |" for value in values(text)]
    return "\n".join(["| value | default | |", "|---|---|---|", *rows])


def readme(old: str, text: str) -> str:
    """Return the README with the table in its place.

    Raises:
        ValueError: the README has no place for it.
    """
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"charts/ppojob/README.md needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{table(text)}\n{END}{after}"


def main() -> int:
    """Write the README, or with --check say whether it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the table is stale, write nothing")
    is_check = parser.parse_args().check
    path = CHART / "README.md"
    old = path.read_text()
    new = readme(old, (CHART / "values.yaml").read_text())
    if new == old:
        return 0
    if not is_check:
        path.write_text(new)
    sys.stdout.write(f"{'stale' if is_check else 'written'}: charts/ppojob/README.md\n")
    return int(is_check)


def _at(defaults: Any, path: list[str]) -> Any:
    for name in path:
        defaults = defaults[name]
    return defaults


def _default(value: Value) -> str:
    return "" if value.default is None else f"`{_cell(json.dumps(value.default))}`"


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
