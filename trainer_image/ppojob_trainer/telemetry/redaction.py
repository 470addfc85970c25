"""Removes secrets from a process's output; as a program it is a `tee` that does so.

    python -I -S redaction.py FILE     with the secrets in the environment, where other processes cannot see them

`logs.py` starts it. It uses only the standard library, because it is started without a path to other packages.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

SECRETS_VARIABLE = "PPOJOB_LOG_SECRETS"
REDACTED = "[redacted]"

_CHUNK = 65_536
_MIN_LINE = 6


class Redactor:
    """Replaces secrets in a stream of bytes, also where one comes in two pieces."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form.encode() for secret in secrets for form in _forms(secret)}
        # The longest first, because one may be a prefix of another.
        self._forms = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms)) or rb"(?!)")
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that can be written now; a possible beginning of a secret is held back."""
        text = self._pattern.sub(REDACTED.encode(), self._held + data)
        longest = min(len(text), len(self._forms[0]) - 1 if self._forms else 0)
        length = next((n for n in range(longest, 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]

    def end(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return held

    def _may_begin(self, text: bytes) -> bool:
        return any(form.startswith(text) for form in self._forms)


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return a text without the secrets."""
    redactor = Redactor(secrets)
    return (redactor.feed(text.encode()) + redactor.end()).decode()


def _forms(secret: str) -> list[str]:
    """Return how a secret may be printed: as it is, in JSON or a `repr`, and line by line."""
    lines = [line for line in secret.splitlines() if len(line) >= _MIN_LINE]
    return [secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], *lines]


def _copy(path: str) -> None:
    redactor = Redactor(json.loads(os.environ.pop(SECRETS_VARIABLE)))
    with Path(path).open("ab", buffering=0) as copy:
        while data := os.read(0, _CHUNK):
            _write(redactor.feed(data), sys.stdout.buffer, copy)
        _write(redactor.end(), sys.stdout.buffer, copy)


def _write(data: bytes, *streams: BinaryIO) -> None:
    for stream in streams:
        # As with tee: if one of the two outputs fails, the other continues.
        with contextlib.suppress(OSError):
            stream.write(data)
            stream.flush()


if __name__ == "__main__":
    _copy(sys.argv[1])
