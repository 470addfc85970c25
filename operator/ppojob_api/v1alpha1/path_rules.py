"""Rules of the spec's paths: what is neither a file of the container nor an address is refused before any pod starts.

`rules.py` puts them beside the others, each in CEL and in Python; `sources.py` has the forms of addresses. Whether a
file is there, only the trainer knows. `ppojob run` makes relative paths of this machine absolute before it checks a
spec.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.data import SourceType
from ppojob_api.v1alpha1.sources import PATTERNS, RULE_WORDS, SourceKind, addresses, problem
from ppojob_api.v1alpha1.spec import PPOJobSpec

_MODELS = ("actor", "critic", "ref", "reward")
_SETS = ("train", "validation")
_OTHER_FORMATS = {
    SourceType.PARQUET: (".json", ".jsonl", ".csv", ".tsv", ".txt"),
    SourceType.JSONL: (".parquet", ".csv", ".tsv", ".txt"),
}
"""Endings of files that a type cannot read."""

_ABSOLUTE = "must begin with /: the path of a folder or file in the container, such as {mount}/{example}"
_EXAMPLES = {SourceKind.MODEL: "models/name", SourceKind.DATA_SET: "data/name", SourceKind.DATA_FILE: "train.parquet"}
_PYTHON = "must end with .py: a Python file is read"


def _path_rule(holder: str, name: str, condition: str, message: str) -> Rule:
    path = f"{holder}.{name}"
    return Rule(
        rule=f"!has(self.{holder}) || !has(self.{path}) || self.{path}.{condition}",
        message=f"{path} {message}",
        field_path=f".{path}",
    )


def _words(message: str, example: str, mount: str = "/data") -> str:
    return message.format(mount=mount.rstrip("/"), example=example)


PATH_RULES = [
    *(
        _path_rule(f"model.{role}", "path", f"matches('{PATTERNS[SourceKind.MODEL]}')", RULE_WORDS[SourceKind.MODEL])
        for role in _MODELS
    ),
    *(
        Rule(
            rule=f"!has(self.data.{name}) || !has(self.data.{name}.huggingFace) || "
            f"self.data.{name}.huggingFace.path.matches('{PATTERNS[SourceKind.DATA_SET]}')",
            message=f"data.{name}.huggingFace.path {RULE_WORDS[SourceKind.DATA_SET]}",
            field_path=f".data.{name}.huggingFace.path",
        )
        for name in _SETS
    ),
    *(
        Rule(
            rule=f"!has(self.data.{name}) || !has(self.data.{name}.files) || "
            f"self.data.{name}.files.paths.all(p, p.matches('{PATTERNS[SourceKind.DATA_FILE]}'))",
            message=f"each of data.{name}.files.paths {RULE_WORDS[SourceKind.DATA_FILE]}",
            field_path=f".data.{name}.files.paths",
        )
        for name in _SETS
    ),
    *(
        Rule(
            rule=f"!has(self.data.{name}) || !has(self.data.{name}.files) || self.data.{name}.type != '{kind}' || "
            f"!self.data.{name}.files.paths.exists(p, {' || '.join(f'p.endsWith({end!r})' for end in ends)})",
            message=f"data.{name}.files.paths has a file that type {kind} cannot read: correct data.{name}.type",
            field_path=f".data.{name}.files.paths",
        )
        for name in _SETS
        for kind, ends in _OTHER_FORMATS.items()
    ),
    _path_rule("reward.function", "path", "startsWith('/')", _words(_ABSOLUTE, "reward.py")),
    _path_rule("reward.function", "path", "endsWith('.py')", _PYTHON),
    Rule(
        rule="!has(self.workers) || "
        "self.workers.all(w, !has(w.path) || (w.path.startsWith('/') && w.path.endsWith('.py')))",
        message="path of each worker must begin with / and end with .py: a Python file in the container",
        field_path=".workers",
    ),
]


def _models_and_data_can_be_found(spec: PPOJobSpec) -> Iterator[Problem]:
    mount = spec.storage.mount_path.rstrip("/")
    for field, path, kind in addresses(spec):
        if found := problem(path, kind, f"{mount}/{_EXAMPLES[kind]}"):
            yield field, path, found


def _code_is_in_the_container(spec: PPOJobSpec) -> Iterator[Problem]:
    mount = spec.storage.mount_path
    for where, path in _code(spec):
        if not path.startswith("/"):
            yield where, path, _words(_ABSOLUTE, "code.py", mount)


def _files_have_the_format_of_their_type(spec: PPOJobSpec) -> Iterator[Problem]:
    for name, index, path in _files(spec):
        kind = getattr(spec.data, name).type
        if path.endswith(_OTHER_FORMATS.get(kind, ())):
            yield f"data.{name}.files.paths[{index}]", path, f"type {kind} cannot read it: correct data.{name}.type"


def _code_is_python(spec: PPOJobSpec) -> Iterator[Problem]:
    for where, path in _code(spec):
        if not path.endswith(".py"):
            yield where, path, _PYTHON


def _files(spec: PPOJobSpec) -> Iterator[tuple[str, int, str]]:
    """Yield the set, the place in its list, and the path of each file of prompts."""
    for name in _SETS:
        source = getattr(spec.data, name)
        if source is not None and source.files is not None:
            yield from ((name, index, path) for index, path in enumerate(source.files.paths))


def _code(spec: PPOJobSpec) -> Iterator[tuple[str, str]]:
    """Yield the field and the path of each file of the user's own code."""
    function = spec.reward.function
    if function is not None and function.path is not None:
        yield "reward.function.path", function.path
    for index, worker in enumerate(spec.workers):
        if worker.path is not None:
            yield f"workers[{index}].path", worker.path


PATH_CHECKS = (
    _models_and_data_can_be_found,
    _code_is_in_the_container,
    _files_have_the_format_of_their_type,
    _code_is_python,
)
