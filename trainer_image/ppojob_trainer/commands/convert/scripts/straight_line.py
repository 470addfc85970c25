"""Reads a launch script without bash: commands one after the other, variables, arrays, whole-number arithmetic.

Whatever decides or computes something is refused with its line and the values on each side, because what a script
starts then depends on the machine. Called by `read` for `--static`, and where no sandbox works.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from ppojob_trainer.commands.convert.scripts.bash_run import Call, Recording, Script
from ppojob_trainer.commands.manifest import ManifestError

Value = str | list[str]

_REMEDY = "--run has bash evaluate the script; or convert the settings alone: ppojob convert -- NAME=VALUE ..."
_DECIDING = {
    "if_statement": "an if",
    "case_statement": "a case",
    "for_statement": "a loop",
    "c_style_for_statement": "a loop",
    "while_statement": "a loop",
    "function_definition": "a function",
    "list": "a branch (&& or ||)",
    "command_substitution": "the output of a command",
    "process_substitution": "the output of a command",
    "subshell": "a subshell",
    "ERROR": "something that is not bash",
}
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
}  # fmt: skip
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED_IN_STRING = re.compile(r'\\(["\\$`])')


def read_straight(script: Script) -> Recording:
    """Return the commands of a script that has no branch.

    Raises:
        ManifestError: with file and line of the first thing that only bash can know.
    """
    text = script.path.read_bytes().replace(b"\\\r\n", b"").replace(b"\r\n", b"\n")
    reader = _Reader(script)
    for node in Parser(Language(tree_sitter_bash.language())).parse(text).root_node.named_children:
        reader.statement(node)
    return Recording(reader.calls, (), 0, "$PWD", "$HOME")


class _Reader:
    def __init__(self, script: Script) -> None:
        self.calls: list[Call] = []
        self._script = script
        self._variables: dict[str, Value] = {"HOME": "$HOME", "PWD": "$PWD", **script.environment}

    def statement(self, node: Node) -> None:
        if node.type in ("variable_assignment", "variable_assignments", "declaration_command"):
            for assignment in [node, *node.named_children]:
                if assignment.type == "variable_assignment":
                    self._assign(assignment)
        elif node.type in ("pipeline", "redirected_statement"):
            for child in node.named_children:
                if child.type in ("command", "redirected_statement"):
                    self.statement(child)
        elif node.type == "command":
            # `X=1 program` sets X for the program alone, and a setting of verl does not read it.
            named = [child for child in node.named_children if child.type not in ("variable_assignment", "comment")]
            words = [word for child in named for word in self._words(child)]
            self.calls.append(Call(words, self._at(node), is_piped=False))
        elif node.type != "comment":
            self._refuse(node)

    def _assign(self, node: Node) -> None:
        name = _text(node.named_children[0])
        value_node = node.named_children[1] if len(node.named_children) > 1 else None
        value: Value = "" if value_node is None else self._text(value_node)
        if value_node is not None and value_node.type == "array":
            value = [word for child in value_node.named_children for word in self._words(child)]
        old = self._variables.get(name)
        appends = b"+=" in (node.text or b"").partition(b"(")[0].partition(b'"')[0]
        if appends and isinstance(old, list) and isinstance(value, list):
            value = [*old, *value]
        elif appends and isinstance(old, str) and isinstance(value, str):
            value = old + value
        self._variables[name] = value

    def _words(self, node: Node) -> list[str]:
        """Return the words that a node becomes: several for an array and for what is not quoted."""
        if node.type == "comment":
            return []
        bare = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
        source = _text(bare)
        if source in ("$@", "${@}", "$*"):
            return list(self._script.arguments)
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", source)
        if array:
            found = self._variables.get(array[1], [])
            return list(found) if isinstance(found, list) else [found]
        text = self._text(node)
        return text.split() if node.type in ("simple_expansion", "expansion") else [text]

    def _text(self, node: Node) -> str:
        """Return the text that a node becomes."""
        if node.type == "raw_string":
            return _text(node)[1:-1]
        if node.type in ("simple_expansion", "expansion"):
            return self._variable(node)
        if node.type == "arithmetic_expansion":
            return str(self._number(node.named_children[0]))
        if node.type in _DECIDING:
            self._refuse(node)
        is_string = node.type == "string"
        pattern = _ESCAPED_IN_STRING if is_string else _ESCAPED
        if not node.named_children:
            text = _text(node)
            return pattern.sub(r"\1", text[1:-1] if is_string else text)
        return self._joined(node, pattern, is_string=is_string)

    def _joined(self, node: Node, pattern: re.Pattern[str], *, is_string: bool) -> str:
        """Join the parts of a node; the parser gives no nodes to the blanks and braces between them."""
        source, start = node.text or b"", node.start_byte
        end = len(source) - is_string
        parts, at = [], int(is_string)
        for child in node.named_children:
            parts.append(pattern.sub(r"\1", source[at : child.start_byte - start].decode()))
            is_content = child.type == "string_content"
            parts.append(pattern.sub(r"\1", _text(child)) if is_content else self._text(child))
            at = child.end_byte - start
        return "".join([*parts, pattern.sub(r"\1", source[at:end].decode())])

    def _variable(self, node: Node) -> str:
        # The parser counts blanks of a string before an expansion to it.
        match = re.fullmatch(r"(\s*)\$(?:(\w+)|\{(\w+)(?:(:?[-=])(.*))?\})", _text(node), re.DOTALL)
        if match is None:
            self._refuse(node)
        blanks, name, otherwise = match[1], match[2] or match[3], match[4]
        value = self._variables.get(name)
        if otherwise is not None and (value is None or (value == "" and otherwise.startswith(":"))):
            value = self._text(node.named_children[1]) if len(node.named_children) > 1 else ""
        if value is None:
            if name.isdigit() and 1 <= int(name) <= len(self._script.arguments):
                return blanks + self._script.arguments[int(name) - 1]
            raise ManifestError(f"{self._at(node)}: {name} is not set in the script: give it with --env {name}=VALUE")
        return blanks + (value if isinstance(value, str) else next(iter(value), ""))

    def _number(self, node: Node) -> int:
        children = node.named_children
        if node.type == "parenthesized_expression":
            return self._number(children[0])
        sign = node.children[1].type if len(node.children) == 3 else ""
        if node.type == "binary_expression" and sign in _OPERATORS:
            left, right = (self._number(child) for child in children)
            if right == 0 and sign in "/%":
                self._refuse(node)
            return _OPERATORS[sign](left, right)
        value = self._variables.get(_text(node)) if node.type == "variable_name" else self._text(node)
        if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
            return int(value)
        self._refuse(node)

    def _at(self, node: Node) -> str:
        return f"{self._script.name}:{node.start_point[0] + 1}"

    def _refuse(self, node: Node) -> NoReturn:
        what = _DECIDING.get(node.type, f"`{_text(node)[:60]}`")
        sides = [f"line {found.start_point[0] + 1}: {_text(found)[:80]}" for found in _assignments(node)]
        listed = f" ({'; '.join(sides[:12])}{'; ...' if len(sides) > 12 else ''})" if sides else ""
        raise ManifestError(f"{self._at(node)}: {what}{listed}: its effect is not known without bash: {_REMEDY}")


def _assignments(node: Node) -> list[Node]:
    """Return what is set on each side of a branch."""
    if node.type == "variable_assignment":
        return [node]
    return [found for child in node.named_children for found in _assignments(child)]


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")
