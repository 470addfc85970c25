"""The reward of the tutorial: 1 for the right number, and a bonus for a brief response."""

import re

NUMBER = re.compile(r"-?\d+")


def compute_score(data_source, solution_str, ground_truth, extra_info, brief_bonus=0.1, most_words=12):
    """Score one response.

    Args:
        ground_truth: GSM8K's answer, whose number is after `####`.
        brief_bonus: added if the response has at most `most_words` words.

    Returns:
        `score`, and two numbers that become the metrics reward/is_right/mean and reward/is_brief/mean.
    """
    truth = ground_truth.rpartition("####")[2].strip()
    numbers = NUMBER.findall(solution_str)
    is_right = bool(numbers) and numbers[-1] == truth
    is_brief = 0 < len(solution_str.split()) <= most_words
    return {"score": is_right + brief_bonus * is_brief, "is_right": is_right, "is_brief": is_brief}
