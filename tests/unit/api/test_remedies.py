"""The remedies in messages about an accepted job: none asks for a change of a field that is fixed by then."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.fixed import IMMUTABLE, MUTABLE

PROJECT = Path(__file__).parents[3]
ROOTS = ("trainer_image/ppojob_trainer", "operator")
VERBS = (
    "add", "change", "choose", "correct", "disable", "enable", "increase", "leave", "lower", "raise", "reduce",
    "remove", "set", "shorten", "unset", "use",
)  # fmt: skip
VERB = re.compile(rf"\b({'|'.join(VERBS)})\b", re.IGNORECASE)
FIELD = re.compile(r"(?<!\w)spec\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)")
BEFORE_ACCEPTANCE = {
    "operator/ppojob_api/": "rules, and the descriptions of fields: they refuse a spec before the job is accepted",
    "operator/ppojob_operator/manifests/pod_template.py": "a rule of pod templates, of the webhook",
    "trainer_image/ppojob_trainer/cli.py": "options of `ppojob run`",
    "trainer_image/ppojob_trainer/planning/": "`ppojob plan`: there is no job",
}
WITHOUT_A_CHANGE = {
    "trainer_image/ppojob_trainer/commands/fetch/folders.py": "removes a folder, and creates the job again",
}


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string, without docstrings; {x}: a value."""
    tree = ast.parse(path.read_text())
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in parts | alone:
            continue
        if isinstance(node, ast.JoinedStr):
            values = (value.value if isinstance(value, ast.Constant) else "{x}" for value in node.values)
            yield node.lineno, "".join(map(str, values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def is_fixed(field: str) -> bool:
    def covers(paths: tuple[str, ...]) -> bool:
        return any(field == path or field.startswith(f"{path}.") for path in paths)

    return covers(IMMUTABLE) and not covers(MUTABLE)


def asks_for_a_fixed_field(text: str) -> bool:
    """Whether an imperative of a message, other than to create a job, may be about a fixed field that it names."""
    return (
        any(is_fixed(field) for field in FIELD.findall(text))
        and VERB.search(text) is not None
        and re.search(r"create another\s+PPOJob", text, re.IGNORECASE) is None
    )


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("it is wrong. Remove spec.rollout.quantization, and report this", True),
        ("spec.rollout.engineArgs.x: vLLM has no such argument; correct the name", False),
        ("spec.rollout.routingReplay: the scheduler does not know vLLM {x}; remove it", True),
        ("set spec.trainer.totalSteps higher", False),
        ("create another PPOJob without spec.rollout.quantization", False),
        ("spec.model.actor.path {x}: there is no config.json", False),
    ],
)
def test_what_counts_as_such_a_remedy(text: str, asks: bool) -> None:
    assert asks_for_a_fixed_field(text) is asks


def test_no_message_about_an_accepted_job_asks_for_a_change_of_a_fixed_field() -> None:
    allowed = tuple(BEFORE_ACCEPTANCE | WITHOUT_A_CHANGE)
    found = [
        f"{name}:{line}: {text}"
        for root in ROOTS
        for path in sorted((PROJECT / root).rglob("*.py"))
        if not (name := path.relative_to(PROJECT).as_posix()).startswith(allowed)
        for line, text in messages(path)
        if asks_for_a_fixed_field(text)
    ]
    assert found == []
