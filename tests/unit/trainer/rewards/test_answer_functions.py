"""The reward functions for answers: GSM8K, mathematics, equal texts and numbers, sums of functions, verl's names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.rewards import (
    FunctionSource,
    RewardImportError,
    RewardRefusedError,
    by_data_source,
    exact_match,
    gsm8k,
    load_reward_function,
    math,
    numeric_match,
    weighted,
)
from ppojob_trainer.rewards.loader import check_reward_function

Compute = Callable[..., dict[str, Any]]


def score(module: Any, response: str, truth: Any, data_source: str = "s", **kwargs: Any) -> Any:
    return module.compute_score(
        data_source=data_source, solution_str=response, ground_truth=truth, extra_info={}, **kwargs
    )


@pytest.mark.parametrize(
    ("response", "truth", "kwargs", "expected"),
    [
        ("so 3 * 24 = 72\n#### 72", "72", {}, 1.0),
        ("#### 1,234", "1234", {}, 1.0),
        ("#### 71", "72", {}, 0.0),
        ("#### 71", "72", {"format_score": 0.1}, 0.1),
        ("the answer is 72", "72", {"format_score": 0.1}, 0.0),
        ("#### 72" + " " * 300, "72", {}, 0.0),
        ("#### 5 then #### 72", "72", {"score": 2.0}, 2.0),
        ("#### 72", "She has 3 boxes of 24: 72\n#### 72", {}, 1.0),
        ("the answer is 72", "72", {"method": "flexible"}, 1.0),
        ("it is 72 .", "72", {"method": "flexible"}, 1.0),
        ("none", "72", {"method": "flexible", "format_score": 0.1}, 0.0),
        (". .", "72", {"method": "flexible", "format_score": 0.1}, 0.1),
    ],
)
def test_gsm8k(response: str, truth: str, kwargs: dict[str, Any], expected: float) -> None:
    assert score(gsm8k, response, truth, **kwargs)["score"] == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        ("the answer is 1/2", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{72}", r"thus it is \boxed{72}", 1.0),
        (r"\boxed{71}", "72", 0.0),
        ("I do not know", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_math_compares_as_mathematics(response: str, truth: str, expected: float) -> None:
    # Generous, because the limit is of wall time.
    assert score(math, response, truth, limit_seconds=120)["score"] == expected


def test_math_loads_before_it_counts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    verify = math.verify
    monkeypatch.setattr(math, "verify", lambda *args, **limit: limits.append(limit) or verify(*args, **limit))
    math._load_slow_parts.cache_clear()
    for _ in range(2):
        assert score(math, r"\boxed{7}", "7", limit_seconds=120)["score"] == 1.0
    assert [limit["timeout_seconds"] for limit in limits] == [None, 120, 120]


def test_math_says_what_it_read_and_has_scores_of_ones_own() -> None:
    assert score(math, r"\boxed{7}", "7", score=2.0) == {"score": 2.0, "answer": "7", "is_answered": True}
    assert score(math, "no", "7", wrong_score=-1.0) == {"score": -1.0, "answer": "", "is_answered": False}
    with pytest.raises(ValueError, match="the ground truth '' is not LaTeX"):
        score(math, "7", "")


@pytest.mark.parametrize(
    ("response", "truth", "kwargs", "expected"),
    [
        (" Paris\n", "Paris", {}, 1.0),
        ("New  York", "New York", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("I think:\nParis", "Paris", {"extract": "last_line"}, 1.0),
        ("NYC", ["New York", "NYC"], {}, 1.0),
        ("7", 7, {}, 1.0),
        ("", "Paris", {"wrong_score": -1.0}, -1.0),
    ],
)
def test_exact_match(response: str, truth: Any, kwargs: dict[str, Any], expected: float) -> None:
    assert score(exact_match, response, truth, **kwargs)["score"] == expected


@pytest.mark.parametrize(
    ("response", "truth", "kwargs", "expected"),
    [
        ("it is 3.0.", "3", {}, 1.0),
        ("1,234 apples", 1234, {}, 1.0),
        ("about 3.14", "3.14159", {}, 0.0),
        ("about 3.14", "3.14159", {"relative_tolerance": 0.01}, 1.0),
        ("0.001", "0", {"absolute_tolerance": 0.01}, 1.0),
        ("3 of 4", "3", {"extract": "whole"}, 0.0),
        ("$5", "5", {"extract": "whole"}, 1.0),
        ("none", "3", {"wrong_score": -1.0}, -1.0),
    ],
)
def test_numeric_match(response: str, truth: Any, kwargs: dict[str, Any], expected: float) -> None:
    assert score(numeric_match, response, truth, **kwargs)["score"] == expected


@pytest.mark.parametrize(
    ("module", "truth", "message"),
    [(exact_match, None, "has no ground truth: set groundTruthColumn"), (numeric_match, "x", "'x' is not a number")],
)
def test_a_ground_truth_that_is_none_is_named(module: Any, truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(module, "7", truth)


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "words.py"
    path.write_text(
        "async def compute_score(*, solution_str, most=10, **_):\n"
        "    number = len(solution_str.split())\n"
        "    return {'score': float(number <= most), 'number': number}\n"
    )
    return str(path)


def test_a_weighted_sum_keeps_each_score(words: str) -> None:
    functions = [
        {"name": "correct", "module": "ppojob_trainer.rewards.gsm8k", "kwargs": {"method": "flexible"}},
        {"name": "short", "weight": -0.5, "path": words, "kwargs": {"most": 3}},
    ]

    assert score(weighted, "it is 72", "72", functions=functions) == {
        "score": 0.5,
        "correct": 1.0,
        "correct/answer": "72",
        "short": 1.0,
        "short/number": 3,
    }
    assert score(weighted, "so it is 72", "72", functions=functions)["score"] == 1.0


GSM8K = {"name": "a", "module": "ppojob_trainer.rewards.gsm8k"}


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "kwargs.functions is empty"),
        (["gsm8k"], r"kwargs.functions\[0\]: unknown gsm8k; the keys are name, weight"),
        ([{**GSM8K, "wieght": 1}], r"kwargs.functions\[0\]: unknown wieght"),
        ([GSM8K, GSM8K], r"kwargs.functions\[1\].name is 'a': give each function another name"),
        ([{**GSM8K, "name": "score"}], r"name is 'score'"),
        ([{**GSM8K, "weight": "1"}], "weight is '1': it must be a number"),
        ([{"name": "a"}], r"reward.function.kwargs.functions \(a\): set exactly one of module and path"),
        ([{**GSM8K, "kwargs": {"methd": "x"}}], "cannot be called with"),
        ([{**GSM8K, "kwargs": {"method": "x"}}], "unknown method 'x': choose one of strict, flexible"),
    ],
)
def test_mistakes_in_a_weighted_sum_are_named_at_the_start(functions: list[Any], message: str) -> None:
    source = FunctionSource("ppojob_trainer.rewards.weighted", kwargs={"functions": functions})

    load_reward_function(source)
    with pytest.raises((RewardRefusedError, RewardImportError), match=message):
        check_reward_function(source, ["openai/gsm8k"])


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        ("gsm8k", {"method": "x"}, "unknown method 'x'"),
        ("exact_match", {"extract": "x"}, "unknown extract 'x'"),
        ("numeric_match", {"extract": "x"}, "unknown extract 'x'"),
        ("numeric_match", {"relative_tolerance": -1}, "kwargs.relative_tolerance is -1: it must be 0 or more"),
    ],
)
def test_wrong_arguments_are_refused_at_the_start(module: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardRefusedError, match=message):
        check_reward_function(FunctionSource(f"ppojob_trainer.rewards.{module}", kwargs=kwargs), [])


@pytest.mark.parametrize(
    ("data_source", "response", "truth", "expected"),
    [
        ("openai/gsm8k", "#### 72", "72", 1.0),
        ("openai/gsm8k", "72", "72", 0.0),
        ("lighteval/MATH", r"\boxed{\frac12}", "0.5", 1.0),
        ("numina_olympiads", r"\boxed{7}", "8", 0.0),
        ("math_dapo", "Answer: 7", "7", 1.0),
        ("aime2024", "Answer: 8", "7", -1.0),
    ],
)
def test_verls_data_sources_have_their_functions(data_source: str, response: str, truth: str, expected: float) -> None:
    assert score(by_data_source, response, truth, data_source)["score"] == expected


def test_a_data_source_without_a_function_is_refused_at_the_start() -> None:
    source = FunctionSource("ppojob_trainer.rewards.by_data_source")

    check_reward_function(source, ["openai/gsm8k", "aime24", "reasoning_gym/products"])
    with pytest.raises(RewardRefusedError, match=r"data source 'codecontests'; there are some for openai/gsm8k"):
        check_reward_function(source, ["openai/gsm8k", "codecontests"])
