"""The stored comparison is of the runs as they are written down; computed again, it is the same."""

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from ppojob_trainer.planning import comparison, report
from ppojob_trainer.planning.comparison import Compared, stored, timed_runs
from ppojob_trainer.planning.measured_runs import RUNS
from ppojob_trainer.planning.pool import KNOWN_ERROR, KNOWN_ERROR_OF_EXPERTS


def test_every_measured_number_is_compared() -> None:
    measured = [value for run in RUNS for value in (*run.pools.values(), *run.roles.values(), *run.phases.values())]
    measured += [run.step for run in RUNS if run.step is not None]
    compared, timed = stored()
    assert sorted(one.measured for one in compared) == sorted(measured)
    assert [run.seconds for run in timed] == [run.phases for run in RUNS if run.phases]


def test_a_mixture_has_its_own_rate_for_all_but_generation() -> None:
    compared = [one for one in stored()[0] if one.unit == "s"]
    assert {one.run for one in compared if one.is_own_rate} == {run.name for run in RUNS if "experts" in run.name}
    assert all(one.is_own_rate == ("experts" in one.run and one.what != "gen") for one in compared)
    # One rate for all phases cannot agree with each.
    errors = [abs(one.error) for one in compared if one.is_own_rate and one.what in _COMPUTED]
    assert 0.01 < max(errors) < 0.3


def test_no_run_predicts_itself_but_the_only_mixture_of_experts() -> None:
    names = [run.name for run in RUNS if run.phases]
    timed = dict(zip(names, timed_runs(), strict=True))
    mixtures = [name for name in names if timed[name].workload.has_experts]
    assert len(mixtures) == 2
    for name in names:
        others, own = comparison._others(name, timed)
        assert not any(one is timed[name] for one in others)
        assert bool(own) == (name in mixtures)
        assert len(others) == len(names) - (0 if own else 1)
        assert "gen" not in own
        if own:
            assert others[-1].seconds == {phase: timed[name].seconds[phase] for phase in own - {"step"}}
    assert [comparison._others(name, timed)[1] for name in mixtures] == [
        {"old_log_prob", "ref", "update_actor", "update_weights", "step"},
        {"update_weights", "step"},
    ]


@pytest.mark.parametrize(
    ("kind", "known"), [("memory of a pool", KNOWN_ERROR), ("memory of a pool, experts", KNOWN_ERROR_OF_EXPERTS)]
)
def test_the_known_errors_are_those_of_the_measured_pools(kind: str, known: float) -> None:
    more = max(one.measured / one.planned - 1 for one in stored()[0] if one.kind == kind)
    assert math.ceil(100 * more) / 100 == known


PAGE = Path(__file__).parents[4] / "docs" / "plan.md"
_COMPUTED = {"old_log_prob", "values", "ref", "update_critic", "update_actor"}
ROWS: dict[str, Callable[[Compared], bool]] = {
    "peak memory of one role, layers not compiled": lambda one: (
        one.unit == "GB" and "compiled" not in one.run and not one.what.startswith("pool")
    ),
    "peak memory of one role, compiled": lambda one: (
        one.unit == "GB" and "compiled" in one.run and not one.what.startswith("pool")
    ),
    "memory of a pool, all processes": lambda one: one.kind == "memory of a pool",
    "mixture of experts: memory of a pool, all processes": lambda one: one.kind == "memory of a pool, experts",
    "seconds of forward passes and updates": lambda one: (
        one.unit == "s" and one.what in _COMPUTED and not one.is_own_rate
    ),
    "seconds of a step": lambda one: one.what == "step" and not one.is_own_rate,
    "seconds of generation": lambda one: one.what == "gen",
    "seconds of sending the weights": lambda one: one.what == "update_weights" and not one.is_own_rate,
    "mixture of experts, own rate: seconds of forward passes and updates": lambda one: (
        one.is_own_rate and one.what in _COMPUTED
    ),
    "mixture of experts, own rate: seconds of a step": lambda one: one.is_own_rate and one.what == "step",
    "mixture of experts, own rate: seconds of sending the weights": lambda one: (
        one.is_own_rate and one.what == "update_weights"
    ),
}


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
def test_all_runs_computed_again_have_the_stored_plans() -> None:
    assert json.loads(comparison.computed()) == json.loads(comparison.FILE.read_text(encoding="utf-8"))
