"""Strings that end a response, found from token ids, so that no text has to be made while a response grows.

vLLM looks for stop strings in the text, which its front end makes token by token; so each token of each response
becomes a message of the scheduler. Here `ResponseScheduler` looks for them itself, as cheaply as for a stop token:

* the text of a token is fixed, so only few tokens can complete a string: those that contain it, and those that begin
  with an end of it. For "</a>" they are "</a>...", "/a>...", "a>...", ">...";
* when one of them is sampled, the bytes of the last tokens say whether the string is complete.

The result is vLLM's (`BaseIncrementalDetokenizer`): special tokens have no text, the string that is complete first ends
the response, the response keeps the token that completes it, and `stop_reason` is the string. One difference: if a
token completes a string and begins a letter of several bytes, vLLM waits for the rest of the letter. It holds for
tokenizers whose text is the bytes of the tokens one after the other (`is_known`); for others, vLLM looks for the
strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

STOP_STRINGS: Final = "ppojob_stop_strings"
"""Key of the strings in the `extra_args` of vLLM's sampling parameters."""

_SPACE: Final = "\u2581"
_STEPS: Final[dict[str, dict[str, Any]]] = {
    "Replace": {"pattern": {"String": _SPACE}, "content": " "},
    "ByteFallback": {},
    "Fuse": {},
    "Strip": {"stop": 0},
}
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class StopStrings:
    """The strings of one request.

    Args:
        stops: not empty.
        texts: of each token, see `token_texts`.
    """

    def __init__(self, stops: Sequence[str], texts: Sequence[bytes]) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._texts = texts
        self._longest = max(map(len, self._stops))
        ends = tuple({stop[start:] for stop in self._stops for start in range(len(stop))})
        self._completing = frozenset(
            token
            for token, text in enumerate(texts)
            if text.startswith(ends) or any(stop in text for stop in self._stops)
        )

    def may_be_ended_by(self, token: int) -> bool:
        """Whether a token completes a string after some other tokens."""
        return token in self._completing

    def ended_by(self, tokens: Sequence[int]) -> str | None:
        """Return the string that the last token of a response completes.

        Args:
            tokens: of the response, of which no shorter part completes a string; not empty.
        """
        last = tokens[-1]
        if not self.may_be_ended_by(last):
            return None
        texts, length = [self._texts[last]], 0
        for position in range(len(tokens) - 2, -1, -1):
            if length >= self._longest:
                break
            text = self._text(tokens[position])
            texts.append(text)
            length += len(text)
        tail = b"".join(reversed(texts))
        # Of strings that are complete at the same place, the first.
        found = [(start + len(stop), stop) for stop in self._stops if (start := tail.find(stop)) >= 0]
        return min(found, key=lambda one: one[0])[1].decode() if found else None

    def _text(self, token: int) -> bytes:
        return self._texts[token] if token < len(self._texts) else b""


def is_known(tokenizer: Any) -> bool:
    """Whether the text of a tokenizer's tokens is that of each token, one after the other."""
    return _kind(tokenizer) is not None


def token_texts(tokenizer: Any) -> list[bytes]:
    """Return the text of each token in UTF-8, of which a token may have a part; that of special tokens is empty.

    Args:
        tokenizer: transformers', for which `is_known`.
    """
    backend = tokenizer.backend_tokenizer
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    texts = [b""] * (max(vocabulary.values()) + 1)
    text_of = _byte_level if _kind(tokenizer) == "ByteLevel" else _with_byte_tokens
    for token, number in vocabulary.items():
        if number not in special:
            texts[number] = text_of(token)
    return texts


def _kind(tokenizer: Any) -> str | None:
    """Return which decoder a tokenizer has: bytes as letters, or spaces as a letter and bytes as tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    found = json.loads(backend.decoder.__getstate__())
    if found["type"] == "ByteLevel":
        return "ByteLevel"
    if found["type"] != "Sequence":
        return None
    steps = [_step(one) for one in found["decoders"]]
    # The strip is of the first token of a text, which is the prompt's.
    is_known = steps[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[3:] in ([], ["Strip"])
    return "ByteFallback" if is_known else None


def _step(decoder: dict[str, Any]) -> str | None:
    """Return the kind of a decoder's step, if it does what is expected of this kind."""
    kind = str(decoder["type"])
    expected = _STEPS.get(kind)
    return kind if expected is not None and expected.items() <= decoder.items() else None


def _byte_level(token: str) -> bytes:
    # As the decoder, which takes a token with any other letter for plain text.
    values = [_BYTE_OF_LETTER.get(letter) for letter in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


def _with_byte_tokens(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level tokens, those of GPT-2 (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(0x100) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(0x100 + number): value for number, value in enumerate(others)
    }


_BYTE_OF_LETTER: Final = _bytes_of_letters()
