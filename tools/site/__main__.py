"""Write what the documents have from the code: diagrams, the states of a job, the commands, the model families.

`python -m tools.site` writes, `--check` fails if a file is stale; `make generate` and `make generate-check` call it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.site import states, support
from tools.site.commands import command_reference
from tools.site.diagrams import DIAGRAMS

PROJECT = Path(__file__).resolve().parents[2]


def outputs() -> dict[str, str]:
    """Return the text of each generated file, by its path in the project."""
    pictures = {f"docs/pictures/{name}.svg": draw().svg() for name, draw in DIAGRAMS.items()}
    matrix = PROJECT / "docs/support-matrix.md"
    return {
        **pictures,
        "docs/cli.md": command_reference(),
        "docs/states.md": states.page(),
        "docs/support-matrix.md": support.page(matrix.read_text()),
    }


def main() -> int:
    """Write the files, or with --check name those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is stale, write nothing")
    is_check = parser.parse_args().check
    texts = outputs()
    stale = [path for path, text in texts.items() if _read(PROJECT / path) != text]
    for path in stale:
        if not is_check:
            (PROJECT / path).parent.mkdir(parents=True, exist_ok=True)
            (PROJECT / path).write_text(texts[path])
        sys.stdout.write(f"{'stale' if is_check else 'written'}: {path}\n")
    return int(bool(stale) and is_check)


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
