"""The reward of a mixture: 1 for a right answer; for a wrong number, what the prompt's source gives for it."""

import re

from ppojob_trainer.rewards import reasoning_gym


def compute_score(data_source, solution_str, ground_truth, extra_info, points_for_a_number):
    found = reasoning_gym.compute_score(
        data_source=data_source,
        solution_str=solution_str,
        ground_truth=ground_truth,
        extra_info=extra_info,
        extract="last_number",
    )
    is_right = found["score"] == 1
    # Prompts of validation have no such key.
    source = extra_info.get("mixture_source", "")
    for_a_number = points_for_a_number.get(source, 0.0) if re.search(r"\d", solution_str) else 0.0
    return {"score": 1.0 if is_right else for_a_number, "is_right": is_right}
