"""What no name and no text of the project says."""

import re
import subprocess
from pathlib import Path

import pytest

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

# Put together here, so that this file does not say them either.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("proxy", "golang", "org"),
        ("sum", "golang", "org"),
        ("npmjs", "org"),
        ("crates", "io"),
        ("deb", "debian", "org"),
        ("anaconda", "org"),
    )
]
REGISTRY = re.compile("|".join(map(re.escape, REGISTRIES)))
HOME = re.compile(r"(?<![\w.$}/-])/(?:home/(?!ppojob\b)|Users/|work/)\w|(?<![\w.$}/-])/root/(?!\.?\W)\w")


def tree() -> list[Path]:
    """Return every file of the project that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    return [path for path in map(Path, done.stdout.splitlines()) if path.is_file()]


def lines_with(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """Return `path:line: text` for each line in which the pattern is found; binary files have no lines."""
    found = []
    for path in paths:
        content = path.read_bytes()
        if b"\0" in content:
            continue
        numbered = enumerate(content.decode(errors="replace").splitlines(), 1)
        found += [f"{path}:{number}: {line.strip()[:100]}" for number, line in numbered if pattern.search(line)]
    return found


def test_no_room_is_a_junk_drawer() -> None:
    assert [path for path in tree() if BANNED_NAMES & {path.stem, *path.parent.parts}] == []


def test_no_text_names_a_package_registry() -> None:
    assert lines_with(REGISTRY, tree()) == []


def test_no_text_has_a_path_of_somebodys_machine() -> None:
    assert lines_with(HOME, tree()) == []


@pytest.mark.parametrize(
    ("text", "is_home"),
    [
        ("cd {slash}home/ada/ppojob", True),
        ('"{slash}root/ppojob"', True),
        ("{slash}Users/ada", True),
        ("{slash}work/main", True),
        ("/data{slash}home/model", False),
        ("https://example.org{slash}home/page", False),
        ("$HOME{slash}work/x", False),
        ("{slash}root", False),
    ],
)
def test_a_path_of_somebodys_machine_is_known(text: str, is_home: bool) -> None:
    assert bool(HOME.search(text.replace("{slash}", "/"))) == is_home


def test_a_registry_is_known() -> None:
    assert all(REGISTRY.search(f"https://{host}/simple") for host in REGISTRIES)
