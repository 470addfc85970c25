"""Some responses with prompt and score, for people: `samples.jsonl` in the job's folder, and a table in the log.

The data's process writes them, because no reward worker may have scored enough of them: it fetches these rows alone,
so no text goes through the controller. A run that resumes does the steps after its checkpoint again, and writes them
again: the last lines of a step count.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ppojob_trainer.protocol import DataProto, Keys, Ragged
from ppojob_trainer.rewards.batch import Decoder

__all__ = ["Sample", "SampleLog", "sampled_rows", "samples_of"]

logger = logging.getLogger(__name__)

MAX_TEXT = 8_000
MAX_FILE_BYTES = 64 * 1024**2
"""Then the file is renamed to `samples.1.jsonl`, in the place of an older one."""

_SHOWN = 400
_TABLE_WIDTH = 150


@dataclass(frozen=True)
class Sample:
    """A response. The texts are whole token sequences, special tokens too, cut to 8000 characters.

    source: name of the prompt's source in `data.train.mixture`, else empty. index: the prompt's row in its source.
    """

    source: str
    data_source: str
    index: int
    sample: int
    prompt: str
    response: str
    ground_truth: str
    score: float
    extras: Mapping[str, str] = field(default_factory=dict)


class SampleLog:
    """Writes samples. A full disk is logged and stops nothing."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def write(self, samples: Sequence[Sample], *, phase: str, step: int) -> None:
        """Append the samples of a step's phase (`reward`, `testing`) to the file, and print them."""
        title = f"samples of step {step}, {phase}"
        Console(width=_TABLE_WIDTH, highlight=False, markup=False).print(_table(title, samples))
        lines = [json.dumps({"step": step, "phase": phase, **asdict(sample)}) + "\n" for sample in samples]
        try:
            if self._path.exists() and self._path.stat().st_size > self._max_bytes:
                self._path.replace(self._path.with_suffix(f".1{self._path.suffix}"))
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            logger.warning("the samples of step %d are not in %s: %s", step, self._path, error)


def sampled_rows(num_rows: int, number: int, failed: Sequence[int] = ()) -> list[int]:
    """Return `number` rows of a batch, or all where there are not as many.

    Those of `failed` come first; the others are at equal distances.
    """
    number = max(0, min(number, num_rows))
    spaced = [row * num_rows // number for row in range(number)]
    return [*failed, *(row for row in spaced if row not in failed)][:number]


def samples_of(
    batch: DataProto, scores: Ragged, decoder: Decoder, number: int, extras: Sequence[Mapping[str, Any]] = ()
) -> list[Sample]:
    """Return `number` rows of the batch, or all where there are not as many.

    Rows that the reward function did not score (`error` in their extras) come first; the others are at equal distances.

    Args:
        scores: their sum over a row is the response's score.
        extras: what the reward function returned beside each score; empty for none.
    """
    rows = sampled_rows(len(batch), number, [row for row, extra in enumerate(extras) if "error" in extra])
    if not rows:
        return []
    shown = batch[rows]
    prompts = decoder.batch_decode(shown.prompts().to_lists())
    # All tokens, because the mask of a dropped response is 0.
    responses = decoder.batch_decode(shown.responses().to_lists())
    totals = scores.sums().tolist()
    return [
        Sample(
            str(batch.array(Keys.SOURCE)[row]),
            str(batch.array(Keys.DATA_SOURCE)[row]),
            int(batch.array(Keys.INDEX)[row]),
            int(batch.array(Keys.SAMPLE_INDEX)[row]),
            prompt[:MAX_TEXT],
            response[:MAX_TEXT],
            str(batch.array(Keys.GROUND_TRUTH)[row])[:MAX_TEXT],
            totals[row],
            {str(name): str(value)[:_SHOWN] for name, value in (extras[row] if len(extras) else {}).items()},
        )
        for row, prompt, response in zip(rows, prompts, responses, strict=True)
    ]


def _table(title: str, samples: Sequence[Sample]) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("score", justify="right", no_wrap=True)
    for name, ratio in (("prompt", 4), ("response", 4), ("ground truth", 1)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for sample in samples:
        # The end of a prompt is its question.
        prompt = sample.prompt if len(sample.prompt) <= _SHOWN else f"...{sample.prompt[-_SHOWN:]}"
        response = sample.response if len(sample.response) <= _SHOWN else f"{sample.response[:_SHOWN]}..."
        texts = map(_printable, (prompt, response, sample.ground_truth[:_SHOWN]))
        table.add_row(f"{sample.score:.3f}", *texts)
    return table


def _printable(text: str) -> str:
    """Put a dot in the place of what a terminal would obey: a policy writes any bytes, escape sequences too."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
