"""The reward functions that come with the trainer, on real tasks and text."""

import pytest

from ppojob_trainer.data.sources.reasoning_gym import ReasoningGymPrompts
from ppojob_trainer.rewards import FunctionSource, load_reward_function, reasoning_gym, vader_sentiment
from ppojob_trainer.rewards.extractors import EXTRACTORS, extract_answer


class TestExtractors:
    @pytest.mark.parametrize(
        ("extract", "text", "expected"),
        [
            ("whole", "  7 \n", "7"),
            ("whole", " \n", None),
            ("last_number", "3 + 4 = 7.", "7"),
            ("last_number", "5 - 9 = -4", "-4"),
            ("last_number", "10-3", "3"),
            ("last_number", "it is \N{MINUS SIGN}12", "-12"),
            ("last_number", "1,234 apples", "1234"),
            ("last_number", "pick 1, 2", "2"),
            ("last_number", "pi is 3.14", "3.14"),
            ("last_number", "-0.5", "-0.5"),
            ("last_number", "none", None),
            ("last_line", "So\nthe answer:\n 7 \n\n", "7"),
            ("last_line", "", None),
            ("boxed", r"thus \boxed{7}", "7"),
            ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}} .", r"\frac{1}{2}"),
            ("boxed", r"\boxed{ 7", None),
            ("boxed", "7", None),
        ],
    )
    def test_by_hand(self, extract, text, expected) -> None:
        assert extract_answer(text, extract) == expected

    def test_unknown(self) -> None:
        with pytest.raises(
            ValueError, match="unknown extract 'first': choose one of whole, last_number, last_line, boxed"
        ):
            extract_answer("1", "first")
        assert set(EXTRACTORS) == {"whole", "last_number", "last_line", "boxed"}


class TestReasoningGym:
    def score(self, prompt, solution: str, **options: str):
        return reasoning_gym.compute_score(
            data_source=prompt.data_source,
            solution_str=solution,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            **options,
        )

    @pytest.mark.parametrize(
        ("task", "config"),
        [
            ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
            ("products", {"min_digits": 1, "max_digits": 1}),
            ("gcd", {"max_numbers": 2, "max_value": 20}),
            ("letter_counting", {}),
        ],
    )
    def test_the_right_answer_has_1_and_a_wrong_one_less(self, task, config) -> None:
        prompts = ReasoningGymPrompts(task, 5, 3, config)
        for prompt in (prompts[index] for index in range(5)):
            assert self.score(prompt, prompt.ground_truth) == {"score": 1.0, "answer": prompt.ground_truth}
            sentence = f"Let me think: 12 and so it is {prompt.ground_truth}."
            assert self.score(prompt, sentence, extract="last_number")["score"] == 1.0
            assert self.score(prompt, "99999", extract="last_number")["score"] < 0.1
            assert self.score(prompt, "I do not know", extract="last_number") == {"score": 0.0, "answer": ""}

    def test_the_task_verifies_not_equality_of_text(self) -> None:
        # Several answers are right; the task's own verifier knows.
        prompt = ReasoningGymPrompts("countdown", 1, 1, {"min_numbers": 2, "max_numbers": 3})[0]
        assert self.score(prompt, prompt.ground_truth)["score"] == 1.0
        assert self.score(prompt, f"({prompt.ground_truth})")["score"] == 1.0

    def test_prompts_of_another_source_are_refused(self) -> None:
        with pytest.raises(ValueError, match="extra_info of a prompt from 'gsm8k' has no task and entry"):
            reasoning_gym.compute_score(data_source="gsm8k", solution_str="1", ground_truth="1", extra_info={})


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("What a wonderful, lovely film!", 0.5, 1),
        ("A terrible, boring mess.", -1, -0.5),
        ("The film has a name.", 0, 0),
        ("", 0, 0),
    ],
)
def test_vader_knows_good_from_bad(text, low, high) -> None:
    result = vader_sentiment.compute_score(data_source="", solution_str=text, ground_truth=None, extra_info={})
    assert low <= result["score"] <= high
    assert result.keys() == {"score", "positive", "neutral", "negative"}


@pytest.mark.parametrize(
    ("response", "source", "score", "is_right"),
    [
        ("{}", "gcd", 1.0, True),
        ("99999", "gcd", 0.5, False),
        ("99999", "products", 0.0, False),
        ("99999", "", 0.0, False),
    ],
)
def test_the_example_of_a_mixture_scores_by_its_source(
    response: str, source: str, score: float, is_right: bool
) -> None:
    kwargs = {"points_for_a_number": {"gcd": 0.5}}
    function = load_reward_function(FunctionSource(path="examples/14-mixture/reward.py", kwargs=kwargs))
    prompt = ReasoningGymPrompts("gcd", 1, 1, {"max_value": 20})[0]

    found = function(
        data_source=prompt.data_source,
        solution_str=response.format(prompt.ground_truth),
        ground_truth=prompt.ground_truth,
        extra_info={**prompt.extra_info, **({"mixture_source": source} if source else {})},
    )

    assert found == {"score": score, "is_right": is_right}
