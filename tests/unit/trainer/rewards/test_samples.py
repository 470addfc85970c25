"""Samples of responses: which rows, what is written, how much at most."""

import json
from pathlib import Path

import pytest
import torch

from ppojob_trainer.protocol import DataProto, Keys, Ragged, rollout_batch
from ppojob_trainer.rewards.samples import MAX_TEXT, Sample, SampleLog, samples_of


class _Decoder:
    """Every token is a letter."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["".join(chr(97 + token) for token in sequence) for sequence in sequences]


def _batch(rows: int) -> tuple[DataProto, Ragged]:
    """Rows with the prompt `ab`, a response of row + 1 letters `c`, and the score row / 2 on the last token."""
    batch = DataProto.from_dict(
        rollout_batch([[0, 1]] * rows, [[2] * (row + 1) for row in range(rows)]),
        {
            Keys.SOURCE: ["mine"] * rows,
            Keys.DATA_SOURCE: ["products"] * rows,
            Keys.GROUND_TRUTH: ["42"] * rows,
            Keys.INDEX: list(range(100, 100 + rows)),
            Keys.SAMPLE_INDEX: [0] * rows,
        },
    )
    return batch, Ragged.from_rows([[0.0] * row + [row / 2] for row in range(rows)], torch.float32)


def test_samples_are_taken_at_equal_distances() -> None:
    batch, scores = _batch(8)

    found = samples_of(batch, scores, _Decoder(), 2, [{"row": row} for row in range(8)])

    assert found == [
        Sample("mine", "products", 100, 0, "ab", "c", "42", 0.0, {"row": "0"}),
        Sample("mine", "products", 104, 0, "ab", "ccccc", "42", 2.0, {"row": "4"}),
    ]


def test_responses_without_a_score_come_first() -> None:
    batch, scores = _batch(8)
    extras: list[dict[str, str]] = [{} for _ in range(8)]
    extras[5] = {"error": "the reward function raised KeyError for prompt 105"}

    found = samples_of(batch, scores, _Decoder(), 3, extras)

    assert [sample.index for sample in found] == [105, 100, 102]
    assert found[0].extras == {"error": "the reward function raised KeyError for prompt 105"}
    extras = [{"error": "x"}] * 8
    assert [sample.index for sample in samples_of(batch, scores, _Decoder(), 3, extras)] == [100, 101, 102]


@pytest.mark.parametrize(("number", "rows"), [(0, 0), (3, 3), (4, 4), (9, 4)])
def test_no_more_samples_than_rows(number: int, rows: int) -> None:
    batch, scores = _batch(4)

    assert len(samples_of(batch, scores, _Decoder(), number)) == rows


def test_a_long_text_is_cut() -> None:
    batch, scores = _batch(1)
    batch = batch.with_fields(rollout_batch([[0] * (MAX_TEXT + 5)], [[2]]))

    (sample,) = samples_of(batch, scores, _Decoder(), 1)

    assert len(sample.prompt) == MAX_TEXT


def test_samples_go_to_the_file_and_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    sample = Sample("mine", "products", 7, 1, "what is [red]6 x 7?", "42\n", "42", 1.0)

    log.write([sample], phase="reward", step=3)
    log.write([sample], phase="testing", step=4)

    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phase"], line["response"], line["score"]) for line in lines] == [
        (3, "reward", "42\n", 1.0),
        (4, "testing", "42\n", 1.0),
    ]
    printed = capsys.readouterr().out
    assert "samples of step 3, reward" in printed
    assert "what is [red]6 x 7?" in printed, "a text is not markup"


def test_a_terminal_obeys_no_response(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SampleLog(tmp_path / "samples.jsonl").write(
        [Sample("", "p", 7, 1, "p", "a\x1b[2Jb\x07", "42", 1.0)], phase="r", step=3
    )

    assert "a·[2Jb·" in capsys.readouterr().out
    assert json.loads((tmp_path / "samples.jsonl").read_text())["response"] == "a\x1b[2Jb\x07"


def test_the_file_is_bounded(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl", max_bytes=500)
    for step in range(1, 20):
        log.write([Sample("mine", "products", 7, 1, "p" * 100, "r", "42", 1.0)], phase="reward", step=step)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["samples.1.jsonl", "samples.jsonl"]
    assert all(file.stat().st_size < 1000 for file in tmp_path.iterdir())
    assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[-1])["step"] == 19


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples.jsonl").mkdir()

    SampleLog(tmp_path / "samples.jsonl").write([], phase="reward", step=1)

    assert "the samples of step 1 are not in" in caplog.text
