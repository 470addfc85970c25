"""Scoring a batch in processes: order, concurrency, failures with their prompt, a time limit for each response."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.rewards import (
    FunctionSource,
    RewardFunctionError,
    RewardImportError,
    RewardRefusedError,
    RewardTimeoutError,
    ScoreItem,
    Scorer,
)
from ppojob_trainer.rewards.scoring import processes
from ppojob_trainer.rewards.scoring.processes import DEFAULT_CALLS
from tests.processes import left_of
from tests.unit.trainer.rewards.odd_functions import LATER_S

ODD = str(Path(__file__).with_name("odd_functions.py"))

MakeScorer = Callable[..., Scorer]


def items(*texts: str) -> list[ScoreItem]:
    return [ScoreItem("source", text, None, {}, index=100 + place) for place, text in enumerate(texts)]


def many(number: int, **special: str) -> list[ScoreItem]:
    """Responses `x`, but for those at the places `at_<place>`."""
    texts = ["x"] * number
    for place, text in special.items():
        texts[int(place.removeprefix("at_"))] = text
    return items(*texts)


@pytest.fixture
def scorer_of() -> Iterator[MakeScorer]:
    """Make and start scorers of a function in `odd_functions`; their processes end with the test."""
    made: list[Scorer] = []

    def make(name: str = "compute_score", kwargs: dict[str, Any] | None = None, **settings: Any) -> Scorer:
        made.append(Scorer(FunctionSource(path=ODD, name=name, kwargs=kwargs or {}), **settings))
        made[-1].start()
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


@pytest.mark.parametrize("concurrency", [None, 3])
def test_results_come_in_the_order_of_the_items(scorer_of: MakeScorer, concurrency: int | None) -> None:
    texts = ["sleep 0.2", *("x" * size for size in range(1, 20))]

    results = scorer_of(concurrency=concurrency).score(items(*texts))

    assert [result.score for result in results] == [len(text) for text in texts]


def test_a_plain_function_has_a_process_for_each_response_at_the_same_time(
    scorer_of: MakeScorer, tmp_path: Path
) -> None:
    # Each response waits until three processes have one, however long a busy machine takes to start them.
    scorer = scorer_of("meets", kwargs={"marks": str(tmp_path)}, concurrency=3, timeout_seconds=120)

    results = scorer.score(items(*["3"] * 6))

    assert [result.error for result in results] == [None] * 6
    assert len(list(tmp_path.iterdir())) == 3


def test_the_processes_do_not_load_torch(scorer_of: MakeScorer) -> None:
    assert scorer_of("loads_torch").score(items("x"))[0].score == 0.0


def test_a_dict_keeps_its_other_entries_as_numbers_and_text(scorer_of: MakeScorer) -> None:
    (result,) = scorer_of().score(items("return dict"))

    assert (result.score, result.error) == (1.0, None)
    assert result.extras == {"answer": "4", "size": 2, "own": "mine", "none": None}


def test_nothing_to_score(scorer_of: MakeScorer) -> None:
    assert scorer_of().score([]) == []


@pytest.mark.parametrize("settings", [{"concurrency": 0}, {"timeout_seconds": 0}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Scorer(FunctionSource(path=ODD), **settings)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "compute_score",
            "raise key",
            r"raised KeyError: 'bad' \(odd_functions.py, line \d+\) for prompt 102 of",
        ),
        ("compute_score", "raise exit", "raised SystemExit: 3"),
        ("compute_score", "exit", "the process of the reward function ended with exit code 3 for prompt 102"),
        ("compute_score", "kill", r"was ended by SIGKILL \(often because memory ran out\) for prompt 102"),
        ("compute_score", "return none", "returned None: a score is a finite number for prompt 102"),
        ("compute_score", "return text", "returned '0.5'"),
        ("compute_score", "return nan", "returned nan"),
        ("compute_score", "return infinite", "returned inf"),
        ("compute_score", "return list", r"returned \[1, 2\]"),
        ("compute_score", "return no-score", r"a dict without 'score': it has \['value'\] for prompt 102"),
        ("compute_score", "return none-score", "returned None"),
        ("judged", "raise key", "raised KeyError: 'bad'"),
        ("judged", "raise exit", "raised SystemExit: 3"),
        ("judged", "exit", "ended with exit code 3 for prompt 102"),
    ],
)
def test_a_failure_names_its_prompt_and_can_be_a_score(
    scorer_of: MakeScorer, name: str, text: str, message: str
) -> None:
    failing = many(5, at_2=text)

    with pytest.raises(RewardFunctionError, match=message) as caught:
        scorer_of(name).score(failing)
    results = scorer_of(name, on_error="Score", error_score=-1.0).score(failing)

    assert caught.value.index == 102
    assert [result.score for result in results] == [1.0, 1.0, -1.0, 1.0, 1.0]
    assert "for prompt 102" in (results[2].error or "")
    assert [result.is_dropped or result.is_timeout for result in results] == [False] * 5


def test_a_failure_can_drop_its_response(scorer_of: MakeScorer) -> None:
    results = scorer_of(on_error="Drop", error_score=-1.0).score(items("a", "raise key", "c"))

    assert [(result.score, result.is_dropped) for result in results] == [(1.0, False), (0.0, True), (1.0, False)]


def test_after_a_failed_batch_the_next_one_gets_its_own_answers(scorer_of: MakeScorer) -> None:
    scorer = scorer_of(concurrency=2)
    with pytest.raises(RewardFunctionError, match="prompt 101"):
        scorer.score(items("sleep 1", "raise key"))

    assert [result.score for result in scorer.score(items("aaa", "bb"))] == [3.0, 2.0]


class Clock:
    """In place of `time` in the parent's process: ten seconds pass with each wait in vain, and only while `runs`.

    So a busy machine exceeds no limit, however long the parent takes to hand out its work, and a limit takes no time.
    """

    def __init__(self, runs: Callable[[], bool]) -> None:
        self.now, self._runs = 0.0, runs

    def monotonic(self) -> float:
        return self.now

    def wait(self, connections: list[Any], timeout: float) -> list[Any]:
        ready = wait(connections, min(timeout, 0.05))
        if not ready and self._runs():
            self.now += 10
            assert self.now < 10 * LIMIT_S, "no limit was applied"
        return ready


LIMIT_S = 50
MakeClock = Callable[[Callable[[], bool]], Clock]


@pytest.fixture
def clock_of(monkeypatch: pytest.MonkeyPatch) -> MakeClock:
    def make(runs: Callable[[], bool]) -> Clock:
        clock = Clock(runs)
        monkeypatch.setattr(processes, "time", clock)
        monkeypatch.setattr(processes, "wait", clock.wait)
        return clock

    return make


def has_only(scorer: Scorer, number: int) -> bool:
    """Whether one response alone is being scored."""
    return [number] == [each for child in scorer._processes._children for each in child.deadlines]


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4])
def test_one_response_that_hangs_costs_its_limit_and_no_other_response(
    scorer_of: MakeScorer, clock_of: MakeClock, concurrency: int
) -> None:
    scorer = scorer_of(on_error="Drop", timeout_seconds=LIMIT_S, concurrency=concurrency)
    clock = clock_of(lambda: has_only(scorer, 40))

    results = scorer.score(many(256, at_40="hang"))

    assert LIMIT_S < clock.now < 3 * LIMIT_S
    assert [place for place, result in enumerate(results) if result.is_timeout] == [40]
    assert "exceeded timeoutSeconds (50 s) for prompt 140 of 'source', response 'hang'" in (results[40].error or "")
    assert sum(result.score for result in results) == 255


@pytest.mark.slow
def test_with_fail_a_response_that_hangs_is_a_timeout_error(scorer_of: MakeScorer, clock_of: MakeClock) -> None:
    scorer = scorer_of(timeout_seconds=LIMIT_S)
    clock_of(lambda: has_only(scorer, 1))

    with pytest.raises(RewardTimeoutError, match=r"for prompt 101 .*set reward.function.onError to Score or Drop"):
        scorer.score(many(5, at_1="hang"))


@pytest.mark.slow
def test_what_a_function_has_started_ends_with_it(scorer_of: MakeScorer, clock_of: MakeClock, tmp_path: Path) -> None:
    scorer = scorer_of(kwargs={"marks": str(tmp_path)}, on_error="Score", timeout_seconds=LIMIT_S)
    child = tmp_path / "child"
    clock_of(lambda: child.exists() and child.read_text() != "")

    scorer.score(items("child"))

    assert left_of([int(child.read_text())], limit_s=60) == []


@pytest.mark.slow
@pytest.mark.parametrize("text", ["hang", "stubborn"])
def test_a_coroutine_that_never_ends_is_named(scorer_of: MakeScorer, text: str) -> None:
    """Its own process ends it: its loop's clock passes the limit, and the parent's does not."""
    scorer = scorer_of("judged", kwargs={"others": 255}, on_error="Score", timeout_seconds=LATER_S / 2)

    results = scorer.score(many(256, at_7=text))

    assert [place for place, result in enumerate(results) if result.is_timeout] == [7]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["block", "exit"])
def test_a_coroutine_that_takes_its_event_loop_along_is_found_among_the_others(
    scorer_of: MakeScorer, clock_of: MakeClock, text: str, tmp_path: Path
) -> None:
    kwargs = {"marks": str(tmp_path)}
    scorer = scorer_of("judged", kwargs=kwargs, on_error="Score", error_score=-1.0, timeout_seconds=LIMIT_S)

    def is_blocked() -> bool:
        children = scorer._processes._children
        return any(7 in child.deadlines and (tmp_path / f"{child._process.pid}").exists() for child in children)

    clock_of(is_blocked)
    results = scorer.score(many(100, at_7=text))

    assert [place for place, result in enumerate(results) if result.error] == [7]
    assert results[7].is_timeout == (text == "block")
    assert sum(result.score for result in results) == 98


@pytest.mark.parametrize(("concurrency", "expected"), [(None, DEFAULT_CALLS), (5, 5)])
def test_calls_of_a_coroutine_function_wait_at_the_same_time(
    scorer_of: MakeScorer, concurrency: int | None, expected: int
) -> None:
    scorer = scorer_of("counts", kwargs={"expected": expected}, concurrency=concurrency, timeout_seconds=120)

    results = scorer.score(many(300))

    assert [result.error for result in results] == [None] * 300
    assert max(result.score for result in results) == expected


def test_a_coroutine_function_gives_dicts_in_order_with_its_arguments(scorer_of: MakeScorer) -> None:
    results = scorer_of("judged", kwargs={"bonus": 1.0}).score(items("a", "bbb", "cc"))

    assert [result.score for result in results] == [2.0, 4.0, 3.0]
    assert [result.extras for result in results] == [{"length": 1}, {"length": 3}, {"length": 2}]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("raise ValueError('no')", RewardImportError, "its import failed with ValueError: no"),
        ("import os; os._exit(7)", RewardImportError, "its process ended with exit code 7"),
        ("x = 1", RewardImportError, "has no function 'compute_score'"),
        (
            "def compute_score(**k): return 0\ndef check(data_sources): raise ValueError(f'not {data_sources}')",
            RewardRefusedError,
            r"not \['sums'\]",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(text)

    with pytest.raises(error, match=message):
        Scorer(FunctionSource(path=str(path))).start(["sums"])


@pytest.mark.slow
def test_the_processes_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    program = (
        "from ppojob_trainer.rewards import *\n"
        f"scorer = Scorer(FunctionSource(path={ODD!r}, kwargs={{'marks': {str(tmp_path)!r}}}))\n"
        "scorer.start()\n"
        "scorer.score([ScoreItem('s', 'hang', None, {}, 0)])\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program])
    while not (marks := list(tmp_path.iterdir())):
        assert worker.poll() is None
        time.sleep(0.05)

    worker.kill()
    worker.wait()

    assert left_of([int(os.path.basename(marks[0]))], limit_s=60) == []
