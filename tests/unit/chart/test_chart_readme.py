"""The chart's README has every value with its default and the words of its comment."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[3]
VALUES = """# Words about the file.

# -- One thing.
# In two lines.
one: 1

group:
  # -- A | B.
  two: {a: "b"}
  three: []
# -- Words about a section.
section:
  four: ""
"""


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    """The generator's functions."""
    return runpy.run_path(str(PROJECT / "charts" / "readme.py"))


def test_every_key_has_its_default_and_its_words(readme: dict[str, Any]) -> None:
    assert readme["table"](VALUES).splitlines()[2:] == [
        "| `one` | `1` | One thing. In two lines. |",
        '| `group.two` | `{"a": "b"}` | A \\| B. |',
        "| `group.three` | `[]` |  |",
        "| `section` |  | Words about a section. |",
        '| `section.four` | `""` |  |',
    ]


def test_the_table_replaces_the_old_one_and_nothing_else(readme: dict[str, Any]) -> None:
    old = f"before\n{readme['BEGIN']}\nold\n{readme['END']}\nafter\n"

    assert readme["readme"](old, "a: 1\n") == (
        f"before\n{readme['BEGIN']}\n| value | default | |\n|---|---|---|\n| `a` | `1` |  |\n{readme['END']}\nafter\n"
    )


def test_a_readme_without_a_place_for_the_table_is_an_error(readme: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        readme["readme"]("nothing", "a: 1\n")


def test_no_value_of_the_chart_is_left_out(readme: dict[str, Any]) -> None:
    text = (PROJECT / "charts" / "ppojob" / "values.yaml").read_text()
    rows = {value.path for value in readme["values"](text)}

    def leaves(values: dict[str, Any], above: str = "") -> set[str]:
        found = {f"{above}{name}" for name, value in values.items() if not isinstance(value, dict)}
        return found.union(
            *(leaves(value, f"{above}{name}.") for name, value in values.items() if isinstance(value, dict))
        )

    missing = {leaf for leaf in leaves(yaml.safe_load(text)) if not any(leaf.startswith(row) for row in rows)}
    assert missing == set()
