"""A script is read without bash where nothing in it decides anything; otherwise its line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppojob_trainer.commands.convert.scripts.bash_run import Script
from ppojob_trainer.commands.convert.scripts.straight_line import read_straight
from ppojob_trainer.commands.manifest import ManifestError


def words_of(folder: Path, text: str, *arguments: str) -> list[list[str]]:
    script = folder / "run.sh"
    script.write_text(text)
    return [list(call.words) for call in read_straight(Script(script, arguments, {"GIVEN": "here"})).calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python x.py a=1 \\\n  b=2 # the end\n", [["python", "x.py", "a=1", "b=2"]]),
        ("# nothing\n\n", []),
        ("A=1; run a=$A b=${A} c=\"$A$A\" d='$A'", [["run", "a=1", "b=1", "c=11", "d=$A"]]),
        ('run "x $GIVEN  ${GIVEN} \\$5"', [["run", "x here  here $5"]]),
        ("run a=${B:-two} b=${B-'x'} c=${GIVEN:-no}", [["run", "a=two", "b=x", "c=here"]]),
        ("export N=8 M=2\nM=$((N * 2 / (1 + 3)))\nrun n=$M", [["run", "n=4"]]),
        (
            "P=(a=1 'b=two words' # c\n d=3)\nP+=(e=4)\nrun \"${P[@]}\" z",
            [["run", "a=1", "b=two words", "d=3", "e=4", "z"]],
        ),
        ("A=x\nA+=y\nrun $A", [["run", "xy"]]),
        ('A="one two"\nrun $A "$A"', [["run", "one", "two", "one two"]]),
        ("run a=1 > out.log 2>&1 | tee log", [["run", "a=1"], ["tee", "log"]]),
        ("A=x run $GIVEN &", [["run", "here"]]),
        ('run l=\'["console","wandb"]\' f="[\'a.parquet\']"', [["run", 'l=["console","wandb"]', "f=['a.parquet']"]]),
        ("run a=b\\ c {x:1}", [["run", "a=b c", "{x:1}"]]),
        ("run $1 $HOME/m", [["run", "first", "$HOME/m"]]),
        ('run "$@"', [["run", "first", "second"]]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_words(text: str, expected: list[list[str]], tmp_path: Path) -> None:
    assert words_of(tmp_path, text, "first", "second") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "N=8\nif [ $N = 8 ]; then\n B=1024\nelse\n B=16\n O=True\nfi",
            r"run.sh:2: an if \(line 3: B=1024; line 5: B=16; line 6: O=True\)",
        ),
        ("case $1 in\n npu) B=16;;\n *) B=64;;\nesac", r"run.sh:1: a case \(line 2: B=16; line 3: B=64\)"),
        ("\n[ -f env.sh ] && source env.sh", r"run.sh:2: a branch \(&& or \|\|\)"),
        ("for n in 1 2; do run $n; done", "run.sh:1: a loop"),
        ("run() { python x.py; }", "run.sh:1: a function"),
        ("run d=$(date +%s)", "run.sh:1: the output of a command"),
        ("run n=$((N / 0))", "run.sh:1: "),
        ("run ${A%%.*}", r"run.sh:1: `\$\{A%%"),
        ("run\nrun $MISSING", "run.sh:2: MISSING is not set in the script: give it with --env MISSING=VALUE"),
        ("run 'open", "run.sh:1: "),
    ],
)
def test_what_only_bash_knows_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=message):
        words_of(tmp_path, text)
