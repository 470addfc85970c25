"""Parses YAML as Kubernetes does, which differs from PyYAML in some details.

Files, `--set` and `convert` use it, so that the same text means the same here and in `kubectl apply`.
"""

import re
from typing import Any

import yaml

# PyYAML reads 1e-5 as a string: YAML 1.1 requires a dot and a sign, but kubectl and most other parsers do not.
_FLOAT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


class Loader(yaml.SafeLoader):
    """A key given twice is an error, not a silent choice. Merge keys and anchors work."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a duplicate key in one mapping; a key from a merge (`<<`) may be overridden."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.composer.ComposerError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_all(text: str) -> list[Any]:
    """Return every document of a text.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return list(yaml.load_all(text, Loader=Loader))


def in_one_line(error: yaml.YAMLError) -> str:
    """Return in one line where a text is not YAML, why, and what to check."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    is_structure = isinstance(error, yaml.parser.ParserError | yaml.scanner.ScannerError)
    check = ": check this line, and the indentation of the lines above it; indent with spaces" if is_structure else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}{check}"


def parse(text: str) -> Any:
    """Return the one document of a text.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return yaml.load(text, Loader=Loader)
