"""The commands, paths, links, values and tables in the documents are right, as far as this can be known without a run.

Blocks of `sh` are checked with the command's own parser, with arguments and options. Commands in running text may be
incomplete, so only their subcommands and options are checked.
"""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer
import yaml
from typer.main import get_command

from ppojob_trainer.cli import app as ppojob_app
from ppojob_trainer.commands.manifest import load
from ppojob_trainer.kubectl.app import app as kubectl_app
from tests.architecture.test_words import tree
from tests.unit.release.test_version import VERSION
from tools.cluster.__main__ import app as cluster_app

DOCUMENTS = sorted(path for path in tree() if path.suffix == ".md")
BLOCK = re.compile(r"^```(?:sh|bash|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
IN_TEXT = re.compile(r"`((?:make|ppojob|kubectl ppo|helm|pip|python -m|python3 -m) [^`]+)`")
JOINED_ROWS = re.compile(r"\|\s+\|\s*:?-{3}")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
BEFORE_A_COMMAND = re.compile(r"^([A-Z_]+=.*|do|then|sudo|if|!)$")
VALUE = re.compile(r"^[a-z]\w*(\.[a-z]\w*)+$")
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", Path("Makefile").read_text(), re.MULTILINE))
KUBERAY_CHART = "kuberay-operator"
VALUES = yaml.safe_load(Path("charts/ppojob/values.yaml").read_text())
EXTRAS = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
TOPS = {path.parts[0] for path in tree()}
# Words of documents that begin like a value of the chart.
NO_VALUES = {"metrics.jsonl", "image.yaml"}


@dataclass(frozen=True)
class Command:
    """A command of a document, without what is put before it and after it."""

    words: tuple[str, ...]
    is_whole: bool
    """It is in a block, with all that it needs."""


def split(line: str, *, is_whole: bool) -> Iterator[Command]:
    """Yield the commands of a shell's line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("&;|"):
            while words and BEFORE_A_COMMAND.match(words[0]):
                words.pop(0)
            if words:
                yield Command(tuple(words), is_whole)
            words = []
        else:
            words.append(word)


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a document."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from split(line, is_whole=True)
    for words in IN_TEXT.findall(ANY_BLOCK.sub("", text)):
        yield from split(" ".join(words.split()), is_whole=False)


def problems(command: Command) -> Iterator[str]:
    """Yield what is wrong with a command."""
    program, *arguments = command.words
    if program == "make":
        yield from (f"no target {word}" for word in arguments if "=" not in word and word not in TARGETS)
    elif program == "ppojob":
        yield from of_program(ppojob_app, arguments, command.is_whole)
    elif command.words[:2] == ("kubectl", "ppo"):
        yield from of_program(kubectl_app, arguments[1:], command.is_whole)
    elif program in ("python", "python3") and arguments[:1] == ["-m"]:
        yield from of_module(arguments[1:], command.is_whole)
    # Values of other charts are not known here.
    elif program == "helm" and KUBERAY_CHART not in arguments:
        given = [word for flag, word in pairwise(arguments) if flag in ("--set", "--set-json")]
        yield from (f"no value {word}" for word in given if not is_value(word.partition("=")[0]))
    elif program == "pip":
        yield from of_pip(" ".join(arguments))
    yield from (
        f"no file {word}" for word in arguments if word.split("/")[0] in TOPS and "/" in word and is_missing(word)
    )


def of_program(app: typer.Typer, arguments: list[str], is_whole: bool) -> Iterator[str]:
    """Yield what a program of typer's would refuse."""
    group: Any = get_command(app)
    context = group.make_context("program", [], resilient_parsing=True)
    if arguments[:1] == ["--help"] or not arguments:
        return
    name, *rest = arguments
    found = group.get_command(context, name)
    if found is None:
        yield f"no subcommand {name}"
    elif is_whole and "--help" not in rest:
        yield from refusals(found, name, rest)
    else:
        known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
        before_words = rest[: rest.index("--")] if "--" in rest else rest
        given = [word.partition("=")[0] for word in before_words if word.startswith("-") and len(word) > 1]
        yield from (f"{name} has no option {option}" for option in given if option not in {*known, "--help"})


def refusals(found: Any, name: str, rest: list[str]) -> Iterator[str]:
    """Yield what the subcommand says of its arguments, and what the object of `ppojob run` says of each --set."""
    try:
        context = found.make_context(name, list(rest))
    except Exception as error:  # noqa: BLE001 - typer has its own copy of click's errors
        yield f"{name}: {error}"
        return
    file = context.params.get("file")
    if file is not None and Path(file).exists():
        sets = context.params.get("sets") or []
        # A shell's variable has no value here.
        folder = Path() if context.command.name == "run" else None
        load(Path(file), [each for each in sets if "$" not in each], folder=folder)


def of_module(words: list[str], is_whole: bool) -> Iterator[str]:
    """Yield what is wrong with the words after `python -m`."""
    module, *arguments = words
    if importlib.util.find_spec(module) is None:
        yield f"no module {module}"
    elif module == "tools.cluster":
        yield from of_program(cluster_app, arguments, is_whole)


def of_pip(words: str) -> Iterator[str]:
    """Yield what is wrong with an installation: extras that are not there, or another version's wheel."""
    for names in re.findall(r"(?:ppojob|\.)\[([\w,-]+)\]", words):
        yield from (f"no extra {name}" for name in names.split(",") if name not in EXTRAS)
    if re.search(r"\bppojob\b(?!-)", words) and "@ file:" not in words:
        yield "ppojob is on no index: install from a clone or from the wheel"
    yield from (f"version {found}" for found in re.findall(r"ppojob-([\d.]+)-py3", words) if found != VERSION)


def is_value(path: str) -> bool:
    """Whether values.yaml has it; below an empty mapping anything may stand."""
    found: Any = VALUES
    for name in path.split("."):
        if found == {}:
            return True
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True


def is_missing(path: str) -> bool:
    """Whether a path of the project is not there; a pattern must match something."""
    plain = path.rstrip("/.,:").partition("::")[0]
    return not (list(Path().glob(plain)) if "*" in plain else Path(plain).exists())


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", ANY_BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_command_is_one_that_works(document: Path) -> None:
    found = [
        f"{' '.join(command.words)}: {problem}"
        for command in commands(document.read_text())
        for problem in problems(command)
    ]

    assert found == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(ANY_BLOCK.sub("", document.read_text())):
        path, _, anchor = unquote(link).partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    named = [
        word.split()[0] for word in CODE.findall(ANY_BLOCK.sub("", document.read_text())) if word.startswith("tests/")
    ]

    assert [name for name in named if not list(Path().glob(name.partition("::")[0]))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_value_of_the_chart_is_in_values_yaml(document: Path) -> None:
    named = {word.partition("=")[0] for word in CODE.findall(ANY_BLOCK.sub("", document.read_text()))}
    of_chart = {word for word in named - NO_VALUES if VALUE.match(word) and word.split(".")[0] in VALUES}

    assert {word for word in of_chart if not is_value(word)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_row_of_a_table_has_its_own_line(document: Path) -> None:
    text = ANY_BLOCK.sub("", document.read_text())

    assert [line[:80] for line in text.splitlines() if JOINED_ROWS.search(line)] == []


def test_there_is_something_to_check() -> None:
    programs = [command.words[0] for path in DOCUMENTS for command in commands(path.read_text())]

    assert {"make", "ppojob", "kubectl", "helm", "pip", "python"} <= set(programs)
    assert len(programs) > 80


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("make everything", "no target everything"),
        ("make install && make bnech BENCH=x", "no target bnech"),
        ("ppojob train x.yaml", "no subcommand train"),
        ("ppojob plot a --titel x", "plot: No such option: --titel"),
        ("ppojob prepare-model", "prepare-model: Missing parameter: output"),
        ("kubectl ppo log products", "no subcommand log"),
        ("kubectl ppo logs products --roles actor", "logs: No such option: --roles"),
        ("OUT=x python -m tools.clusters up", "no module tools.clusters"),
        ("python -m tools.cluster start", "no subcommand start"),
        ("helm install x charts/ppojob --set image.registry=y", "no value image.registry"),
        ("helm install x charts/ppojobs", "no file charts/ppojobs"),
        ("pip install 'ppojob[kubectl]'", "ppojob is on no index"),
        ("pip install '.[kubectl,gpus]'", "no extra gpus"),
        ("ppojob validate examples/1-quickstart/ppojob.yaml", "no file examples/1-quickstart/ppojob.yaml"),
    ],
)
def test_a_command_that_does_not_work_is_found(line: str, problem: str) -> None:
    found = [each for command in split(line, is_whole=True) for each in problems(command)]

    assert len(found) == 1
    assert found[0].startswith(problem)


def test_a_command_in_running_text_may_be_cut_short_but_not_wrong() -> None:
    whole = "Use `ppojob prepare-model`, `kubectl ppo logs --role` or `make bench`."
    wrong = "Use `kubectl ppo logs --roles x`."

    assert [each for command in commands(whole) for each in problems(command)] == []
    assert [each for command in commands(wrong) for each in problems(command)] == ["logs has no option --roles"]
