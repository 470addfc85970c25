"""Writes train.parquet and validation.parquet with small word problems, in the form of GSM8K's rows.

    python make_data.py FOLDER

A row has the columns `question` and `answer`. The answer ends with `#### ` and the number, as in GSM8K.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ("Amina", "Ben", "Chloe", "Diego", "Emma", "Farid", "Grace", "Hiro")
THINGS = ("apples", "books", "coins", "pencils", "shells", "stamps")


def problems(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield problems with one addition, subtraction or multiplication of numbers from 1 to 9."""
    draw = random.Random(seed)
    for _ in range(count):
        name, thing = draw.choice(NAMES), draw.choice(THINGS)
        small, large = sorted((draw.randint(1, 9), draw.randint(1, 9)))
        kind = draw.choice(("add", "subtract", "multiply"))
        if kind == "add":
            text = f"{name} has {large} {thing} and gets {small} more. How many {thing} does {name} have?"
            working, result = f"{large} + {small}", large + small
        elif kind == "subtract":
            text = f"{name} has {large} {thing} and gives {small} away. How many {thing} are left?"
            working, result = f"{large} - {small}", large - small
        else:
            text = f"{name} has {large} boxes with {small} {thing} each. How many {thing} are there?"
            working, result = f"{large} * {small}", large * small
        yield {"question": text, "answer": f"{working} = {result}\n#### {result}"}


def main(folder: Path) -> None:
    """Write both files into a folder."""
    for name, count, seed in (("train", 2048, 1), ("validation", 32, 2)):
        path = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(list(problems(count, seed))), path)
        sys.stdout.write(f"{path}: {count} rows\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
