"""A judge that has to wait, as verl's users write it: a coroutine function that returns a dict."""

import asyncio
from typing import Any


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    await asyncio.sleep(0.01)
    small = sum(character.islower() for character in solution_str)
    return {"score": small / max(1, len(solution_str)), "small": small, "is_right": solution_str == ground_truth}
