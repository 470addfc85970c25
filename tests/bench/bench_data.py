"""Memory and seconds until the first batch of a large file: prepared in the storage, beside rows in memory.

    python -m tests.bench.bench_data --rows 1000000 --format parquet --workers 2

Rows have GSM8K's shape (about 235 characters of question and 290 of answer) and are generated on the spot. Each
measurement is a process of its own:

    before   the whole file is read into memory, the first 20,000 prompts are tokenized, the order is a list. This is
             what the trainer did earlier; the code is here only
    first    the file is prepared in the storage and read through a memory map; all prompts are tokenized
    again    the same job starts again, and finds the prepared data

Anonymous memory is what counts against a pod's limit; the kernel can drop mapped pages. Ratios hold within one run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppojob_api.v1alpha1.data import Columns, DataSource
from ppojob_trainer.data import Preparation, PromptDataset, PromptLoader, PromptTokenizer, TableCache, WeightedDataset
from ppojob_trainer.data.records import record_from_row
from ppojob_trainer.protocol import Keys

_COLUMNS = {"promptColumn": "question", "groundTruthColumn": "answer", "dataSource": "openai/gsm8k"}
_BATCH, _LONGEST, _CHECKED, _SEED = 256, 512, 20_000, 1
_QUESTION_WORDS, _ANSWER_WORDS, _VOCABULARY = 43, 53, 4000
_ROWS_AT_A_TIME = 20_000
_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


def main() -> None:
    """Generate the rows, measure each way, print the table."""
    arguments = _arguments()
    if arguments.measure:
        print(json.dumps(_measured(arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        path = _generate(Path(folder), arguments.rows, arguments.format)
        megabytes = path.stat().st_size / 1e6
        print(f"{arguments.rows:,} rows, {arguments.format}, {megabytes:.0f} MB, {arguments.workers} processes")
        found = {way: _in_a_process(way, path, arguments) for way in ("before", "first", "again")}
        prepared = sum(file.stat().st_size for file in Path(folder, "cache").iterdir()) / 1e6
        print(f"prepared in the storage: {prepared:.0f} MB")
    print(f"{'':8}{'seconds':>10}{'anonymous MB':>15}{'of before':>11}{'all MB':>9}")
    for way, one in found.items():
        share = one["anonymous"] / found["before"]["anonymous"]
        print(f"{way:8}{one['seconds']:10.1f}{one['anonymous']:15.0f}{share:11.2f}{one['all']:9.0f}")
    batches = {tuple(one["batch"]) for one in found.values()}
    print(f"first batches are equal: {'yes' if len(batches) == 1 else 'NO'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--workers", type=int, default=2, help="as trainer.dataWorkers")
    parser.add_argument("--measure", choices=("before", "first", "again"), help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _generate(folder: Path, rows: int, kind: str) -> Path:
    words = [f"{_word(number)}" for number in range(_VOCABULARY)]
    model = folder / "model"
    model.mkdir()
    known = {word: number for number, word in enumerate(["<unk>", "user", "assistant", *words])}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(model)
    path = folder / f"train.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for table in _tables(words, rows):
                file.writelines(f"{json.dumps(row)}\n" for row in table.to_pylist())
        return path
    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in _tables(words, rows):
            writer.write_table(table)
    return path


def _word(number: int) -> str:
    letters = random.Random(number)
    return "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(2, 7)))


def _tables(words: list[str], rows: int) -> Iterator[pa.Table]:
    draw = random.Random(_SEED)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        count = min(_ROWS_AT_A_TIME, rows - start)
        texts = {
            name: [" ".join(draw.choices(words, k=draw.randint(length // 2, length * 3 // 2))) for _ in range(count)]
            for name, length in (("question", _QUESTION_WORDS), ("answer", _ANSWER_WORDS))
        }
        yield pa.table(texts)


def _in_a_process(way: str, path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.bench_data", "--measure", way, "--path", str(path)]
    command += ["--format", arguments.format, "--workers", str(arguments.workers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    memory = _Memory()
    start = time.monotonic()
    batch = (_before if arguments.measure == "before" else _prepared)(arguments)
    return {"seconds": time.monotonic() - start, **memory.stop(), "batch": batch}


def _prepared(arguments: argparse.Namespace) -> list[int]:
    path: Path = arguments.path
    model = path.parent / "model"
    source = DataSource.model_validate({"files": {"paths": [str(path)], **_COLUMNS}})
    cache = TableCache(path.parent / "cache", "bench")
    preparation = Preparation(source, str(model), partial(_tokenizer, model), cache=cache, workers=arguments.workers)
    prompts, tokenizer = preparation.opened()
    tokenized = preparation.tokenized(prompts, tokenizer)
    dataset = PromptDataset(prompts, tokenizer, tokenized, _LONGEST)
    loader = PromptLoader([WeightedDataset(dataset)], _BATCH, _SEED)
    return [int(index) for index in loader.next_batch().array(Keys.INDEX)]


def _before(arguments: argparse.Namespace) -> list[int]:
    path: Path = arguments.path
    if arguments.format == "parquet":
        table = pq.read_table(path, memory_map=True)
        count, row = table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0]
    else:
        rows = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
        count, row = len(rows), rows.__getitem__
    columns, tokenizer = Columns.model_validate(_COLUMNS), PromptTokenizer(_tokenizer(path.parent / "model"))

    def token_ids(indices: range | list[int]) -> list[list[int]]:
        records = [record_from_row(row(index), columns, "row", "train") for index in indices]
        return tokenizer.token_ids([tokenizer.messages(record, "row") for record in records])

    for start in range(0, min(count, _CHECKED), 1024):
        assert max(map(len, token_ids(range(start, min(start + 1024, count))))) <= _LONGEST
    order: list[int] = np.random.RandomState([_SEED, 0]).permutation(count).tolist()
    token_ids(order[:_BATCH])
    return order[:_BATCH]


def _tokenizer(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


class _Memory:
    """The peak of this process's memory in MB, sampled by a thread, above that of its start."""

    def __init__(self) -> None:
        self._start = _resident()
        self._peak = dict(self._start)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        self._ended.set()
        self._thread.join()
        return {name: self._peak[name] - self._start[name] for name in self._peak}

    def _sample(self) -> None:
        while not self._ended.wait(0.02):
            for name, value in _resident().items():
                self._peak[name] = max(self._peak[name], value)


def _resident() -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    fields = {"anonymous": "RssAnon", "all": "VmRSS"}
    return {name: int(lines[field].split()[0]) / 1e3 for name, field in fields.items()}


if __name__ == "__main__":
    main()
