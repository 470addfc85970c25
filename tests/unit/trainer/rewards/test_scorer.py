"""Scoring a batch: order, concurrency, failures with their prompt, time limits."""

import asyncio
import functools
import threading
import time

import pytest

from ppojob_trainer.rewards import RewardFunctionError, RewardTimeoutError, ScoreItem, Scorer
from ppojob_trainer.rewards.scorer import MAX_CONCURRENT


def items(*texts: str) -> list[ScoreItem]:
    return [ScoreItem("source", text, None, {}, index=100 + place) for place, text in enumerate(texts)]


def length(*, solution_str: str, **_: object) -> float:
    return len(solution_str)


def picky(*, solution_str: str, **_: object) -> float:
    if "bad" in solution_str:
        raise KeyError("bad")
    return 1.0


@pytest.mark.parametrize("num_threads", [1, 3, 50])
def test_results_come_in_the_order_of_the_items(num_threads: int) -> None:
    def slow_at_first(*, solution_str: str, **_: object) -> float:
        time.sleep(0.02 if len(solution_str) == 1 else 0)
        return len(solution_str)

    results = Scorer(slow_at_first, num_threads=num_threads).score(items(*("x" * size for size in range(1, 21))))
    assert [result.score for result in results] == list(range(1, 21))


def test_threads_work_at_the_same_time() -> None:
    barrier = threading.Barrier(4, timeout=10)

    def meets_the_others(**_: object) -> float:
        barrier.wait()
        return 1.0

    assert len(Scorer(meets_the_others, num_threads=4).score(items(*"abcd"))) == 4


def test_the_function_gets_verls_arguments() -> None:
    seen = {}

    def record(**arguments: object) -> float:
        seen.update(arguments)
        return 0

    Scorer(record).score([ScoreItem("gsm8k", "answer", "4", {"a": 1}, 7)])
    assert seen == {"data_source": "gsm8k", "solution_str": "answer", "ground_truth": "4", "extra_info": {"a": 1}}


def test_a_dict_keeps_its_other_entries() -> None:
    result = Scorer(lambda **_: {"score": True, "answer": "4"}).score(items("a"))[0]
    assert (result.score, result.extras, result.error) == (1.0, {"answer": "4"}, None)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_failure_names_its_prompt(num_threads: int) -> None:
    with pytest.raises(
        RewardFunctionError, match=r"raised KeyError: 'bad' for prompt 102 of 'source', response 'bad'"
    ) as caught:
        Scorer(picky, num_threads=num_threads).score(items("a", "b", "bad", "c"))
    assert caught.value.index == 102
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failure_can_be_a_score_instead() -> None:
    results = Scorer(picky, on_error="Score", error_score=-1.0).score(items("a", "bad", "c"))
    assert [result.score for result in results] == [1.0, -1.0, 1.0]
    assert "KeyError" in results[1].error
    assert results[0].error is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None for prompt 100: a score is a finite number"),
        ("0.5", "returned '0.5'"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ([1, 2], r"returned \[1, 2\]"),
        ({"value": 1}, r"a dict without 'score' for prompt 100: it has \['value'\]"),
        ({"score": None}, "returned None"),
    ],
)
def test_what_is_no_score_is_refused(value, message) -> None:
    with pytest.raises(RewardFunctionError, match=message):
        Scorer(lambda **_: value).score(items("a"))


def test_a_function_that_exits_does_not_end_in_silence() -> None:
    def leave(**_: object) -> float:
        raise SystemExit(3)

    with pytest.raises(RewardFunctionError, match="raised SystemExit: 3 for prompt 100"):
        Scorer(leave).score(items("a"))


def test_a_function_that_hangs_is_named() -> None:
    release = threading.Event()

    def hang(*, solution_str: str, **_: object) -> float:
        if solution_str == "hang":
            release.wait(60)
        return 1.0

    started = time.monotonic()
    with pytest.raises(
        RewardTimeoutError, match=r"did not score 3 responses within 1 s; 2 were done.*busy with prompt 101"
    ):
        Scorer(hang, num_threads=2, timeout_seconds=1).score(items("a", "hang", "c"))
    release.set()
    assert time.monotonic() - started < 30


def test_nothing_to_score() -> None:
    assert Scorer(length).score([]) == []


@pytest.mark.parametrize("arguments", [{"num_threads": 0}, {"timeout_seconds": 0}])
def test_settings_are_checked(arguments) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Scorer(length, **arguments)


async def judged(*, solution_str: str, bonus: float = 0.0, **_: object) -> dict[str, float]:
    await asyncio.sleep(0.05)
    if "bad" in solution_str:
        raise KeyError("bad")
    return {"score": len(solution_str) + bonus, "length": len(solution_str)}


def test_calls_of_a_coroutine_function_wait_at_the_same_time() -> None:
    together = 0
    most = 0

    async def counts(**_: object) -> float:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.02)
        together -= 1
        return 1.0

    results = Scorer(counts).score(items(*"x" * 200))

    assert len(results) == 200
    assert most == MAX_CONCURRENT


def test_a_coroutine_function_gives_dicts_in_order_with_bound_arguments() -> None:
    results = Scorer(functools.partial(judged, bonus=1.0)).score(items("a", "bbb", "cc"))
    assert [result.score for result in results] == [2.0, 4.0, 3.0]
    assert [result.extras for result in results] == [{"length": 1}, {"length": 3}, {"length": 2}]


def test_an_object_with_a_coroutine_call_is_awaited() -> None:
    class Judge:
        async def __call__(self, **_: object) -> float:
            await asyncio.sleep(0)
            return 2.0

    assert Scorer(Judge()).score(items("a"))[0].score == 2.0


def test_a_coroutine_functions_failure_names_its_prompt_or_is_a_score() -> None:
    with pytest.raises(RewardFunctionError, match=r"raised KeyError: 'bad' for prompt 101") as caught:
        Scorer(judged).score(items("a", "bad"))
    assert isinstance(caught.value.__cause__, KeyError)
    results = Scorer(judged, on_error="Score", error_score=-2.0).score(items("a", "bad"))
    assert [result.score for result in results] == [1.0, -2.0]


def test_a_coroutine_function_that_hangs_is_named() -> None:
    async def hangs(*, solution_str: str, **_: object) -> float:
        await asyncio.sleep(60 if solution_str == "hang" else 0)
        return 1.0

    with pytest.raises(RewardTimeoutError, match=r"2 were done.*busy with prompt 101"):
        Scorer(hangs, timeout_seconds=1).score(items("a", "hang", "c"))
