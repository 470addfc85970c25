"""CONTRIBUTING.md says of each test that CI does not run what covers it there: its table and the markers agree."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path("CONTRIBUTING.md")
TESTS = Path("tests")
_MARK = "pytest.mark.long"
_ROW = re.compile(r"^\| `(?P<test>[\w/.]+\.py(?:::\w+)?)`[^|]* \| (?P<covered>[^|]+) \|$", re.MULTILINE)
_FILE = re.compile(r"`([\w/.]+\.py)`")


def marked(source: str) -> Iterator[str]:
    """Yield the functions of a file that have the marker or give it to parameters; "" is the whole file."""
    for node in ast.parse(source).body:
        if any(isinstance(each, ast.Attribute) and ast.unparse(each) == _MARK for each in ast.walk(node)):
            yield getattr(node, "name", "")


def long_tests() -> set[str]:
    """Return the tests with the marker, as the table names them."""
    found = ((path, name) for path in TESTS.rglob("*.py") for name in marked(path.read_text()))
    return {f"{path.relative_to(TESTS)}::{name}".removesuffix("::") for path, name in found} - {_own_name()}


def rows() -> dict[str, str]:
    """Return what the table says of each test."""
    return {row["test"]: row["covered"] for row in _ROW.finditer(PAGE.read_text())}


def _own_name() -> str:
    return str(Path(__file__).relative_to(TESTS.absolute()))


def test_each_long_test_has_a_row_that_says_what_covers_it() -> None:
    assert sorted(long_tests() ^ rows().keys()) == [], "CONTRIBUTING.md, 'Tests that CI does not run'"


def test_ci_runs_the_files_that_cover_them() -> None:
    named = [(test, file) for test, covered in rows().items() for file in _FILE.findall(covered)]

    assert [(test, file) for test, file in named if not (TESTS / file).is_file() or file in rows()] == []
    assert rows().keys() == {test for test, _ in named}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("pytestmark = [pytest.mark.slow, pytest.mark.long]", [""]),
        ("@pytest.mark.long\ndef test_a(): ...\ndef test_b(): ...", ["test_a"]),
        ("@pytest.mark.parametrize('a', [1, pytest.param(2, marks=pytest.mark.long)])\ndef test_a(a): ...", ["test_a"]),
        ("def marks(name):\n    return [pytest.mark.long] if name else []", ["marks"]),
        ("def test_a(): ...", []),
    ],
)
def test_the_marker_is_found_wherever_it_is_given(source: str, names: list[str]) -> None:
    assert list(marked(source)) == names
