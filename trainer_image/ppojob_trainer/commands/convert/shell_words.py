"""The commands of a shell script as lists of words, with the script's own variables filled in.

`read` looks for the one that starts verl. It runs nothing: what only a shell could know (`$(command)`, arguments of the
script) stays as it is written, so that whoever reads the result sees it. Branches and loops are not followed; their
lines are read one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(\[@\])?(?::?[-=]([^{}]*))?\})")
_SUM = re.compile(r"[\d\s+*/()-]+")
_ENDS = frozenset("\n;&|")
_KEYWORDS = {"export", "declare", "local", "readonly", "then", "do", "else"}

Value = str | list[str]


def commands(text: str, environment: Mapping[str, str] | None = None) -> Iterator[list[str]]:
    """Yield the words of each command, assignments left out.

    Args:
        environment: variables that are known before the first line.
    """
    variables: dict[str, Value] = dict(environment or {})
    for words in _Scanner(text, variables):
        rest = list(words)
        while rest and rest[0] in _KEYWORDS:
            del rest[0]
        while rest and isinstance(rest[0], str) and (match := _ASSIGNMENT.fullmatch(rest[0])):
            del rest[0]
            value: Value = match[3]
            if rest and isinstance(rest[0], list):
                value = rest.pop(0)
            _assign(variables, match[1], value, appends=bool(match[2]))
        flat = [word for word in rest if isinstance(word, str)]
        if flat:
            yield flat


def _assign(variables: dict[str, Value], name: str, value: Value, *, appends: bool) -> None:
    old = variables.get(name)
    if appends and isinstance(old, list) and isinstance(value, list):
        variables[name] = [*old, *value]
    elif appends and isinstance(old, str) and isinstance(value, str):
        variables[name] = old + value
    else:
        variables[name] = value


class _Scanner:
    """Splits a script into commands; an array `( a b )` comes as a list after its `NAME=`."""

    def __init__(self, text: str, variables: Mapping[str, Value]) -> None:
        self._text = text.replace("\\\r\n", "").replace("\\\n", "")
        self._variables = variables
        self._at = 0

    def __iter__(self) -> Iterator[list[str | list[str]]]:
        words: list[str | list[str]] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in _ENDS:
                self._at += 1
                if words:
                    yield words
                words = []
            elif character.isspace():
                self._at += 1
            elif character == "#":
                self._skip_line()
            elif character in "<>":
                self._skip_redirection()
            elif character == "(" and words and isinstance(words[-1], str) and words[-1].endswith("="):
                words.append(self._array())
            elif character in "()":
                self._at += 1
            else:
                words += self._word()
        if words:
            yield words

    def _skip_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _skip_redirection(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in "<>& ":
            self._at += 1
        self._word()

    def _array(self) -> list[str]:
        self._at += 1
        items: list[str] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            character = self._text[self._at]
            if character == "#":
                self._skip_line()
            elif character.isspace():
                self._at += 1
            else:
                items += self._word()
        self._at += 1
        return items

    def _word(self) -> list[str]:
        """Return one word; several where it is an array that is written out."""
        found = ""
        while self._at < len(self._text):
            character = self._text[self._at]
            if character.isspace() or character in ";&|<>)":
                break
            if character == "(" and found.endswith("="):
                break
            if character == "'":
                end = self._text.find("'", self._at + 1)
                end = len(self._text) if end < 0 else end
                found += self._text[self._at + 1 : end]
                self._at = end + 1
            elif character == '"':
                array = _VARIABLE.match(self._text, self._at + 1)
                if array and array[3]:
                    self._at = array.end() + 1
                    value = self._variables.get(array[2], [])
                    return value if isinstance(value, list) else [value]
                found += self._quoted()
            elif character == "\\":
                found += self._text[self._at + 1 : self._at + 2]
                self._at += 2
            elif character == "$":
                found += self._dollar()
            else:
                found += character
                self._at += 1
        return [found]

    def _quoted(self) -> str:
        self._at += 1
        found = ""
        while self._at < len(self._text) and self._text[self._at] != '"':
            character = self._text[self._at]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                found += self._text[self._at + 1]
                self._at += 2
            elif character == "$":
                found += self._dollar()
            else:
                found += character
                self._at += 1
        self._at += 1
        return found

    def _dollar(self) -> str:
        """Return what stands for `$NAME`, `${NAME:-default}`, `$((sum))` or, as it is written, `$(command)`."""
        if self._text.startswith("$(", self._at):
            return self._parentheses()
        match = _VARIABLE.match(self._text, self._at)
        if match is None:
            self._at += 1
            return "$"
        self._at = match.end()
        name = match[1] or match[2]
        value = self._variables.get(name)
        if value is None or (value == "" and match[4] is not None):
            return self._filled(match[4]) if match[4] is not None else match[0]
        return value if isinstance(value, str) else " ".join(value)

    def _parentheses(self) -> str:
        depth, start = 0, self._at
        while self._at < len(self._text):
            character = self._text[self._at]
            depth += (character == "(") - (character == ")")
            self._at += 1
            if character == ")" and depth == 0:
                break
        whole = self._text[start : self._at]
        if not whole.startswith("$(("):
            return whole
        terms = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: str(self._variables.get(name[1], name[0])), whole[3:-2])
        return _computed(terms) or whole

    def _filled(self, text: str) -> str:
        """Fill in the variables of a default."""
        return _VARIABLE.sub(lambda match: str(self._variables.get(match[1] or match[2], match[0])), text)


def _computed(terms: str) -> str | None:
    """Return the value of a sum of whole numbers as the shell computes it."""
    if not _SUM.fullmatch(terms):
        return None
    tokens = re.findall(r"\d+|[-+*/()]", terms)
    try:
        value, rest = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return None if rest else str(value)


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        sign = 1 if rest[0] == "+" else -1
        term, rest = _product(rest[1:])
        value += sign * term
    return value, rest


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _factor(tokens)
    while rest and rest[0] in "*/":
        operator = rest[0]
        factor, rest = _factor(rest[1:])
        value = value * factor if operator == "*" else value // factor
    return value, rest


def _factor(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:])
        if rest[0] != ")":
            raise ValueError(f"a parenthesis is open before {rest[0]}")
        return value, rest[1:]
    return int(tokens[0]), tokens[1:]
