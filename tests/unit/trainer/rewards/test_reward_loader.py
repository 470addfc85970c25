"""From a PPOJob's reward.function to a callable: what works, and that each mistake is named with its remedy."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.rewards import FunctionSource, RewardImportError, RewardRefusedError, load_reward_function
from ppojob_trainer.rewards.loader import check_reward_function

CALL: dict[str, Any] = {"data_source": "d", "solution_str": "s", "ground_truth": "g", "extra_info": {}}


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, name: str = "reward.py") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def load(path: Path | str | None = None, **fields: Any) -> Any:
    return load_reward_function(FunctionSource(path=None if path is None else str(path), **fields))


def test_a_file_with_the_default_name(write) -> None:
    path = write(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
    )
    assert load(path=path)(**CALL) == 1


def test_another_name_and_keyword_arguments(write) -> None:
    path = write(
        "def mine(data_source, solution_str, ground_truth, extra_info=None, extract='whole', bonus=0):\n"
        "    return {'score': bonus, 'extract': extract}\n"
    )
    function = load(path=path, name="mine", extract="boxed", kwargs={"bonus": 2})
    assert function(**CALL) == {"score": 2, "extract": "boxed"}
    assert load(path=path, name="mine")(**CALL) == {"score": 0, "extract": "whole"}


def test_a_file_may_define_dataclasses(write) -> None:
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def compute_score(**anything):\n    return Score(3.0).value\n"
    )
    assert load(path=path)(**CALL) == 3.0


def test_an_installed_module() -> None:
    function = load(module="ppojob_trainer.rewards.vader_sentiment")
    assert function(**{**CALL, "solution_str": "This is wonderful."})["score"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "set exactly one of module and path"),
        ({"module": "a", "path": "b"}, "set exactly one of module and path"),
        (
            {"module": "no_such_package.rewards"},
            r"module 'no_such_package.rewards': No module named 'no_such_package'.*Install",
        ),
        ({"path": "/nowhere/reward.py"}, r"path '/nowhere/reward.py': there is no such file where the trainer runs"),
        (
            {"module": "json", "name": "score"},
            "json has no function 'score': set reward.function.name to one of .*dumps",
        ),
        ({"module": "ppojob_trainer", "name": "score"}, "it defines no function at all"),
        ({"module": "sys", "name": "version"}, "'version' in sys is a str, not a function"),
        (
            {"module": "ppojob_trainer.rewards.vader_sentiment", "extract": "boxed"},
            "compute_score of ppojob_trainer.rewards.vader_sentiment has the signature .* extract=: got an unexpected "
            "keyword argument 'extract'",
        ),
        (
            {"module": "json", "name": "dumps", "kwargs": {"bonus": 1}},
            r"^reward.function: dumps of json has the signature .*Define dumps\(data_source, solution_str, "
            r"ground_truth, extra_info, bonus\), or correct reward.function.kwargs and extract$",
        ),
    ],
)
def test_mistakes_are_named(arguments, message) -> None:
    with pytest.raises(RewardImportError, match=message):
        load(**arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_thing\n", "No module named 'no_such_thing'"),
        ("def compute_score(:\n", r"SyntaxError: .*reward\.py, line 1"),
        ("raise RuntimeError('no licence')\n", "its import failed with RuntimeError: no licence"),
        (
            "def compute_score(response):\n    return 0\n",
            r"signature \(response\) and cannot be called with data_source=",
        ),
        (
            "def other(**k):\n    return 0\n",
            "has no function 'compute_score': set reward.function.name to one of other",
        ),
    ],
)
def test_mistakes_in_a_file_are_named(write, text, message) -> None:
    before = set(sys.modules)
    with pytest.raises(RewardImportError, match=message):
        load(path=write(text))
    if "def other" not in text and "compute_score" not in text:
        assert not {name for name in set(sys.modules) - before if name.startswith("ppojob_user_")}


def test_a_file_that_is_not_python(write) -> None:
    with pytest.raises(RewardImportError, match=r"must end in \.py"):
        load(path=write("x", "reward.txt"))


def test_a_coroutine_function_is_one_too(write) -> None:
    function = load(path=write("async def compute_score(**k):\n    return 3\n"))

    async def scored() -> object:
        return await function(**CALL)

    assert asyncio.run(scored()) == 3


def test_verls_own_kind_of_file_runs_unchanged(write) -> None:
    # The shape of verl's reward scores: positional names, extra_info optional, further options with defaults.
    path = write(
        "import re\n\n"
        "def extract_solution(solution_str, method='strict'):\n"
        "    found = re.findall(r'#### (-?[0-9.,]+)', solution_str)\n"
        "    return found[-1].replace(',', '') if found else None\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.1, score=1.0):\n"
        "    answer = extract_solution(solution_str=solution_str)\n"
        "    if answer is None:\n        return 0\n"
        "    return score if answer == ground_truth else format_score\n"
    )
    function = load(path=path)
    told: dict[str, Any] = {"data_source": "openai/gsm8k", "ground_truth": "72", "extra_info": {"index": 0}}
    scores = [function(solution_str=text, **told) for text in ("so #### 72", "so #### 71", "72")]
    assert scores == [1.0, 0.1, 0]


def test_a_modules_own_check_gets_the_data_sets_and_the_arguments_and_may_refuse_them(write) -> None:
    path = write(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, words=1):\n    return 0\n"
        "def check(data_sources, words=1):\n"
        "    if 'sums' not in data_sources or words < 1:\n"
        "        raise ValueError(f'{data_sources} and {words} words')\n"
    )
    check_reward_function(FunctionSource(path=str(path), kwargs={"words": 2}), ["sums"])
    with pytest.raises(RewardRefusedError, match=r"reward.function \(.*reward.py\): \['sums'\] and 0 words"):
        check_reward_function(FunctionSource(path=str(path), kwargs={"words": 0}), ["sums"])


def test_a_module_without_a_check_refuses_nothing() -> None:
    check_reward_function(FunctionSource(module="ppojob_trainer.rewards.vader_sentiment"), ["anything"])
