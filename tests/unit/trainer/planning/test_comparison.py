"""The stored comparison is of the runs as they are written down; computed again, it is the same."""

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ppojob_trainer.main.memory_fit import KNOWN_ERROR, KNOWN_ERROR_OF_EXPERTS
from ppojob_trainer.planning import comparison, report
from ppojob_trainer.planning.comparison import Compared, stored, timed_runs
from ppojob_trainer.planning.measured_runs import RUNS


def test_every_measured_number_is_compared() -> None:
    measured = [value for run in RUNS for value in (*run.pools.values(), *run.roles.values(), *run.phases.values())]
    measured += [run.step for run in RUNS if run.step is not None]
    compared, timed = stored()
    assert sorted(one.measured for one in compared) == sorted(measured)
    assert [run.seconds for run in timed] == [run.phases for run in RUNS if run.phases and run.predicts]


def test_no_run_predicts_its_own_seconds() -> None:
    predicting = [run.name for run in RUNS if run.phases and run.predicts]
    timed = dict(zip(predicting, timed_runs(), strict=True))
    for name, run in timed.items():
        others = comparison._others(name, timed)
        assert len(others) == len(timed) - 1
        assert not any(one is run for one in others)


def test_what_the_plan_does_not_know_predicts_nothing_else() -> None:
    (gpt_oss,) = (run for run in RUNS if not run.predicts)
    assert "gpt-oss" in gpt_oss.name
    timed = {run.name: replace(timed_runs()[0], seconds=run.phases) for run in RUNS if run.phases}
    others = comparison._others("7B-A1B, one pool of two GPUs, compiled", timed)
    assert gpt_oss.phases not in [one.seconds for one in others]
    assert len(others) == len(timed) - 2


@pytest.mark.parametrize(
    ("kind", "known"), [("memory of a pool", KNOWN_ERROR), ("memory of a pool, experts", KNOWN_ERROR_OF_EXPERTS)]
)
def test_the_known_errors_are_those_of_the_measured_pools(kind: str, known: float) -> None:
    more = max(one.measured / one.planned - 1 for one in stored()[0] if one.kind == kind)
    assert math.ceil(100 * more) / 100 == known


PAGE = Path(__file__).parents[4] / "docs" / "plan.md"
_OF_A_ROLE = "memory of one role"
ROWS: dict[str, Callable[[Compared], bool]] = {
    "peak memory of one role, layers not compiled": lambda one: one.kind == _OF_A_ROLE and "compiled" not in one.run,
    "peak memory of one role, compiled": lambda one: one.kind == _OF_A_ROLE and "compiled" in one.run,
    "memory of a pool, all processes": lambda one: one.kind == "memory of a pool",
    "seconds of forward passes and updates": lambda one: one.kind == "seconds of a forward pass or an update",
    "seconds of a step": lambda one: one.kind == "seconds of a step",
    "seconds of generation": lambda one: one.kind == "seconds of generation",
    "seconds of sending the weights": lambda one: one.kind == "seconds of sending the weights",
    "mixture of experts: peak memory of one role": lambda one: one.kind == f"{_OF_A_ROLE}, experts",
    "mixture of experts: memory of a pool, all processes": lambda one: one.kind == "memory of a pool, experts",
    "mixture of experts: seconds of forward passes and updates": lambda one: (
        one.kind == "seconds of a forward pass or an update, experts"
    ),
    "mixture of experts: seconds of a step": lambda one: one.kind == "seconds of a step, experts",
    "mixture of experts: seconds of generation": lambda one: one.kind == "seconds of generation, experts",
    "mixture of experts: seconds of sending the weights": lambda one: (
        one.kind == "seconds of sending the weights, experts"
    ),
}


def test_the_page_has_a_row_for_each_number() -> None:
    assert all(sum(is_of(one) for is_of in ROWS.values()) == 1 for one in stored()[0])


@pytest.mark.parametrize("row", ROWS)
def test_the_page_has_the_errors(row: str) -> None:
    errors = [one.error for one in stored()[0] if ROWS[row](one)]
    bounds = dict.fromkeys(round(100 * error) for error in (min(errors), max(errors)))
    words = " to ".join(f"{bound:+d} %" if bound else "0 %" for bound in bounds)
    assert f"| {row} | {words} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("planned", "words"),
    [((97.0, 116.0), "-3% to +16%"), ((97.0,), "-3%"), ((97.2, 96.8), "-3%"), ((100.1, 99.9), "+0%")],
)
def test_the_report_has_a_range_only_if_its_ends_differ(planned: Sequence[float], words: str) -> None:
    printed = io.StringIO()

    Console(file=printed, width=120).print(
        report._ranges([Compared("run", "step", "s", 100.0, one) for one in planned])
    )

    assert re.split(r" {2,}", printed.getvalue().splitlines()[1].strip()) == [
        "seconds of a step",
        words,
        str(len(planned)),
    ]


def test_a_small_run_computed_again_has_the_stored_plan() -> None:
    run = next(one for one in RUNS if one.name == "135 M, update, checkpointing")
    (again,) = comparison.compare({run.name: comparison.plan_of(run)})
    assert again in stored()[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
# torch traces the sinks of gpt-oss.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_all_runs_computed_again_have_the_stored_plans() -> None:
    assert json.loads(comparison.computed()) == json.loads(comparison.FILE.read_text(encoding="utf-8"))
