"""No file, function or signature grows beyond what a reader can hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("operator", "trainer_image", "tests", "tools")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
MAX_PARAMETERS = 8

FILES = sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def functions(source: str) -> Iterator[Function]:
    """Yield every function and method."""
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def num_lines(function: Function) -> int:
    """Return the lines from `def` to the last one, docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def num_parameters(function: Function) -> int:
    """Return the parameters without self and cls."""
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def nesting(node: ast.AST, *, is_elif: bool = False) -> int:
    """Return how deep the blocks below a node are nested; `elif` is not deeper than its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _OWN_SCOPE):
            continue
        continues_if = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, nesting(child, is_elif=continues_if))
    return deepest + (isinstance(node, _BLOCKS) and not is_elif)


def over_budget(path: Path) -> list[str]:
    """Return a sentence for everything in the file that is too large."""
    source = path.read_text()
    found = []
    if (lines := source.count("\n")) > MAX_FILE_LINES:
        found.append(f"{path} has {lines} lines, {MAX_FILE_LINES} are allowed: split it by idea")
    for function in functions(source):
        where = f"{path}:{function.lineno} {function.name}"
        if (lines := num_lines(function)) > MAX_FUNCTION_LINES:
            found.append(f"{where} has {lines} lines, {MAX_FUNCTION_LINES} are allowed")
        if (count := num_parameters(function)) > MAX_PARAMETERS:
            found.append(f"{where} has {count} parameters, {MAX_PARAMETERS} are allowed: give them a type")
        if (depth := nesting(function)) > MAX_NESTING:
            found.append(f"{where} nests {depth} deep, {MAX_NESTING} are allowed: give the inside a name")
    return found


def test_there_is_something_to_measure() -> None:
    assert len(FILES) > 50


def test_everything_is_within_its_budget() -> None:
    found = [sentence for path in FILES for sentence in over_budget(path)]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        ("pass", 0),
        ("if a:\n  pass", 1),
        ("if a:\n  pass\nelif b:\n  pass\nelse:\n  pass", 1),
        ("if a:\n  pass\nelse:\n  if b:\n    pass\n  x = 1", 2),
        ("for a in b:\n  with c:\n    try:\n      pass\n    except d:\n      if e:\n        pass", 4),
        ("def inner():\n  if a:\n    pass", 0),
    ],
)
def test_nesting_is_measured_as_a_reader_sees_it(body: str, depth: int) -> None:
    indented = "\n".join(f"  {line}" for line in body.splitlines())
    function = next(functions(f"def f():\n{indented}\n"))

    assert nesting(function) == depth


def test_a_file_over_budget_is_found(tmp_path: Path) -> None:
    parameters = ", ".join(f"p{i}" for i in range(9))
    path = tmp_path / "large.py"
    path.write_text(f"def f({parameters}):\n" + "  x = 1\n" * 61 + "\n" * 400)

    assert len(over_budget(path)) == 3
