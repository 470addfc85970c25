"""Rules of the spec's paths: what is neither a file of the container nor an address is refused before any pod starts.

`rules.py` puts them beside the others, each in CEL and in Python; the CEL of `engineClass` is beside its field.
`sources.py` has the forms of addresses. Whether a file is there, only the trainer knows. `ppojob run` makes relative
paths of this machine absolute before it checks a spec.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.algorithm_rules import user_functions
from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.data import JSON_LINES, PARQUET
from ppojob_api.v1alpha1.data_rules import MIXTURE, TOO_MANY_FILES
from ppojob_api.v1alpha1.engine_rules import engine_classes
from ppojob_api.v1alpha1.sources import PATTERNS, RULE_WORDS, SourceKind, addresses, problem
from ppojob_api.v1alpha1.spec import PPOJobSpec

_MODELS = ("actor", "critic", "ref", "reward")
_SETS = ("train", "validation")
_ABSOLUTE = "must begin with /: the path of a folder or file in the container, such as {mount}/{example}"
_EXAMPLES = {SourceKind.MODEL: "models/name", SourceKind.DATA_SET: "data/name", SourceKind.DATA_FILE: "train.parquet"}
_IS_FILE = "(p.startsWith('/') || p.matches('^(hf://datasets/[^/]+/|(s3|gs)://)([^/]+/)+[^/]+$'))"
"""Of a path `p`, in CEL. The API server limits the cost of 512 paths, and a pattern costs its own length for each
character. So this one is shorter than that of `sources.PATTERNS`, and paths of the container do without."""
_IS_DATA_SET = f"(s.huggingFace.path.startsWith('/') || s.huggingFace.path.matches('{PATTERNS[SourceKind.DATA_SET]}'))"
"""Of a source `s` of a mixture, in CEL."""
_FORMATS = {"Parquet": PARQUET, "JSON Lines": JSON_LINES}
_ENDINGS = "must end with .parquet, or with .jsonl or .json (JSON Lines): convert the file, or rename it"
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
            f"self.data.{name}.files.paths.all(p, {_IS_FILE})",
            message=f"each of data.{name}.files.paths {RULE_WORDS[SourceKind.DATA_FILE]}",
            field_path=f".data.{name}.files.paths",
            value=f"self.data.{name}.files.paths.filter(p, !{_IS_FILE})",
        )
        for name in _SETS
    ),
    Rule(
        rule=f"{MIXTURE}.all(s, !has(s.huggingFace) || {_IS_DATA_SET})",
        message=f"huggingFace.path of each source {RULE_WORDS[SourceKind.DATA_SET]}",
        field_path=".data.train.mixture",
        value=f"{MIXTURE}.filter(s, has(s.huggingFace) && !{_IS_DATA_SET}).map(s, s.huggingFace.path)",
    ),
    Rule(
        rule=f"{TOO_MANY_FILES} || {MIXTURE}.all(s, !has(s.files) || s.files.paths.all(p, {_IS_FILE}))",
        message=f"each of files.paths of each source {RULE_WORDS[SourceKind.DATA_FILE]}",
        field_path=".data.train.mixture",
        value=f"{MIXTURE}.filter(s, has(s.files) && !s.files.paths.all(p, {_IS_FILE})).map(s, s.name)",
    ),
    _path_rule("reward.function", "path", "startsWith('/')", _words(_ABSOLUTE, "reward.py")),
    _path_rule("reward.function", "path", "endsWith('.py')", _PYTHON),
    *(
        _path_rule(f"algorithm.{block}", "path", condition, message)
        for block in ("advantageFunction", "policyLossFunction")
        for condition, message in (
            ("startsWith('/')", _words(_ABSOLUTE, "algorithm.py")),
            ("endsWith('.py')", _PYTHON),
        )
    ),
    Rule(
        rule="!has(self.workers) || "
        "self.workers.all(w, !has(w.path) || (w.path.startsWith('/') && w.path.endsWith('.py')))",
        message="path of each worker must begin with / and end with .py: a Python file in the container",
        field_path=".workers",
        value="self.workers.filter(w, has(w.path) && !(w.path.startsWith('/') && w.path.endsWith('.py')))"
        ".map(w, w.path)",
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


def _files_have_one_format(spec: PPOJobSpec) -> Iterator[Problem]:
    formats: dict[str, str] = {}
    for source, index, path in _files(spec):
        where = f"{source}.files.paths[{index}]"
        found = next((text for text, endings in _FORMATS.items() if path.endswith(endings)), None)
        if found is None:
            yield where, path, _ENDINGS
        elif formats.setdefault(source, found) != found:
            remedy = f"the first file is {formats[source]}, and all must have one format: convert some of them"
            yield where, path, remedy


def _code_is_python(spec: PPOJobSpec) -> Iterator[Problem]:
    for where, path in _code(spec):
        if not path.endswith(".py"):
            yield where, path, _PYTHON


def _files(spec: PPOJobSpec) -> Iterator[tuple[str, int, str]]:
    """Yield the field of the source, the place in its list, and the path of each file of prompts."""
    for field, source in spec.data.sources():
        if source.files is not None:
            yield from ((field, index, path) for index, path in enumerate(source.files.paths))


def _code(spec: PPOJobSpec) -> Iterator[tuple[str, str]]:
    """Yield the field and the path of each file of the user's own code."""
    function = spec.reward.function
    if function is not None and function.path is not None:
        yield "reward.function.path", function.path
    for where, own in user_functions(spec):
        if own.path is not None:
            yield f"{where}.path", own.path
    for where, engine in engine_classes(spec):
        if engine.path is not None:
            yield f"{where}.path", engine.path
    for index, worker in enumerate(spec.workers):
        if worker.path is not None:
            yield f"workers[{index}].path", worker.path


PATH_CHECKS = (
    _models_and_data_can_be_found,
    _code_is_in_the_container,
    _files_have_one_format,
    _code_is_python,
)
