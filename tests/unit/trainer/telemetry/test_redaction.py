"""A secret is found in every form in which it is printed, and nothing else waits for it."""

import pytest

from ppojob_trainer.telemetry.redaction import Redactor, redacted

PEM = "-----BEGIN KEY-----\nMIIEvAIBADAN\nBg==\n-----END KEY-----"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing of that kind", "nothing of that kind"),
        ("hunter2 and hunter2", "[redacted] and [redacted]"),
        ("hunter22", "[redacted]"),
        ('{"password": "say \\"friend\\""}', '{"password": "[redacted]"}'),
        ("MIIEvAIBADAN", "[redacted]"),
        (f"key: {PEM!r}", "key: '[redacted]'"),
        ("Bg==", "Bg=="),
        ("clé ouverte", "[redacted] ouverte"),
    ],
)
def test_a_secret_is_taken_out(text: str, expected: str) -> None:
    assert redacted(text, ["hunter2", "hunter22", 'say "friend"', PEM, "clé"]) == expected


def test_a_secret_in_pieces_is_taken_out_and_the_rest_does_not_wait() -> None:
    redactor = Redactor(["hunter2"])

    written = [redactor.feed(piece) for piece in (b"step 3: h", b"unt", b"er2, hunt", b"ing")]

    assert written == [b"step 3: ", b"", b"[redacted], ", b"hunting"]
    assert redactor.feed(b"progress 50%") == b"progress 50%", "a line that has not ended is shown"
    assert redactor.feed(b" hunt") + redactor.end() == b" hunt"


def test_without_secrets_a_text_stays_as_it_is() -> None:
    assert redacted("words", []) == "words"
