"""Problems that reasoning-gym makes: a task's generator, with a seed. Nothing is read and nothing is downloaded.

Problem i depends on seed and i alone, so they are made when they are asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import PromptRecord

with warnings.catch_warnings():
    # A dependency compares with `is "text"`; where warnings are errors, that would stop the import.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym  # type: ignore[import-untyped]
    from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]


class ReasoningGymPrompts:
    """A `PromptSource`. extra_info: task, config and entry, which the verifier in `rewards.reasoning_gym` reads."""

    def __init__(self, task: str, size: int, seed: int, config: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            task: such as chain_sum.
            config: parameters of the task's own configuration.

        Raises:
            DataError: unknown task, unknown parameter, or values that the task refuses.
        """
        self._task = task
        self._seed = seed
        self._config = dict(config or {})
        if task not in DATASETS:
            raise DataError(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
        reserved = {"size", "seed"} & self._config.keys()
        if reserved:
            raise DataError(f"reasoningGym.config: {' and '.join(sorted(reserved))} have fields of their own")
        try:
            self._problems = reasoning_gym.create_dataset(task, size=size, seed=seed, **self._config)
        except (TypeError, ValueError, AssertionError) as error:
            raise DataError(f"reasoning-gym task {task!r} refuses the config {self._config}: {error}") from error

    @property
    def name(self) -> str:
        """Such as reasoning_gym/chain_sum; the data_source of its prompts too."""
        return f"reasoning_gym/{self._task}"

    def __len__(self) -> int:
        return len(self._problems)

    @property
    def is_shared(self) -> bool:
        """Always: nothing is in memory."""
        return True

    def identity(self) -> dict[str, Any]:
        """Return the task, its parameters, and the version of the generator."""
        problems = [self._task, len(self), self._seed, self._config]
        return {"reasoning_gym": problems, "version": version("reasoning-gym")}

    def __getitem__(self, index: int) -> PromptRecord:
        entry = self._problems[index]
        return PromptRecord(
            prompt=entry["question"],
            data_source=self.name,
            ground_truth=entry["answer"],
            extra_info={"task": self._task, "config": self._config, "entry": dict(entry)},
        )
