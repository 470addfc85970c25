"""What the words of a script are, as far as they can be known without running it."""

import pytest

from ppojob_trainer.commands.convert.shell_words import commands


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("python x.py a=1 \\\n  b=2 # the end\n", [["python", "x.py", "a=1", "b=2"]]),
        ("# nothing\n\n", []),
        ("A=1; run a=$A b=${A} c=\"$A$A\" d='$A'", [["run", "a=1", "b=1", "c=11", "d=$A"]]),
        ("run a=${B:-two} b=${B-'x'} c=$B", [["run", "a=two", "b='x'", "c=$B"]]),
        ("export N=8\nM=$((N * 2 / (1 + 3)))\nrun n=$M", [["run", "n=4"]]),
        ("run n=$((N / 0)) d=$(date +%s)", [["run", "n=$((N / 0))", "d=$(date +%s)"]]),
        (
            "P=(a=1 'b=two words' # c\n d=3)\nP+=(e=4)\nrun \"${P[@]}\" z",
            [["run", "a=1", "b=two words", "d=3", "e=4", "z"]],
        ),
        ("run a=1 > out.log 2>&1 | tee log && next b=2", [["run", "a=1", "2"], ["tee", "log"], ["next", "b=2"]]),
        ("A=x run $A", [["run", "$A"]]),
        ('run l=\'["console","wandb"]\' f="[\'a.parquet\']"', [["run", 'l=["console","wandb"]', "f=['a.parquet']"]]),
        ("run a=b\\ c", [["run", "a=b c"]]),
        ("run 'open", [["run", "open"]]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_words(script: str, expected: list[list[str]]) -> None:
    assert list(commands(script)) == expected


def test_variables_of_the_caller_can_be_given() -> None:
    assert list(commands("run a=$HOME/x", {"HOME": "/mine"})) == [["run", "a=/mine/x"]]
