"""The PPOJobs of `examples/`, for every test that goes through them: some folders have more than one."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*/*.yaml") if "\nkind: PPOJob\n" in path.read_text())


def name_of(example: Path) -> str:
    """Return the folder's name, and behind it the file's where that is not ppojob.yaml."""
    folder = example.parent.name
    return folder if example.stem == "ppojob" else f"{folder}-{example.stem}"
